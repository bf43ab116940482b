"""Windows of one process: whether they are whole, how long their end takes, how one ends, and what they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from .check import CheckContext, FailedError, expect, manifest, variables

PROGRAM = "scripts.gpu_check.programs.endless"
FIRST, MANY = 20, 200
_END_S = 20  # from SIGTERM to the end: 5 s for the GPU, and as long again for saving
_MOST_GROWTH_KB = 100  # for each window


def first(context: CheckContext) -> None:
    """The first 20 windows have a kernel for each launch, where a step of warm-up is before each.

    Without warm-up, CUPTI may lose the first kernels of a window: how many is a figure without a limit.
    """
    for warmup in (1, 0):
        missing = [_missing(context, folder) for folder in _windows(context, f"warmup-{warmup}", warmup, FIRST)]
        context.note(f"windows with warmup={warmup}", len(missing), FIRST)
        context.note(f"kernels missing with warmup={warmup}", sum(missing), "" if warmup == 0 else 0)
        expect(len(missing) == FIRST, f"{len(missing)} windows with warmup={warmup}, expected {FIRST}")
        expect(warmup == 0 or not any(missing), f"kernels that are missing in windows 1 to 20: {missing}")


def _windows(context: CheckContext, name: str, warmup: int, count: int) -> list[Path]:
    """Record windows of one step each; return their folders."""
    import instrument

    from .network import Training

    training = Training(context.device)
    plan = instrument.schedule(wait=0, warmup=warmup, active=1, repeat=count)
    with instrument.profile(context.folder / name, schedule=plan) as prof:
        for _ in range(count * (warmup + 1)):
            training.step()
            prof.step()
    return sorted((context.folder / name).glob("window-*"))


def _missing(context: CheckContext, folder: Path) -> int:
    from instrument.read.jobs.read import read_file

    trace = read_file(context.trace(folder))
    launched = sum("LaunchKernel" in name for name in trace.runtime.text("name"))
    expect(launched, f"no launches in {folder}")
    return launched - len(trace.kernels)


def stall(context: CheckContext) -> None:
    """How long the end of a window stops the loop: until the GPU is done, until torch has stopped, and to save."""
    import instrument
    from instrument.record.exporters import torch_profiler

    from .network import Training

    took: dict[str, float] = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took[name] = took.get(name, 0) + time.perf_counter() - began

        return timing

    capture = torch_profiler.TorchProfilerCapture
    parts = (
        ("drain", torch_profiler.gpu_wait, "synchronize"),
        ("stop", capture, "stop"),
        ("save", capture, "save"),
    )
    training = Training(context.device, blocks=20)
    with (
        contextlib.ExitStack() as patches,
        instrument.profile(context.folder / "run", schedule=instrument.schedule(at="2-11")) as prof,
    ):
        for name, owner, function in parts:
            patches.enter_context(mock.patch.object(owner, function, timed(name, getattr(owner, function))))
        for _ in range(20):
            training.step()
            prof.step()
    (line,) = manifest(context.folder / "run")
    took["stop"] -= took.setdefault("drain", 0)  # which is a part of it
    for name, seconds in took.items():
        context.note(f"{name} ms", seconds * 1e3)
    stall_s = line["cost"]["stall_s"]
    context.note("stall ms", stall_s * 1e3, "at least their sum")
    expect(sum(took.values()) <= stall_s * 1.01, f"the parts {took} take longer than the stall of {stall_s} s")


def terminated(context: CheckContext) -> None:
    """SIGTERM in a window, beside a kernel of a minute, ends the program soon, and the manifest says why."""
    out = context.folder / "run"
    command = [sys.executable, "-m", "instrument", "run", "--steps", "2-1000000", "--out", str(out)]
    with subprocess.Popen(
        [*command, "--", "-m", PROGRAM, context.device],
        env=variables(),
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        try:
            expect(program.stdout and program.stdout.readline() == "ready\n", "the program did not start")
            began = time.perf_counter()
            program.send_signal(signal.SIGTERM)
            program.wait(_END_S)
        except subprocess.TimeoutExpired as error:
            raise FailedError(f"it did not end within {_END_S} s of SIGTERM") from error
        finally:
            program.kill()
    context.note("s until the end", time.perf_counter() - began, f"at most {_END_S}")
    lines = [(line["status"], line.get("reason")) for line in manifest(out)]
    context.note("lines in the manifest", len(lines), 1)
    expect(program.returncode == -signal.SIGTERM, f"it ended with {program.returncode}")
    expect(len(lines) == 1 and all(reason for _, reason in lines), f"the manifest says {lines}")


def growth(context: CheckContext) -> None:
    """Of 200 windows, the second hundred leaves nothing behind, neither in the process nor on the GPU."""
    seen: list[tuple[int, int]] = []
    for part in range(2):
        _windows(context, f"part-{part}", 0, MANY // 2)
        seen.append((_resident_bytes(), context.cuda.mem_get_info()[0]))
    (resident, free), (resident_after, free_after) = seen
    grown_kb = (resident_after - resident) / (MANY // 2) / 1024
    context.note("windows", MANY)
    context.note("KiB of memory for each window", grown_kb, f"at most {_MOST_GROWTH_KB}")
    context.note("bytes of the GPU", free - free_after, "at most 0")
    expect(context.rehearsal or grown_kb <= _MOST_GROWTH_KB, f"each window leaves {grown_kb:.0f} KiB")
    expect(free <= free_after, "windows leave memory of the GPU behind")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
