"""Reads the kernels in a report of Nsight Compute with NVIDIA's package ncu-report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import TraceError

_OWN_DOMAIN = "instrument"
_METRICS = (
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)


@dataclass(frozen=True)
class MeasuredKernel:
    """One launch of a kernel; percentages are of the peak of the GPU, None if not measured.

    Attributes:
        name: the function.
        region: the regions around the launch, outermost first.
        duration_ns: the duration, alone on the GPU and with empty caches.
        sm: the throughput of the multiprocessors, in percent.
        memory: the throughput of the memory including caches, in percent.
        occupancy: the active warps, in percent of the warps that fit.
    """

    name: str
    region: tuple[str, ...]
    duration_ns: float
    sm: float | None
    memory: float | None
    occupancy: float | None


def read_kernels(path: Path) -> list[MeasuredKernel]:
    """Return the measured kernels in order.

    Raises:
        ImportError: the package ncu-report is not installed.
        TraceError: the package cannot read the file.
    """
    try:
        import ncu_report  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ImportError("reading kernels needs the package ncu-report: pip install ncu-report") from None
    try:
        report = ncu_report.load_report(str(path))
        ranges = [report.range_by_idx(number) for number in range(report.num_ranges())]
        kernels = [_kernel(part.action_by_idx(number)) for part in ranges for number in range(part.num_actions())]
    except Exception as error:  # RuntimeError, or what SWIG makes of a C++ exception
        raise TraceError(path, str(error) or type(error).__name__) from error
    if not ranges:  # as for any file that the package cannot read
        raise TraceError(path, "it is not a report, or newer than the package ncu-report")
    return kernels


def _kernel(action: Any) -> MeasuredKernel:
    duration, *shares = (_number(action.metric_by_name(name)) for name in _METRICS)
    return MeasuredKernel(action.name(), _region(action.nvtx_state()), duration or 0.0, *shares)


def _number(metric: Any) -> float | None:
    return float(metric.as_double()) if metric is not None and metric.has_value() else None


def _region(state: Any) -> tuple[str, ...]:
    """Return the ranges of this library or, without any, of other domains."""
    if state is None:
        return ()
    domains = [state.domain_by_id(number) for number in state.domains()]
    own = [domain for domain in domains if domain.name() == _OWN_DOMAIN]
    return tuple(
        str(name) for domain in own or domains for name in (*domain.start_end_ranges(), *domain.push_pop_ranges())
    )
