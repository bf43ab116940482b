"""A forecast as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..base.printable import shown_name
from ..base.units import duration, percentage, size
from ..explain.waits.report import times
from .forecast import Forecast
from .links import LINKS

_ROWS = 6
_COLUMN = 20
_MOSTLY = 0.5  # of the GPU time
_CHECKED = 0.5  # of the GPU time, for which the errors of measured steps are told


def lines(forecasts: Sequence[Forecast]) -> Iterator[str]:
    """Yield the lines of the forecasts of a step: the GPUs side by side, then each by region and family."""
    batch = any(each.largest_batch is not None for each in forecasts)
    yield f"{'gpu':<10}{'step':>10}  {'range':<24}{'bound by':<10}{'memory':<24}{'batch' * batch}".rstrip()
    for each in forecasts:
        time = each.time
        span = f"{duration(time.least_ns)} to {duration(time.most_ns)}"
        name = f"{each.ranks} x {each.gpu.name}" if each.ranks > 1 else each.gpu.name
        row = f"{name:<10}{duration(time.ns):>10}  {span:<24}{time.limit.upper():<10}{_memory(each):<24}"
        row += "" if each.largest_batch is None else f"{each.largest_batch:<7}"
        note = (
            "  bound, not forecast" if each.is_bound else "  mostly a bound" if time.bound_share > _MOSTLY else ""
        )
        yield (row + note).rstrip()
    if forecasts[0].assumed:
        yield f"{forecasts[0].assumed}"
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
    if time.communication_ns:
        hidden = max(time.communication_ns - time.exposed_ns, 0.0)
        yield (
            f"  communication over {LINKS[forecast.gpu.name].name}: {duration(time.communication_ns)}, of which "
            f"{duration(time.exposed_ns)} exposed and {duration(hidden)} hidden; not measured"
        )
    if forecast.synchronizations:
        yield f"  the CPU waits for the GPU {times(forecast.synchronizations)} in the step"
    checked = forecast.checked
    if forecast.is_bound:
        yield "  nothing was measured on this GPU: the least time that its data sheet allows"
    elif checked is None or time.checked_share < _CHECKED:
        yield "  no whole step like this was measured on this GPU"
    else:
        like = "" if forecast.gpu.like is None else f" on {forecast.gpu.like}, which has the same chip"
        yield (
            f"  checked on {checked.count} measured FP32 steps of other models{like}: mean error "
            f"{checked.error:.0%}, worst {checked.worst:.0%}"
        )
    if time.bound_share and not forecast.is_bound:
        yield f"  {percentage(time.bound_share)} of the GPU time is a bound, not forecast"
    for title, parts in (("region", forecast.regions), ("family", time.by_family)):
        if title == "region" and list(parts) == [""]:
            continue
        for name, ns in list(parts.items())[:_ROWS]:
            shown = shown_name(name) if name else f"(no {title})"
            yield f"  {title} {shown:<{_COLUMN}} {duration(ns):>10} {percentage(ns / time.gpu_ns):>7}"
