"""How windows end where the GPU is busy, hangs, or is one of several."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests import simgpu
from tests.simgpu.programs import environment, output

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]

TWO_GPUS = """
    import json, sys, torch, instrument

    x = torch.ones(8, device="cuda:1")
    with instrument.profile(sys.argv[1], schedule=instrument.schedule("1-2", warmup=0)) as prof:
        for _ in range(3):
            x.add_(1)
            x.mul_(2)
            prof.step()
    used = [torch._C._cuda_hasPrimaryContext(device) for device in range(2)]
    kernels = [len(trace.gpu) for trace in instrument.read_traces(sys.argv[1]).values()]
    print(json.dumps([used, kernels]))
"""


def test_a_gpu_that_is_not_the_current_one(tmp_path: Path) -> None:
    """Its kernels are complete, and no context is made on the current one, which the program does not use."""
    slow = {"devices": 2, "durations": "elementwise=20000000"}
    used, kernels = json.loads(output(TWO_GPUS, str(tmp_path / "out"), **slow).splitlines()[-1])
    assert ([False, True], [4]) == (used, kernels)


HANGS = """
    import torch
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side = torch.cuda.Stream()
    for step in range(100):
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        if step == 3:
            with torch.cuda.stream(side):
                torch.cuda._sleep(1000)
            print("hangs", flush=True)
            side.synchronize() if WAITS else __import__("time").sleep(60)
