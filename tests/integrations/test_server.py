"""Servers: windows on demand, prefill and decode, and vLLM's classes if they can be imported."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import instrument
from instrument.integrations import vllm
from instrument.integrations.loop import Loop
from instrument.integrations.server import CHECK_INTERVAL_S, OnDemandSchedule, Server
from instrument.record.planning.schedule import StepAction
from tests.integrations.trees import recorded, traces, tree
from tests.support import nsys, warm
from tests.support.programs import ROOT, environment, python

pytestmark = pytest.mark.framework

SCRIPT = ROOT / "integrations/server/serve.py"
PHASES = ["prefill", "decode", "Model"]


def manifest(folder: Path) -> list[dict[str, Any]]:
    path = folder / "manifest.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("served")
    return folder, warm.run([*python(SCRIPT), "--out", folder], environment(), check=True).stdout


def test_same_tokens(served: tuple[Path, str], tmp_path: Path) -> None:
    """The generated tokens are the same with and without a window."""
    plain = warm.run([*python(SCRIPT), "--out", tmp_path], environment({"INSTRUMENT": "0"}), check=True).stdout
    assert plain.count("request") == 12
    assert plain == served[1]
    assert [] == list(tmp_path.iterdir())


def test_regions_of_the_script(served: tuple[Path, str]) -> None:
    """The window has the requested iterations, by phase."""
    phases = ["prefill", *6 * ["decode"], "prefill"]
    assert tree(recorded(served[0]), PHASES) == "\n".join(f"{phase}\n  Model" for phase in phases)
    assert [(entry["status"], entry["steps"]) for entry in manifest(served[0])] == [("recorded", [46, 53])]


@pytest.mark.nsys
def test_nsight_systems(tmp_path: Path) -> None:
    """A report of Nsight Systems has the ranges, with the number of tokens."""
    report = nsys.profile(SCRIPT, tmp_path=tmp_path, args=["--out", str(tmp_path), "--requests", "2"])
    found = [r for r in nsys.ranges(report.file) if r.name in ("prefill", "decode")]
    assert {"prefill", "decode"} == {r.name for r in found}
    assert all(isinstance(r.payload, int) for r in found)


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


NUMBERED = """
import os, runpy, sys
from pathlib import Path
script, number = sys.argv[1:3]
del sys.argv[1:3]
Path(number).write_text(f"{os.getpid()}\\n")
runpy.run_path(script, run_name="__main__")
"""


def test_running_server(tmp_path: Path) -> None:
    """A running server records windows on a signal and a touched file, and continues."""
    number = tmp_path / "number"
    options = ["--out", tmp_path, "--requests", "1000000", "--pause", "0.01"]
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(warm.run, [sys.executable, "-c", NUMBERED, SCRIPT, number, *options], environment())
        wait_for(lambda: number.exists() and number.read_text().endswith("\n"))
        process = int(number.read_text())
        try:
            wait_for(lambda: len(manifest(tmp_path)) == 1)  # the script's own
            os.kill(process, signal.SIGUSR2)
            wait_for(lambda: len(manifest(tmp_path)) == 2)
            (tmp_path / "trigger").touch()
            wait_for(lambda: len(manifest(tmp_path)) == 3)
        finally:
            os.kill(process, signal.SIGKILL)
        assert -signal.SIGKILL == ended.result().returncode
    assert ["recorded"] * 3 == [entry["status"] for entry in manifest(tmp_path)]
    assert [8] * 3 == [entry["steps"][1] - entry["steps"][0] + 1 for entry in manifest(tmp_path)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    instance = Server(tmp_path, active=2, warmup=0, file=tmp_path / "trigger", modules=False)
    instance.attach()
    yield instance
    instance.detach()
    assert Loop.current() is None


def windows(server: Server) -> list[tuple[str, Any]]:
    server.detach()
    return [(entry["status"], entry["steps"]) for entry in server.loop.windows]


def iterate(server: Server, count: int) -> None:
    for _ in range(count):
        with instrument.annotate("decode"):
            pass
        server.step()


def test_repeated_windows(server: Server, tmp_path: Path) -> None:
    """Windows open as often as requested, from any thread, with the requested length."""
    iterate(server, 3)
    requester = threading.Thread(target=server.start_profile)
    requester.start()
    requester.join()
    iterate(server, 5)
    server.start_profile(3)
    iterate(server, 5)
    assert windows(server) == [("recorded", [4, 5]), ("recorded", [9, 11])]
    assert len(traces(tmp_path)) == 2


def test_stop_profile(server: Server) -> None:
    """A window ends with the iteration in which it is stopped; stopping without a window has no effect."""
    server.stop_profile()
    server.start_profile(100)
    iterate(server, 4)
    server.stop_profile()
    iterate(server, 2)
    assert not torch.autograd._profiler_enabled()
    assert windows(server) == [("partial", [1, 4])]


def test_server_ends_in_a_window(server: Server) -> None:
    """A window that is open when the server ends is kept."""
    server.start_profile(100)
    iterate(server, 3)
    assert windows(server) == [("partial", [1, 2])]


@pytest.mark.parametrize("detach", ["", "server.detach()"])
@pytest.mark.parametrize("request_", ["", "server.start_profile(1)"])
def test_no_window_warning(tmp_path: Path, detach: str, request_: str) -> None:
    """The warning is logged once, even if the program ends without `detach`."""
    script = tmp_path / "serve.py"
    script.write_text(f"""
