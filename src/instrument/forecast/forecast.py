"""`forecast_of`: the time of a step that a dry run counted, on GPUs that are not there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ..syncs.counting.step_counts import StepCounts
from .assumed import Plan, as_recorded
from .gpus import Gpu
from .recorded import step_calls
from .steps import StepTime, prices, step_time
from .table import Steps, Table

VERSION = 1
_ALL = 0.999  # of the GPU time


@dataclass(frozen=True)
class Forecast:
    """What a step takes on one GPU.

    Attributes:
        gpu: the GPU.
        time: the time of the step, with its range.
        regions: the time on the GPU by region, the longest first; "" is outside all regions.
        checked: the whole steps that were measured on this GPU or one with its chip, and their errors; None if
            there are none.
        peak_bytes: the memory at the peak; None if it is not known.
        synchronizations: how often the CPU waits for the GPU in the step.
        ranks: on how many such GPUs the step runs.
        assumed: what the program does not do itself on them, in words.
        largest_batch: the largest batch that fits; None if it was not looked for.
    """

    gpu: Gpu
    time: StepTime
    regions: dict[str, float]
    checked: Steps | None
    peak_bytes: int | None
    synchronizations: int
    ranks: int = 1
    assumed: str = ""
    largest_batch: int | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the peak is less than the memory that the GPU has for torch; None if it is not known."""
        return None if self.peak_bytes is None else self.peak_bytes <= self.gpu.torch_bytes

    @property
    def is_bound(self) -> bool:
        """Whether nothing was measured on this GPU, so that the time is a bound and no forecast."""
        return self.time.bound_share > _ALL

    def as_dict(self) -> dict[str, Any]:
        """Return the forecast as a dict of JSON values; while ``version`` is 1, keys are only added."""
        return {
            "version": VERSION,
            "gpu": self.gpu.name,
            "how": "bound" if self.is_bound else "forecast",
            **asdict(self.time),
            "regions": self.regions,
            "checked": asdict(self.checked) if self.checked else None,
            "peak_bytes": self.peak_bytes,
            "memory_bytes": self.gpu.memory_bytes,
            "fits": self.fits,
            "synchronizations": self.synchronizations,
            "ranks": self.ranks,
            "assumed": self.assumed,
            "largest_batch": self.largest_batch,
        }


def forecast_of(step: StepCounts, gpus: Iterable[Gpu], table: Table, plan: Plan | None = None) -> list[Forecast]:
    """Return what a step takes on each of some GPUs.

    Args:
        step: the counts of the step.
        gpus: the GPUs.
        table: the measured operators.
        plan: the step on as many GPUs as it runs on; None for one.
    """
    plan = plan or as_recorded(step.span, None)
    calls = step_calls(step.span)
    found = []
    for gpu in gpus:
        priced = prices(calls, gpu, table)
        regions: dict[str, float] = defaultdict(float)
        for call, (_, place) in zip(calls, step.span, strict=True):
            if call.operation is not None:
                regions[" > ".join(place.region)] += priced[call.operation].ns
        longest = dict(sorted(regions.items(), key=lambda item: -item[1]))
        time = step_time(plan.calls, gpu, table, plan.notes)
        found.append(
            Forecast(
                gpu,
                time,
                longest,
                table.steps(gpu),
                plan.peak_bytes,
                step.synchronizations,
                plan.ranks,
                plan.assumed,
            )
        )
    return found
