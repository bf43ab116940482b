"""Live detection on a real GPU: synchronizations at their lines, with the blocked time that CUPTI measures."""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import instrument
from instrument.base.errors import SyncError
from instrument.syncs.live import detect_syncs, no_syncs
from tests.support import programs

pytestmark = pytest.mark.gpu


def here() -> int:
    return sys._getframe(1).f_lineno


@pytest.fixture
def x() -> torch.Tensor:
    tensor = torch.ones(1000, device="cuda")
    (tensor.sum() > 0).item()  # compiles its kernels
    torch.cuda.synchronize()
    return tensor


@functools.cache
def cycles_per_ms() -> float:
    """Return the GPU's clock cycles per millisecond, measured under load."""
    rates: list[float] = []
    for _ in range(50):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        end.synchronize()
        rates.append(20_000_000 / begin.elapsed_time(end))
        if len(rates) > 10 and abs(rates[-1] - rates[-6]) < 0.01 * rates[-1]:
            break
    return rates[-1]


def keep_busy(ms: float) -> None:
    """Keep the GPU busy for about ``ms`` milliseconds."""
    torch.cuda._sleep(int(ms * cycles_per_ms()))


def test_known_synchronizations(x: torch.Tensor) -> None:
    """Each synchronization is found at its line, with its operation and a time."""
    total, pinned = x.sum(), torch.ones(1000, pin_memory=True)
    with detect_syncs() as syncs:
        line = here()
        total.item()
        x.cpu()
        x[x > 0]
        torch.cuda.synchronize()
        if total > 0:
            pass
        f"{total}"
        x.tolist()
        torch.ones(1000).to("cuda")
        torch.empty(20_000, device="cuda").copy_(torch.ones(20_000), non_blocking=True)
        torch.cuda.current_stream().synchronize()
        pinned.to("cuda", non_blocking=True)  # does not wait
    names = [
        "item",
        "cpu",
        "getitem",
        "synchronize",
        "bool",
        "-",
        "format",
        "tolist",
        "to",
        "copy_",
        "synchronize",
    ]
    expected = [(line + index, op, 1) for index, op in enumerate(names, 1) if op != "-"]
    found = sorted(syncs.findings, key=lambda found: found.site.line if found.site else 0)
    assert expected == [(one.site.line if one.site else 0, one.op, one.count) for one in found]
    assert all(one.timed == 1 for one in found)
    by_op = {one.op: one for one in found}
    assert ("D2H", 4000) == (by_op["cpu"].direction, by_op["cpu"].bytes)
    assert ("H2D", 4000) == (by_op["to"].direction, by_op["to"].bytes)


def test_clean_step(x: torch.Tensor) -> None:
    """A step without synchronizations has no findings, also at level "error" and inside `no_syncs`."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(32, 64, device="cuda")
    labels = torch.zeros(32, dtype=torch.long, device="cuda")

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(model(batch), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.where(loss > 1, loss, 0.0)

    step()
    with detect_syncs("error") as syncs, no_syncs():
        step()
    assert [] == syncs.findings


def test_state_is_restored(x: torch.Tensor) -> None:
    """Torch's mode, the warning filters and wrapped functions are restored, also after a `SyncError`."""
    before = torch.cuda.get_sync_debug_mode(), warnings.filters, list(warnings.filters), torch.cuda.synchronize
    line = here() + 2
    with pytest.raises(SyncError, match=f"test_gpu_syncs.py:{line}: "), no_syncs():
        x.sum().item()
    after = torch.cuda.get_sync_debug_mode(), warnings.filters, list(warnings.filters), torch.cuda.synchronize
    assert before == after
    assert "to" not in vars(torch.Tensor)


class SynchronizingIdentity(torch.autograd.Function):
    """Synchronizes in its backward pass, which runs on an autograd thread."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient.sum().item()
        return gradient


def test_backward_in_python(x: torch.Tensor) -> None:
    """A synchronization in a Python backward is found at its line, with the node and the enclosing region."""
    with detect_syncs() as syncs, instrument.annotate("train"):
        SynchronizingIdentity.apply(x.clone().requires_grad_()).sum().backward()
    (found,) = syncs.findings
    assert ("item", "SynchronizingIdentityBackward", 1, ("train",)) == (
        found.op,
        found.backward,
        found.timed,
        found.region,
    )
    assert found.site is not None
    assert "gradient.sum().item()" == found.site.code


def test_backward_in_cpp(x: torch.Tensor) -> None:
    """A synchronization in one of torch's C++ nodes is found at the line that called backward."""
    value = torch.ones(8, requires_grad=True)
    result = value.cuda().sum()  # its backward copies to the CPU
    with detect_syncs() as syncs, instrument.annotate("train"):
        line = here() + 1
        result.backward()
    (found,) = syncs.findings
    assert found.site is not None
    assert (line, "backward", ("train",)) == (found.site.line, found.op, found.region)
    assert "ToCopyBackward" in (found.backward or "")