from instrument.integrations.server import Server
server = Server("out", warmup=0, file="trigger")
server.attach()
{request_}
server.step()
server.step()
{detach}
""")
    done = warm.run(python(script), environment(), cwd=tmp_path, check=True)
    message = (
        "no window was recorded, because none was requested: call start_profile() or touch trigger "
        "while the server runs"
    )
    assert done.stderr.count(message) == (not request_)
    assert ("Where the step went" in done.stderr) == bool(request_)


def test_touched_file(server: Server, tmp_path: Path) -> None:
    """A touched file opens one window; an existing file opens none."""
    iterate(server, 2)
    (tmp_path / "trigger").touch()
    time.sleep(2 * CHECK_INTERVAL_S)
    iterate(server, 4)
    time.sleep(2 * CHECK_INTERVAL_S)
    iterate(server, 2)
    assert windows(server) == [("recorded", [3, 4])]


def test_signal(tmp_path: Path) -> None:
    """A signal opens a window; the previous handler is called as well, and is restored at the end."""
    received: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    try:
        handler = signal.getsignal(signal.SIGUSR2)
        server = Server(tmp_path, active=1, warmup=0, signal=signal.SIGUSR2)
        server.attach()
        signal.raise_signal(signal.SIGUSR2)
        iterate(server, 3)
        assert windows(server) == [("recorded", [1, 1])]
        assert [signal.SIGUSR2] == received
        assert signal.getsignal(signal.SIGUSR2) is handler
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_another_profiler(server: Server) -> None:
    """A window is skipped, with a reason, while another profiler records."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        server.start_profile()
        iterate(server, 4)
    server.start_profile()
    iterate(server, 4)
    assert [status for status, _ in windows(server)] == ["skipped", "recorded"]


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError, {"active": 0}),
        (TypeError, {"active": True}),
        (ValueError, {"warmup": -1}),
        (ValueError, {"signal": 0}),
    ],
)
def test_wrong_arguments(tmp_path: Path, error: type[Exception], arguments: dict[str, Any]) -> None:
    """Wrong arguments are rejected."""
    with pytest.raises(error):
        Server(tmp_path, **arguments)


def test_wrong_length(server: Server) -> None:
    """A window has at least one iteration."""
    with pytest.raises(ValueError, match='"active" must be an integer >= 1: 0'):
        server.start_profile(0)


@given(
    st.lists(st.sampled_from(["start", "stop", "toggle", None, None, None])), st.integers(0, 2), st.integers(1, 3)
)
def test_on_demand_schedule(requests: list[str | None], warmup: int, active: int) -> None:
    """Windows on demand do not overlap, and none is longer than requested."""
    plan, open_until, count = OnDemandSchedule(warmup, active), 0, 0
    for step, what in enumerate(requests):
        if what is not None:
            plan.request(what)
        if step < open_until:
            open_until = step if what in ("stop", "toggle") else open_until
        elif what in ("start", "toggle"):
            open_until, count, first = step + warmup + active, count + 1, step + warmup
        action, window = plan.at(step)
        assert (action is StepAction.WAIT) == (window is None) == (step >= open_until)
        if window is not None:
            assert (window.index, action is StepAction.ACTIVE) == (count, step >= first)
        following = plan.next_window(step)
        assert following is not None
        assert following.index == count + (window is None)
        assert plan.count == count


# vLLM


def batch(new: dict[str, int], cached: dict[str, tuple[int, int]], **versions: Any) -> Any:
    """Return a scheduler's output: tokens of new requests, and tokens and outputs so far of the others."""
    outputs = {name: output for name, (_, output) in cached.items()}
    known = SimpleNamespace(is_context_phase=lambda name: outputs.get(name) == 0)
    tokens = {**new, **{name: count for name, (count, _) in cached.items()}}
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=known,
        scheduled_spec_decode_tokens={},
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        **versions,
    )


BATCHES = [
    (batch({"a": 5}, {}), "prefill"),
    (batch({"a": 1}, {}), "prefill"),
    (batch({}, {"a": (1, 3), "b": (1, 1)}), "decode"),
    (batch({}, {"a": (4, 0)}), "prefill"),  # another chunk
    (batch({}, {"a": (3, 2)}), "decode"),  # with drafts
    (batch({"b": 7}, {"a": (1, 3)}), "prefill+decode"),
]


