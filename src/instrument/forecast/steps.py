"""How long a step takes: its operators one after the other on the GPU, launched by one CPU, with a range."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Literal, NamedTuple

from .gpus import Gpu
from .operations import Operation
from .operator_time import OTHER_MEMORY, OperatorTime, operator_time
from .table import Table

LAUNCH_NS = 10_000
"""What the CPU takes for an operator that launches a kernel.

Of eight recorded traces, a tenth of the launches follow the one before within 6 to 31 us, 12 us in the median,
with a profiler running; the other launches wait for something else.
"""

VIEW_NS = 2_000
"""What the CPU takes for an operator that launches none."""

_LATENCY_NS = 5_000  # from a launch to the start of its kernel
_STEP_ERROR = 0.15  # where no whole step was measured on a GPU
_HOSTS = 0.5  # by which the CPU's time differs between hosts
_RANGE = 2.0  # mean errors
_BOUND_ERROR = 1.0  # of a bound: such operators may take twice as long


class StepCall(NamedTuple):
    """One call in a step: what the GPU computes, if anything, and whether the CPU waits for it."""

    operation: Operation | None
    waits: bool = False


@dataclass(frozen=True)
class StepTime:
    """The forecast time of a step.

    Attributes:
        ns: the time of the step.
        least_ns: the lower end of its range.
        most_ns: the upper end.
        gpu_ns: the time of its operators on the GPU.
        cpu_ns: what the CPU takes to launch them.
        limit: what the step is bound by, "gpu" or "cpu": the one that is busy longer.
        by_family: the GPU time by the family of the operators, the longest first.
        bound_share: the share of the GPU time that is a bound and no forecast.
    """

    ns: float
    least_ns: float
    most_ns: float
    gpu_ns: float
    cpu_ns: float
    limit: Literal["gpu", "cpu"]
    by_family: dict[str, float]
    bound_share: float


def step_time(calls: Sequence[StepCall], gpu: Gpu, table: Table) -> StepTime:
    """Return the time of a step from its calls in their order.

    The CPU launches one call after the other, and runs ahead of the GPU, which runs one after the other. The GPU's
    part is multiplied by how much longer whole steps took on this GPU than their operators.

    The range is twice the mean error to both sides, in which about nine of ten steps lie if errors are normally
    distributed. The errors of families are independent of each other, so that their squares add up, each weighted
    by its share of the time, with that of the error of whole steps on this GPU. On top, operators whose time is a
    bound may take twice as long. Hosts differ by half of the CPU's time, where that is the limit.
    """
    priced = prices(calls, gpu, table)
    known = gpu.name if gpu.name in table.gpus else gpu.like
    whole = table.gpus[known].steps if known is not None and known in table.gpus else None
    factor = whole.factor if whole else 1.0
    times = [priced.get(call.operation) if call.operation else None for call in calls]
    end, cpu = _timeline(calls, [time.ns * factor if time else None for time in times])
    by_family: dict[str, float] = defaultdict(float)
    spread: dict[str, float] = defaultdict(float)
    bound = 0.0
    for call, time in zip(calls, times, strict=True):
        if call.operation is not None and time is not None:
            by_family[call.operation.family] += time.ns * factor
            if time.error is None:
                bound += time.ns * factor
            else:
                spread[call.operation.family] += time.ns * factor * time.error
    gpu_ns = sum(by_family.values())
    whole_error = whole.error * (1.0 if known == gpu.name else OTHER_MEMORY) if whole else _STEP_ERROR
    error = _RANGE * hypot(*spread.values(), gpu_ns * whole_error)
    limit: Literal["gpu", "cpu"] = "gpu" if gpu_ns >= cpu else "cpu"
    host = _HOSTS * cpu if limit == "cpu" else 0.0
    return StepTime(
        end,
        max(end - max(error, host), 0.0),
        end + max(error, host) + bound * _BOUND_ERROR,
        gpu_ns,
        cpu,
        limit,
        dict(sorted(by_family.items(), key=lambda item: -item[1])),
        bound / gpu_ns if gpu_ns else 0.0,
    )


def prices(calls: Iterable[StepCall], gpu: Gpu, table: Table) -> dict[Operation, OperatorTime]:
    """Return the time of each distinct operation among the calls."""
    distinct = {call.operation for call in calls if call.operation is not None}
    return {operation: operator_time(operation, gpu, table) for operation in distinct}


def _timeline(calls: Sequence[StepCall], times: Sequence[float | None]) -> tuple[float, float]:
    """Return when CPU and GPU are both done, and the time that the CPU itself takes."""
    cpu = gpu = busy = 0.0
    for call, ns in zip(calls, times, strict=True):
        cost = VIEW_NS if ns is None else LAUNCH_NS
        cpu, busy = cpu + cost, busy + cost
        if ns is not None:
            gpu = max(gpu, cpu + _LATENCY_NS) + ns
        if call.waits:
            cpu = max(cpu, gpu)
    return max(cpu, gpu), busy