@pytest.mark.parametrize("ms", [2, 5, 50])
@pytest.mark.parametrize("how", ["item", "cpu", "synchronize", "stream", "event", "getitem"])
def test_blocked_time_matches_cupti(x: torch.Tensor, ms: float, how: str, tmp_path: Path) -> None:
    """The blocked time is within 10% of the time that CUPTI measures for the same CUDA calls.

    It is that of the operation, which launches kernels too: what it takes on an idle GPU may be added.
    """
    total, event, mask = x.sum(), torch.cuda.Event(), x > 0
    calls: dict[str, Callable[[], Any]] = {
        "item": lambda: total.item(),
        "cpu": lambda: x.cpu(),
        "synchronize": lambda: torch.cuda.synchronize(),
        "stream": lambda: torch.cuda.current_stream().synchronize(),
        "event": lambda: event.synchronize(),
        "getitem": lambda: x[mask],
    }
    keep_busy(1)
    with detect_syncs():
        calls[how]()  # the first call reads the source line
    torch.cuda.synchronize()

    def measured() -> tuple[int, int, int]:
        """Return the blocked time, that on an idle GPU, and the longest of CUPTI's calls that wait."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            with detect_syncs() as idle:
                calls[how]()
            torch.cuda.synchronize()
            with detect_syncs() as syncs, torch.profiler.record_function("planted"):
                keep_busy(ms)
                event.record()
                calls[how]()
            torch.cuda.synchronize()
        path = tmp_path / "trace.json"
        prof.export_chrome_trace(str(path))
        runtime = instrument.read_trace(path).runtime
        kinds = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "MemcpyAsync", "MemcpyWithStream")
        longest = max(
            int(took)
            for name, took in zip(runtime.text("name"), runtime.duration_ns.tolist(), strict=True)
            if name.startswith(("cuda", "hip")) and name.endswith(kinds)
        )
        (found,), (alone,) = syncs.findings, idle.findings
        assert found.blocked_ns is not None
        assert alone.blocked_ns is not None
        return found.blocked_ns, alone.blocked_ns, longest

    # The nearest of three: other programs may take the CPU's time before the call, or after it has returned.
    blocked, alone, longest = min(
        (measured() for _ in range(3)), key=lambda times: (times[2] < 0.5e6 * ms, abs(times[0] - times[2]))
    )
    assert longest >= 0.5e6 * ms
    assert 0.9 * longest <= blocked <= 1.1 * longest + alone


@pytest.mark.parametrize("arguments", [{"level": "error"}, {"budget": 0}], ids=["error", "budget"])
def test_end_of_a_window(x: torch.Tensor, tmp_path: Path, arguments: dict[str, Any]) -> None:
    """The profiler's synchronization is not a finding and uses no budget; the window has its kernels."""
    plan = instrument.schedule("1-2")
    with detect_syncs(**arguments) as syncs, instrument.profile(tmp_path, schedule=plan) as prof:
        for _ in range(4):
            keep_busy(2)
            for _ in range(100):
                x.mul(2)
            prof.step()
        assert not torch.autograd._profiler_enabled()
    assert ([], []) == (syncs.findings, syncs.report.exceeded)
    assert [("recorded", None)] == [(window["status"], window["reason"]) for window in prof.windows]
    (path,) = tmp_path.rglob("*.pt.trace.json.gz")
    assert len(instrument.read_trace(path).gpu) >= 100


def test_end_of_a_torch_profiler(x: torch.Tensor) -> None:
    """The synchronization at the end of the user's own torch profiler is not a finding."""
    with detect_syncs("error") as syncs, no_syncs():
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
            x.mul(2)
        assert not torch.autograd._profiler_enabled()
        with torch.autograd.profiler.emit_nvtx():
            x.mul(2)
    assert [] == syncs.findings


def test_synchronizations_inside_a_window(x: torch.Tensor, tmp_path: Path) -> None:
    """Synchronizations of the program inside a window are found, each in its step."""
    plan = instrument.schedule("1-2")
    with detect_syncs(every=1) as syncs, instrument.profile(tmp_path, schedule=plan) as prof:
        for _ in range(4):
            line = here() + 1
            x.sum().item()
            torch.cuda.synchronize()
            prof.step()
    found = [(one.op, one.site.line if one.site else 0, one.count, one.timed) for one in syncs.findings]
    assert [("item", line, 4, 4), ("synchronize", line + 1, 4, 4)] == sorted(found)
    assert ["recorded"] == [window["status"] for window in prof.windows]


def result_of(script: str, folder: Path, **variables: str) -> Any:
    """Run ``script`` in a process and return the JSON on its last line of output."""
    command = programs.python(programs.program(script, folder), [str(folder)])
    done = programs.run(command, programs.environment(variables))
    return json.loads(done.stdout.splitlines()[-1])


