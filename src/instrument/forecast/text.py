"""A forecast as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..base.printable import shown_name
from ..base.units import duration, percentage, size
from ..explain.waits.report import times
from .forecast import Forecast

_ROWS = 6
_COLUMN = 20


def lines(forecasts: Sequence[Forecast]) -> Iterator[str]:
    """Yield the lines of the forecasts of a step: the GPUs side by side, then each by region and family."""
    yield f"{'gpu':<10}{'step':>10}  {'range':<24}{'bound by':<10}{'memory':<24}".rstrip()
    for each in forecasts:
        time = each.time
        span = f"{duration(time.least_ns)} to {duration(time.most_ns)}"
        row = f"{each.gpu.name:<10}{duration(time.ns):>10}  {span:<24}{time.limit.upper():<10}{_memory(each):<24}"
        yield (row + "  bound, not forecast" * each.is_bound).rstrip()
    for each in forecasts:
        yield ""
        yield from _details(each)


def _memory(forecast: Forecast) -> str:
    """Return the peak of the memory, and whether the GPU has so much."""
    if forecast.peak_bytes is None:
        return "unknown"
    of = f"{size(forecast.peak_bytes)} of {size(forecast.gpu.memory_bytes)}"
    return of if forecast.fits else f"{of}: too much"


def _details(forecast: Forecast) -> Iterator[str]:
    time = forecast.time
    yield f"{forecast.gpu.name}: GPU {duration(time.gpu_ns)}, CPU {duration(time.cpu_ns)} to launch"
    if forecast.synchronizations:
        yield f"  the CPU waits for the GPU {times(forecast.synchronizations)} in the step"
    checked = forecast.checked
    if forecast.is_bound:
        yield "  nothing was measured on this GPU: the least time that its data sheet allows"
    elif checked is None:
        yield "  no whole step was measured on this GPU"
    else:
        like = "" if forecast.gpu.like is None else f" on {forecast.gpu.like}, which has the same chip"
        yield (
            f"  measured steps of other models{like}: mean error {checked.error:.0%}, worst {checked.worst:.0%}, "
            f"of {checked.count}"
        )
    if time.bound_share and not forecast.is_bound:
        yield f"  {percentage(time.bound_share)} of the GPU time is a bound, not forecast"
    for title, parts in (("region", forecast.regions), ("family", time.by_family)):
        if title == "region" and list(parts) == [""]:
            continue
        for name, ns in list(parts.items())[:_ROWS]:
            shown = shown_name(name) if name else f"(no {title})"
            yield f"  {title} {shown:<{_COLUMN}} {duration(ns):>10} {percentage(ns / time.gpu_ns):>7}"
