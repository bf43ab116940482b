"""Kernels in reports of Nsight Compute, read by NVIDIA's package."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from instrument.base.errors import TraceError
from instrument.read.profilers.nsight import MeasuredKernel, read_kernels
from instrument.show.terminal.console import show
from instrument.show.terminal.trace_report import measured_kernels

NAMES = (
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)


def action(name: str, *values: float | None, domains: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]) -> Any:
    """Return a kernel of the package; a metric that was not collected is None or has no value."""
    metrics = {
        key: value
        and SimpleNamespace(has_value=lambda value=value: value >= 0, as_double=lambda value=value: value)
        for key, value in zip(NAMES, values, strict=True)
    }
    infos = [
        SimpleNamespace(
            name=lambda domain=domain: domain,
            push_pop_ranges=lambda pushed=pushed: pushed,
            start_end_ranges=lambda started=started: started,
        )
        for domain, (pushed, started) in domains.items()
    ]
    state = SimpleNamespace(domains=lambda: range(len(infos)), domain_by_id=infos.__getitem__) if infos else None
    return SimpleNamespace(name=lambda: name, metric_by_name=metrics.__getitem__, nvtx_state=lambda: state)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"other": (("x",), ()), "instrument": (("forward", "mlp"), ("step",))}
    parts = [
        [
            action("gemm", 1000.0, 80.0, 20.0, 50.0, domains=own),
            action("relu", 500.0, None, -1.0, 10.0, domains={}),
        ],
        [action("gemm", 3000.0, 40.0, 60.0, 30.0, domains={"<default domain>": (("run",), ())})],
    ]
    ranges = [
        SimpleNamespace(num_actions=lambda part=part: len(part), action_by_idx=part.__getitem__) for part in parts
    ]
    context = SimpleNamespace(num_ranges=lambda: len(ranges), range_by_idx=ranges.__getitem__)
    monkeypatch.setitem(sys.modules, "ncu_report", SimpleNamespace(load_report=lambda path: context))


@pytest.mark.usefixtures("report")
def test_kernels_with_their_regions() -> None:
    """Regions come from the library's domain, otherwise from others; missing metrics are None."""
    assert [
        MeasuredKernel("gemm", ("step", "forward", "mlp"), 1000.0, 80.0, 20.0, 50.0),
        MeasuredKernel("relu", (), 500.0, None, None, 10.0),
        MeasuredKernel("gemm", ("run",), 3000.0, 40.0, 60.0, 30.0),
    ] == read_kernels(Path("made.ncu-rep"))


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to install the package."""
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    with pytest.raises(ImportError, match="reading kernels needs the package ncu-report: pip install ncu-report"):
        read_kernels(Path("made.ncu-rep"))


@pytest.mark.skipif(importlib.util.find_spec("ncu_report") is None, reason="ncu-report is not installed")
def test_damaged_report(tmp_path: Path) -> None:
    """The package's error becomes a TraceError with the path."""
    path = tmp_path / "broken.ncu-rep"
    path.write_bytes(b"nothing")
    with pytest.raises(TraceError, match=r"cannot read .*broken.ncu-rep"):
        read_kernels(path)


def printed(kernels: list[MeasuredKernel]) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=100)
    show(console, measured_kernels(kernels, Path("a.ncu-rep")))
    return [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_kernels_by_region() -> None:
    """The longest region comes first; shares of several launches are weighted by duration."""
    lines = printed([
        MeasuredKernel("gemm", ("step", "mlp"), 1000.0, 80.0, 20.0, 50.0),
        MeasuredKernel("gemm", ("step", "mlp"), 3000.0, 40.0, 60.0, None),
        MeasuredKernel("relu", ("step", "mlp"), 1000.0, None, 10.0, 10.0),
        MeasuredKernel("copy", (), 500.0, None, None, None),
    ])  # fmt: skip
    assert ["4", "launches,", "5.50", "us", "alone"] == lines[0][-5:]
    assert [
        ["step", ">", "mlp", "3", "5.00", "us", "50.0", "42.0", "30.0"],
        ["gemm", "2", "4.00", "us", "50.0", "50.0", "50.0"],
        ["relu", "1", "1.00", "us", "-", "10.0", "10.0"],
        ["(in", "no", "region)", "1", "500", "ns", "-", "-", "-"],
        ["copy", "1", "500", "ns", "-", "-", "-"],
    ] == lines[3:]


def test_empty_and_long_reports() -> None:
    """An empty report says so, and a long table is cut."""
    assert [["No", "kernel", "was", "measured."]] == printed([])
    many = [MeasuredKernel(f"kernel{number}", (), 1.0, None, None, None) for number in range(40)]
    assert "... and 11 more lines; all kernels: ncu --import a.ncu-rep" == " ".join(printed(many)[-1])
