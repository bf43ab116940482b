"""The tests marked `gpu`, and the vendor's tools, where they are."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess

from .check import LOG, ROOT, Figures, Given, SkippedError, expect, python

PROGRAM = "scripts.gpu_check.programs.training"
_STEPS = 6


def _needs(tool: str) -> None:
    if shutil.which(tool) is None:
        raise SkippedError(f"{tool} is not on the PATH")


def nsys(given: Given) -> Figures:
    """Under Nsight Systems the report of a window has as many kernels as launches."""
    _needs("nsys")
    import instrument

    out = given.folder / "run"
    run = ("-m", "instrument", "run", "--profiler", "nsys", "--steps", "2-4", "--out", out)
    python(*run, "--", "-m", PROGRAM, given.device, str(_STEPS), limit_s=100)
    (report,) = out.rglob("*.nsys-rep")
    trace = instrument.read_trace(report)
    launched = [name for name in trace.runtime.text("name") if "LaunchKernel" in name]
    figures = {"kernels": len(trace.kernels), "launches": len(launched)}
    expect(given.rehearsal or figures["kernels"] == figures["launches"] > 0, f"{figures}")
    return figures


def ncu(given: Given) -> Figures:
    """Under Nsight Compute the region "backward" holds kernels."""
    _needs("ncu")
    if importlib.util.find_spec("nvtx") is None:
        raise SkippedError("the package nvtx is not installed: there are no ranges for ncu")
    out = given.folder / "run"
    run = ("-m", "instrument", "run", "--profiler", "ncu", "--region", "backward", "--launches", "5")
    done = python(*run, "--steps", "2", "--out", out, "--", "-m", PROGRAM, given.device, str(_STEPS), limit_s=110)
    reports = sorted(out.rglob("*.ncu-rep"))
    expect(reports, f"no report: {done.stderr[-800:]}")
    command = ["ncu", "--import", str(reports[0]), "--csv", "--page", "raw"]
    page = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    kernels = sum(row.startswith('"') and row[1:2].isdigit() for row in page.splitlines())
    expect(given.rehearsal or kernels, f"no kernel: {page[-300:]} {done.stderr[-500:]}")
    return {"kernels": kernels}


def doctor(given: Given) -> Figures:
    """With a GPU whose memory is full the doctor says why it examined the CPU."""
    import torch

    if given.rehearsal:
        free = 0
    else:
        torch.ones(1, device=given.device)
        free = given.cuda.mem_get_info()[0]
    held = []
    while free > 1 << 20 and len(held) < 64:
        try:
            held.append(torch.empty(free, dtype=torch.uint8, device=given.device))
        except torch.OutOfMemoryError:
            free //= 2
        else:
            free = given.cuda.mem_get_info()[0]
    done = python("-m", "instrument", "doctor", "--json", "--out", given.folder, limit_s=90, code=None)
    expect(done.returncode in (0, 1), f"code {done.returncode}: {done.stderr[-500:]}")
    checks = json.loads(done.stdout)["checks"]
    said = {check["name"]: f"{check['status']}: {check['sentence']}" for check in checks}
    return {name: said.get(name) for name in ("GPU", "torch.profiler")}


def tests(given: Given) -> Figures:
    """The tests marked `gpu` pass."""
    command = [
        "-m",
        "pytest",
        "-m",
        "gpu",
        "--verbose",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        ROOT,
        ROOT / "tests",
    ]
    if importlib.util.find_spec("xdist"):
        command += ["--numprocesses", "4"]
    only = ["--collect-only"] if given.rehearsal else []
    done = python(*command, *only, limit_s=400, code=None, captured=False)
    lines = (given.folder / LOG).read_text(errors="replace").strip().splitlines()
    failed = sorted({line for line in lines if line.startswith(("FAILED", "ERROR"))})
    expect(done.returncode == 0, "; ".join(failed[:20]) or "\n".join(lines[-20:]))
    return {"ended": lines[-1] if lines else "", "skipped": [line for line in lines if line.startswith("SKIPPED")]}
