"""Runs on a GPU under the installed tools of vendors, and the kernels in their reports."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import instrument
from instrument.read.tables.trace import Trace
from tests.support import nsys
from tests.support.programs import environment, run
from tests.support.simulated_gpu import skip_if_simulated

pytestmark = [pytest.mark.vendor, pytest.mark.gpu]

REGIONS = """
import torch
import instrument

value = torch.ones(256, device="cuda", requires_grad=True)
for _ in range(100):
    value.detach().cos()
with instrument.annotate("forward"):
    result = value
    for _ in range(8):
        result = result.cos()
    loss = result.sum()
with instrument.annotate("backward"):
    loss.backward()
torch.cuda.synchronize()
"""
COUNTERS = (
    "ERR_NVGPUCTRPERM", "LibraryNotLoaded", "Failed to initialize the profiler",
    "failed to connect to the CUDA driver",
)  # fmt: skip

GRAPH = """
import torch
import instrument

value = torch.ones(256, device="cuda")
value.cos_()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(5):
        value.cos_()
with instrument.annotate("replays"):
    for _ in range(3):
        graph.replay()
torch.cuda.synchronize()
"""


def launched(
    profiler: str, tmp_path: Path, source: str, *options: str, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program with ``instrument run``, and record all of it."""
    script = tmp_path / "program.py"
    script.write_text(source)
    env = environment({"COLUMNS": "200"})
    if path is not None:
        env["PATH"] = f"{path}{os.pathsep}{env['PATH']}"
    command = [sys.executable, "-m", "instrument", "run", "--profiler", profiler, "--steps", "all"]
    return run([*command, "--out", tmp_path / "out", *options, "--", script], env, check=False)


@pytest.mark.parametrize("scope", [True, False])
def test_ncu_measures_the_whole_backward_pass(tmp_path: Path, scope: bool) -> None:
    """Ncu finds the kernels that autograd's thread launches for each cosine, also without the scope."""
    pytest.importorskip("nvtx")
    real = shutil.which("ncu")
    if real is None:
        pytest.skip("Nsight Compute is not installed")
    path = None
    if not scope:
        path = tmp_path / "old"
        path.mkdir()
        (path / "ncu").write_text(f'#!/bin/sh\n[ "$1" = --help ] && exit\nexec {real} "$@"\n')
        (path / "ncu").chmod(0o755)
    options = ("--region", "backward", "--launches", "300", "--option=--clock-control=none")
    done = launched("ncu", tmp_path, REGIONS, *options, path=path)
    output = done.stdout + done.stderr
    if any(word in output for word in COUNTERS):
        pytest.skip(f"ncu cannot read the counters on this machine: {output[-500:]}")
    assert 0 == done.returncode, output
    (report,) = (tmp_path / "out").glob("*.ncu-rep")
    table = subprocess.run([real, "--import", report, "--csv", "--page", "raw"], capture_output=True, text=True)
    kernels = [row for row in csv.reader(table.stdout.splitlines()) if row and row[0].isdigit()]
    assert 24 <= len(kernels) < 24 + 8, table.stdout


@pytest.mark.nsys
def test_nsys_traces_graphs_as_a_whole_or_by_node(tmp_path: Path) -> None:
    """By default each replay is one event; with the suggested option its five kernels are shown."""
    skip_if_simulated("nsys records through a CUPTI of its own, which sees no kernels")
    nsys.nsys()
    counts = {}
    for name, options in {"graph": (), "node": ("--option=--cuda-graph-trace=node",)}.items():
        folder = tmp_path / name
        folder.mkdir()
        with nsys.alone():
            done = launched("nsys", folder, GRAPH, *options)
        assert 0 == done.returncode, done.stderr
        assert ("CUDA graph launches traced as a whole: 3." in done.stderr) == (name == "graph"), done.stderr
        (report,) = (folder / "out").glob("*.nsys-rep")
        trace = instrument.read_trace(report)
        assert isinstance(trace, Trace)
        counts[name] = len(trace.kernels)
    assert counts["node"] - counts["graph"] == 3 * 5 - 3