def test_phases() -> None:
    """The phase of a batch follows from its requests."""
    assert [expected for _, expected in BATCHES] == [vllm.phase(scheduled) for scheduled, _ in BATCHES]


def test_phases_of_old_versions() -> None:
    """If requests do not report their outputs, the number of tokens decides."""
    scheduled = batch({}, {"a": (4, 0), "b": (3, 5)})
    scheduled.scheduled_cached_reqs = None
    scheduled.scheduled_spec_decode_tokens = {"b": [1, 2]}
    assert vllm.phase(scheduled) == "prefill+decode"


class GPUModelRunner:
    """A stub of vLLM's model runner, which needs a GPU."""

    def execute_model(self, scheduled: Any, dummy_run: bool = False) -> str:
        with instrument.annotate("model"):
            return "executed"

    def sample_tokens(self, grammar: Any) -> str:
        with instrument.annotate("sampler"):
            return "sampled"


def test_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations are regions, dummy and empty ones are not, and the runner is restored."""
    module = ModuleType(vllm.RUNNER_MODULES[0])
    module.GPUModelRunner = GPUModelRunner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, vllm.RUNNER_MODULES[0], module)
    monkeypatch.setattr(vllm, "require", lambda package: None)
    before, runner = dict(vars(GPUModelRunner)), GPUModelRunner()

    def serve() -> list[str]:
        runner.execute_model(batch({}, {}))
        runner.execute_model(batch({"dummy": 1}, {}), dummy_run=True)
        return [text for done, _ in BATCHES for text in (runner.execute_model(done), runner.sample_tokens(None))]

    expected = serve()
    with vllm.attach(tmp_path, active=len(BATCHES), warmup=0, file=tmp_path / "trigger") as attached:
        assert serve() == expected
        (tmp_path / "trigger").touch()
        time.sleep(2 * CHECK_INTERVAL_S)
        assert serve() == expected
    assert before == dict(vars(GPUModelRunner))
    (entry,) = attached.loop.windows
    assert (entry["status"], entry["steps"]) == ("recorded", [6, 11])
    shown = "\n".join(f"{phase}\n  model\nsampling\n  sampler" for _, phase in BATCHES)
    found = recorded(tmp_path)
    dummies = tree(found, ["prefill", "decode", "prefill+decode", "sampling", "model", "sampler"])
    assert dummies.replace("model\nmodel\n", "") == shown or shown in dummies


@pytest.mark.usefixtures("lenient")
def test_unknown_vllm_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that cannot be read is still executed."""
    module = ModuleType(vllm.RUNNER_MODULES[0])
    module.GPUModelRunner = GPUModelRunner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, vllm.RUNNER_MODULES[0], module)
    monkeypatch.setattr(vllm, "require", lambda package: None)
    with vllm.attach(tmp_path), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        odd = SimpleNamespace(total_num_scheduled_tokens=3)
        assert GPUModelRunner().execute_model(odd) == "executed"


def test_missing_vllm(tmp_path: Path) -> None:
    """Without vLLM, the error says how to install it."""
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(ImportError, match="pip install vllm"):
            vllm.attach(tmp_path)


def test_real_vllm() -> None:
    """The patched methods exist in vLLM, and the phases of its own batches agree with its counts."""
    reason = "vLLM is not installed, or cannot be imported"
    output = pytest.importorskip("vllm.v1.core.sched.output", reason=reason, exc_type=ImportError)
    for home in vllm.RUNNER_MODULES:
        runner = pytest.importorskip(home, reason=reason, exc_type=ImportError).GPUModelRunner
        assert callable(runner.execute_model)
        assert callable(runner.sample_tokens)
    from vllm.v1.utils import compute_iteration_details

    def scheduled(new: list[str], cached: dict[str, int]) -> Any:
        made = output.SchedulerOutput.make_empty()
        made.scheduled_new_reqs = [SimpleNamespace(req_id=name) for name in new]
        made.scheduled_cached_reqs = output.CachedRequestData.make_empty()
        made.scheduled_cached_reqs.req_ids = list(cached)
        made.scheduled_cached_reqs.num_output_tokens = list(cached.values())
        made.num_scheduled_tokens = dict.fromkeys([*new, *cached], 1)
        return made

    for new, cached in [(["a"], {}), ([], {"a": 2}), ([], {"a": 0}), (["a"], {"b": 1}), ([], {"a": 0, "b": 4})]:
        made = scheduled(new, cached)
        details = compute_iteration_details(made)
        parts = [("prefill", details.num_ctx_requests), ("decode", details.num_generation_requests)]
        assert vllm.phase(made) == "+".join(name for name, count in parts if count)