"""


@pytest.mark.parametrize("waits", [False, True])
def test_sigterm_beside_a_kernel_that_never_ends(tmp_path: Path, waits: bool) -> None:
    """As where a peer died: the process ends in time, and the line of its window says what is missing."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(HANGS).replace("WAITS", str(waits)))
    command = [sys.executable, "-m", "instrument", "run", "--steps", "2-90", "--out", "out", "--", str(script)]
    job = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(hang="spin_kernel"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert job.stdout is not None
    assert b"hangs" in job.stdout.readline()
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(job.pid, signal.SIGTERM)
    assert -signal.SIGTERM == job.wait(timeout=40)
    assert time.monotonic() - began < 27  # torchrun sends SIGKILL after 30
    job.stdout.close()
    if waits:  # Python runs no handler in the call that waits
        return
    (line,) = map(json.loads, (tmp_path / "out" / "manifest.jsonl").read_text().splitlines())
    assert ("partial", [2, 3]) == (line["status"], line["steps"])
    assert "work of the GPU did not end within 5 s of the end of the window, and is missing" in line["reason"]


ENDS = {
    "raises": ("raise ValueError('mine')", 1),
    "exits": ("raise SystemExit(3)", 3),
    "ends": ("break", 0),
}


@pytest.mark.parametrize("way", ["run", "steps"])
@pytest.mark.parametrize("end", ENDS)
def test_an_end_beside_a_kernel_that_never_ends(tmp_path: Path, end: str, way: str) -> None:
    """The program ends as without, a bounded time later, and the line of the window says what is missing."""
    line, code = ENDS[end]
    text = textwrap.dedent(HANGS)
    text = text[: text.index('        print("hangs"')] + f"        {line}\n"
    options = ["-m", "instrument", "run", "--steps", "2-90", "--out", "out", "--"] if way == "run" else []
    if way == "steps":
        text = text.replace("range(100)", "instrument.steps(range(100), 'out', at='2-90')")
    script = tmp_path / "train.py"
    script.write_text(
        "import instrument\nfrom instrument.record import gpu_wait\ngpu_wait._limit_s.set(2)\n" + text
    )
    done = subprocess.run(
        [sys.executable, *options, str(script)],
        cwd=tmp_path,
        env=environment(hang="spin_kernel"),
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert code == done.returncode, done.stderr
    assert ("ValueError: mine" in done.stderr) == (end == "raises")
    (window,) = map(json.loads, (tmp_path / "out" / "manifest.jsonl").read_text().splitlines())
    assert ("partial", True) == (window["status"], "work of the GPU did not end within 2 s" in window["reason"])


REFUSED = """
    import json, sys, torch, instrument

    x = torch.ones(8, device="cuda")
    schedule = instrument.schedule(wait=0, warmup=1, active=1, repeat=2)
    with instrument.profile(sys.argv[1], schedule=schedule) as prof:
        for _ in range(4):
            x.add_(1)
            prof.step()
    print(json.dumps([[line["status"], line["reason"]] for line in prof.windows]))
"""


@pytest.mark.parametrize("by", ["refused", "busy"])
def test_a_profiling_interface_that_is_refused(tmp_path: Path, by: str) -> None:
    """Each window says so."""
    lines = json.loads(output(REFUSED, str(tmp_path / "out"), cupti=by).splitlines()[-1])
    assert 2 == len(lines)
    assert all("partial" == status and "is refused" in reason for status, reason in lines)


SECOND_WINDOWS = """
    import json, sys, torch, instrument

    x = torch.ones(8, device="cuda")
    warmup = json.loads(sys.argv[2])
    with instrument.profile(sys.argv[1], schedule=instrument.schedule("1-2,4,7-8", warmup=warmup)) as prof:
        for _ in range(10):
            for _ in range(9):
                x.add_(1)
            prof.step()
    prof.stop()
    print(json.dumps([[*line["trace"].values(), line["reason"]] for line in prof.windows]))
"""


@pytest.mark.parametrize(("warmup", "lost"), [("null", [0, 0, 0]), ("1", [0, 0, 0]), ("0", [1, 2, 3])])
def test_kernels_of_later_windows(tmp_path: Path, warmup: str, lost: list[int]) -> None:
    """By default, a step of warm-up keeps all kernels; without it, each line says how many were lost."""
    lines = json.loads(output(SECOND_WINDOWS, str(tmp_path / "out"), warmup, lost_records=1).splitlines()[-1])
    assert lost == [launched - recorded for *_, launched, recorded, _ in lines]
    assert [bool(number) for number in lost] == ["record with warmup=1" in (reason or "") for *_, reason in lines]


PERSISTS = """
    import json, sys, torch, instrument
    from instrument.record import gpu_wait

    gpu_wait._limit_s.set(2)
    x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
    schedule = instrument.schedule(wait=1, warmup=1, active=1, repeat=3)
    with instrument.profile(sys.argv[1], schedule=schedule) as prof:
        for step in range(12):
            if step == 1:
                with torch.cuda.stream(side):
                    torch.cuda._sleep(100)
            x.add_(1)
            prof.step()
    print(json.dumps([[line["status"], line["reason"]] for line in prof.windows]))
"""


def test_windows_beside_a_kernel_that_never_ends(tmp_path: Path) -> None:
    """The end of the first window waits for it, those of later ones do not; each says what is missing."""
    lines = json.loads(output(PERSISTS, str(tmp_path / "out"), hang="spin_kernel").splitlines()[-1])
    assert [status for status, _ in lines] == ["partial"] * 3
    assert "did not end within 2 s of the end of the window" in lines[0][1]
    assert all("at the end of an earlier window still runs" in reason for _, reason in lines[1:])


OTHER_PROFILER = """
    import json, sys, torch, instrument
    from torch.profiler import profile

    x = torch.ones(8, device="cuda")
    for step in instrument.steps(range(6), sys.argv[1], at="2-3"):
        if step == 3:
            with profile():
                x.add_(1)
                torch.cuda.synchronize()
        x.add_(1)
    (trace,) = instrument.read_traces(sys.argv[1]).values()
    print(json.dumps([trace.gpu.start_ns.tolist(), trace.steps.start_ns.tolist(), trace.steps.end_ns.tolist()]))
"""


def test_a_window_that_another_profiler_ends(tmp_path: Path) -> None:
    """The times of its kernels stay those of its own recording."""
    kernels, starts, ends = json.loads(output(OTHER_PROFILER, str(tmp_path / "out")).splitlines()[-1])
    assert len(kernels) == 1
    assert starts[0] < kernels[0] < ends[-1] + 10_000_000


NOT_STOPPED = """
    import json, sys, torch, instrument
    from tests import simgpu
    from torch.autograd import profiler

    def fail(*_):
        recording.append(simgpu.library().sim_records_kernels())
        raise RuntimeError("on purpose")

    x, recording, stop = torch.ones(8, device="cuda"), [], profiler._disable_profiler
    profiler._disable_profiler = fail
    with instrument.profile(sys.argv[1], schedule=instrument.schedule("1", warmup=0)) as prof:
        for _ in range(3):
            x.add_(1)
            prof.step()
    profiler._disable_profiler = stop
    recording.append(simgpu.library().sim_records_kernels())
    with instrument.profile(sys.argv[1], schedule=instrument.schedule("1", warmup=0)) as prof:
        for _ in range(3):
            x.add_(1)
            prof.step()
    kernels = [len(trace.kernels) for trace in instrument.read_traces(sys.argv[1]).values()]
    print(json.dumps([recording[0], recording[-1], kernels]))
"""


def test_a_recording_that_torch_cannot_stop(tmp_path: Path) -> None:
    """CUPTI does not go on after it, and the next window is whole."""
    before, after, kernels = json.loads(output(NOT_STOPPED, str(tmp_path / "out")).splitlines()[-1])
    assert (1, 0, [1]) == (before, after, kernels)
