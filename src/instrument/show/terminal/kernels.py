"""Prints how well kernels use the GPU, grouped by the region that launched them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ...base.printable import shell_line
from ...base.units import count, counted, duration
from ...read.profilers.nsight import MeasuredKernel
from ..text.lines import line
from .console import Block, Table, more

_MAX_KERNELS = 30
_COLUMNS = ("region / kernel", "calls", "GPU", "SM %", "memory %", "occupancy %")
_SHARES: tuple[Callable[[MeasuredKernel], float | None], ...] = (
    lambda kernel: kernel.sm,
    lambda kernel: kernel.memory,
    lambda kernel: kernel.occupancy,
)


def measured_kernels(kernels: Sequence[MeasuredKernel], report: Path) -> Iterator[Block]:
    """Yield a table of the regions, longest first, and the kernels in each; shares are weighted by duration.

    Args:
        kernels: the kernels.
        report: the report of Nsight Compute that lists all of them.
    """
    if not kernels:
        yield line("No kernel was measured.")
        return
    total = sum(kernel.duration_ns for kernel in kernels)
    launches = counted(len(kernels), "launch", "launches")
    yield line(f"How well kernels use the GPU: {launches}, {duration(total)} alone", "bold")
    rows, indents = [], []
    for region, inside in _group_kernels(kernels, lambda kernel: " > ".join(kernel.region) or "(in no region)"):
        groups = _group_kernels(inside, lambda kernel: kernel.name)
        rows += [_cells(region, inside), *(_cells(*group) for group in groups)]
        indents += [0, *[2] * len(groups)]
    yield Table(_COLUMNS, rows[:_MAX_KERNELS], indents[:_MAX_KERNELS])
    how = f"; all kernels: {shell_line(['ncu', '--import', str(report)])}"
    yield from more(len(rows) - _MAX_KERNELS, "more line", how)


def _group_kernels(
    kernels: Sequence[MeasuredKernel], key: Callable[[MeasuredKernel], str]
) -> list[tuple[str, list[MeasuredKernel]]]:
    groups: dict[str, list[MeasuredKernel]] = defaultdict(list)
    for kernel in kernels:
        groups[key(kernel)].append(kernel)
    return sorted(groups.items(), key=lambda item: -sum(kernel.duration_ns for kernel in item[1]))


def _cells(name: str, kernels: Sequence[MeasuredKernel]) -> list[str]:
    whole = sum(kernel.duration_ns for kernel in kernels)
    return [name, count(len(kernels)), duration(whole), *(_mean(kernels, share) for share in _SHARES)]


def _mean(kernels: Sequence[MeasuredKernel], share: Callable[[MeasuredKernel], float | None]) -> str:
    known = [(kernel.duration_ns, value) for kernel in kernels if (value := share(kernel)) is not None]
    weight = sum(ns for ns, _ in known)
    return f"{sum(ns * value for ns, value in known) / weight:.1f}" if weight else "-"
