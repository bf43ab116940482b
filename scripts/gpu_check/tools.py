"""The tests marked `gpu`, the doctor, and the vendor's tools if installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil

from tests import simgpu

from .check import LOG, ROOT, CheckContext, FailedError, SkippedError, expect, python

PROGRAM = "scripts.gpu_check.programs.training"
_STEPS = 6
_TEST_S = 100  # per test
NCU = "tests/launch/test_run_gpu.py::test_ncu_measures_the_whole_backward_pass"
# These measure times, fill the GPU's memory or hold its counters, so they run alone.
ALONE = (
    "tests/syncs/test_gpu_syncs.py",
    "tests/traces/test_gpu_step_lengths.py",
    "tests/diagnosis/test_gpu_diagnosis.py",
    "tests/replay/test_gpu_replay.py",
    "tests/launch/doctor/test_trials.py",
    "tests/launch/test_run_gpu.py",
)


def nsys(context: CheckContext) -> None:
    """A report of Nsight Systems has as many kernels as launches in the window."""
    if shutil.which("nsys") is None:
        raise SkippedError("nsys is not on the PATH")
    if not context.rehearsal and simgpu.active():
        raise SkippedError("nsys has a CUPTI of its own, which does not see the kernels of the simulated GPU")
    from instrument.read.jobs.read import read_file

    out = context.folder / "run"
    run = ("-m", "instrument", "run", "--profiler", "nsys", "--steps", "2-4", "--out", out)
    done = python(*run, "--", "-m", PROGRAM, context.device, str(_STEPS), limit_s=context.limit_s)
    reports = sorted(out.rglob("*.nsys-rep"))
    expect(len(reports) == 1, f"one report expected: {len(reports)}: {done.stderr[-500:]}")
    trace = read_file(reports[0])
    launched = sum("LaunchKernel" in name for name in trace.runtime.text("name"))
    context.note("kernels", len(trace.kernels), "as many as launches, more than 0")
    context.note("launches", launched)
    holds = len(trace.kernels) == launched > 0
    expect(context.rehearsal or holds, f"{len(trace.kernels)} kernels of {launched} launches")


def ncu(context: CheckContext) -> None:
    """Under Nsight Compute, the region "backward" has all its kernels, which autograd's thread launches."""
    pytest(context, NCU)


def doctor(context: CheckContext) -> None:
    """With a full GPU memory, the doctor says why it examined the CPU instead, and reports no other problem."""
    held = [] if context.rehearsal else filled(context)
    done = python(
        "-m", "instrument", "doctor", "--json", "--out", context.folder, limit_s=context.limit_s, code=None
    )
    context.note("pieces of memory held", len(held))
    expect(done.returncode in (0, 1), f"code {done.returncode}: {done.stderr[-500:]}")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    for name in ("GPU", "torch.profiler"):
        context.note(name, f"{checks[name]['status']}: {checks[name]['sentence']}", "a note that says why")
    proved = "regions arrive (proved)"
    expect(proved in checks["torch.profiler"]["sentence"], f"torch.profiler: {checks['torch.profiler']}")
    if not context.rehearsal:
        for name, words in {
            "GPU": "the first cannot be used now",
            "torch.profiler": "no GPU can be used now",
        }.items():
            sentence = checks[name]["sentence"]
            expect(checks[name]["status"] == "note", f"{name}: expected a note: {checks[name]}")
            expect(words in sentence and "memory" in sentence, f"{name} does not say why: {sentence}")


def filled(context: CheckContext) -> list[object]:
    """Allocate all memory of the GPU but at most 2 MiB; return the tensors that hold it."""
    import torch

    torch.ones(1, device=context.device)
    held: list[object] = []
    piece = context.cuda.mem_get_info()[0]
    while piece >= 1 << 21:
        try:
            held.append(torch.empty(piece, dtype=torch.uint8, device=context.device))
        except torch.OutOfMemoryError:
            piece //= 2
    return held


def tests_alone(context: CheckContext) -> None:
    """The tests marked `gpu` that must run alone pass."""
    pytest(context, *ALONE, f"--deselect={NCU}")


def tests(context: CheckContext) -> None:
    """The other tests marked `gpu` pass."""
    processes = max(1, min(4, (os.cpu_count() or 1) // 2))
    at_once = ["-p", "xdist", "--numprocesses", str(processes)] if importlib.util.find_spec("xdist") else []
    pytest(context, *gpu_tests(), *at_once)


def gpu_tests() -> list[str]:
    """Return the test modules for a GPU without those that run alone; the others may not be importable."""
    found = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text())
    return [name for name in (path.relative_to(ROOT).as_posix() for path in found) if name not in ALONE]


def pytest(context: CheckContext, *arguments: str) -> None:
    """Run tests marked `gpu`; ``arguments`` name them from the root of this checkout.

    Raises:
        FailedError: tests failed or did not end in time; the message names them.
        SkippedError: all tests were skipped.
    """
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        raise SkippedError("pytest or hypothesis is not installed")
    limited = (
        ["-p", "pytest_timeout", f"--timeout={_TEST_S}"] if importlib.util.find_spec("pytest_timeout") else []
    )
    placed = [str(ROOT / argument) if argument.startswith("tests/") else argument for argument in arguments]
    command = ["-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *limited, *placed]
    late = ""
    try:
        # Other installed plugins may warn, and warnings fail these tests.
        python(
            *command, limit_s=context.limit_s - 5, code=None, captured=False, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"
        )
    except FailedError as error:
        late = str(error)
    log = (context.folder / LOG).read_text(errors="replace")
    ended = {word: len(re.findall(rf"\b{word}\b.*\[ *\d+%\]|\[ *\d+%\] {word}\b", log)) for word in
             ("PASSED", "FAILED", "ERROR", "SKIPPED")}  # fmt: skip
    for word, count in ended.items():
        if count:
            context.note(word.lower(), count, 0 if word in ("FAILED", "ERROR") else "")
    skipped = sorted(set(re.findall(r"^SKIPPED \[\d+\] \S+ (.*)", log, re.MULTILINE)))
    failed = sorted(
        set(re.findall(r"\b(?:FAILED|ERROR)\b (?:\S*/)?(tests/\S+)|(tests/\S+) (?:FAILED|ERROR)", log))
    )
    names = ", ".join(name for pair in failed for name in pair if name)
    if skipped and (ended["PASSED"] or names):
        context.note("skipped as", "; ".join(skipped))
    expect(not late, "; ".join(filter(None, [late, names and f"failed before: {names}"])))
    expect(not names, f"failed: {names}")
    expect(ended["PASSED"] or ended["SKIPPED"], log[-1500:])
    if not ended["PASSED"]:
        raise SkippedError("; ".join(skipped) or "all tests skipped")