HIDES = """
    import json
    import os

    import torch

    import instrument

    with instrument.detect_syncs("error") as syncs, instrument.no_syncs():
        torch.ones(3).to(torch.float64, non_blocking=True)
        syncs.step()
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""
    print(json.dumps([torch.cuda.is_available(), torch.cuda.is_initialized(), syncs.report.coverage]))
"""


def test_environment_changes_before_cuda_initializes(tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES set inside a detector takes effect, as CUDA initializes later."""
    available, initialized, (sentence,) = result_of(HIDES, tmp_path)
    assert (False, False) == (available, initialized)
    assert sentence.startswith("The program never initialized CUDA")


FORKS = """
    import json
    import os

    import torch

    import instrument

    detector = instrument.detect_syncs()
    detector.start()
    child = os.fork()
    torch.ones(1000, device="cuda").sum().item()
    detector.stop()
    found = [[one.op, one.count, one.timed] for one in detector.findings]
    if not child:
        os._exit(found != [["item", 1, 1]])
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([found, code, torch.cuda.get_sync_debug_mode()]))
"""


def test_fork_inside_a_detector(tmp_path: Path) -> None:
    """Parent and child use CUDA after the fork, and each finds its first synchronization."""
    assert [[["item", 1, 1]], 0, 0] == result_of(FORKS, tmp_path)


STARTS = """
    import json
    import threading

    import torch

    import instrument

    inside, started, waited = threading.Event(), threading.Event(), []

    def slow():
        inside.set()
        waited.append(started.wait(60))

    torch.cuda._lazy_call(slow)
    thread = threading.Thread(target=torch.cuda.init)
    thread.start()
    inside.wait()
    with instrument.detect_syncs() as syncs:
        started.set()
        thread.join()
        torch.ones(1000, device="cuda").sum().item()
    found = [[one.op, one.count, one.timed] for one in syncs.findings]
    print(json.dumps([waited, found, torch.cuda.get_sync_debug_mode()]))
"""


def test_detector_starts_during_initialization_on_another_thread(tmp_path: Path) -> None:
    """The detector starts without waiting for the initialization, and finds the first synchronization after it."""
    assert [[True], [["item", 1, 1]], 0] == result_of(STARTS, tmp_path)


RAISES = """
    import json

    import torch

    import instrument
    from instrument.base.errors import SyncError

    message = ""
    try:
        with instrument.detect_syncs("error"):
            total = torch.ones(1000, device="cuda").sum()
            total.item()
    except SyncError as error:
        message = str(error)
    print(json.dumps([message, torch.cuda.get_sync_debug_mode()]))
"""


def test_first_synchronization_of_a_program_raises(tmp_path: Path) -> None:
    """At level "error" the first synchronization raises when the detector started before CUDA was used."""
    message, mode = result_of(RAISES, tmp_path)
    assert "`total.item()` makes the CPU wait for the GPU" in message
    assert 0 == mode


BREAKS = """
    import json
    import os
    import sys

    import torch

    import instrument

    x, bad = torch.zeros(3, device="cuda"), torch.tensor([5], device="cuda")
    torch.cuda.synchronize()
    raised = ""
    try:
        with instrument.profile(sys.argv[1], schedule=instrument.schedule("1-2")) as prof:
            for number in range(4):
                if number == 2:
                    x[bad]  # fails when the GPU runs it
                prof.step()
    except Exception as error:
        raised = repr(error)
    print(json.dumps([raised, torch.autograd._profiler_enabled(), [window["status"] for window in prof.windows]]))
    sys.stdout.flush()
    os._exit(0)  # CUDA cannot shut down cleanly
"""


def test_gpu_error_inside_a_window(tmp_path: Path) -> None:
    """After a GPU error the profiler is off, and only the program's own calls raise the error."""
    # The simulated GPU looks at no index: there the variable makes the kernel fail.
    raised, enabled, (status,) = result_of(BREAKS, tmp_path, SIMGPU_ASSERT="index_elementwise")
    assert ("", False) == (raised, enabled)
    assert status in ("partial", "failed")


@pytest.mark.parametrize(
    "wait", [lambda x: x.sum().item(), lambda x: float(x.mean()), lambda x: bool((x > 0).any()), lambda x: x.cpu()]
)
def test_errors_of_calls_on_temporaries(x: torch.Tensor, wait: Callable[[torch.Tensor], object]) -> None:
    """Each synchronization raises; torch, called back while the temporary is freed, would lose the error."""
    with detect_syncs("error") as syncs:
        for _ in range(2):
            with pytest.raises(SyncError):
                wait(x)
    assert 2 == sum(found.count for found in syncs.findings)
    with pytest.raises(SyncError), no_syncs():
        wait(x)


def test_errors_of_the_program_after_detection(x: torch.Tensor) -> None:
    """An error of a function in C that was given a temporary is torch's own again."""
    with instrument.detect_syncs():
        x.sum().item()
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        x.sum().view(3, 4, 5)
