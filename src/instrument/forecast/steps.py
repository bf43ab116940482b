"""How long a step takes: its operators one after the other on the GPU, launched by one CPU, with a range."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Literal

from ..syncs.counting.streams import StreamNote
from .gpus import Gpu
from .links import collective_ns
from .operations import Operation
from .operator_time import OTHER_MEMORY, OperatorTime, operator_time
from .table import Table
from .timeline import StepCall, timeline

_STEP_ERROR = 0.15  # where no whole step was measured on a GPU
_HOSTS = 0.5  # by which the CPU's time differs between hosts
_RANGE = 2.0  # mean errors
_BOUND_ERROR = 1.0  # of a bound: such operators may take twice as long


@dataclass(frozen=True)
class StepTime:
    """The forecast time of a step.

    Attributes:
        ns: the time of the step.
        least_ns: the lower end of its range.
        most_ns: the upper end.
        gpu_ns: the time of its operators on the GPU.
        cpu_ns: what the CPU takes to launch them.
        limit: what the step is bound by, "gpu", "cpu" or the "link" between GPUs: the one that is busy longest.
        by_family: the GPU time by the family of the operators, the longest first.
        bound_share: the share of the GPU time that is a bound and no forecast.
        checked_share: the share of the GPU time that is like the measured steps: in FP32 and no bound.
        communication_ns: the time of its collectives.
        exposed_ns: by how much they lengthen the step; the rest of them is hidden behind other work.
    """

    ns: float
    least_ns: float
    most_ns: float
    gpu_ns: float
    cpu_ns: float
    limit: Literal["gpu", "cpu", "link"]
    by_family: dict[str, float]
    bound_share: float
    checked_share: float
    communication_ns: float = 0.0
    exposed_ns: float = 0.0


def step_time(calls: Sequence[StepCall], gpu: Gpu, table: Table, notes: Sequence[StreamNote] = ()) -> StepTime:
    """Return the time of a step from its calls in their order.

    The CPU launches one call after the other, and runs ahead of the GPU, as `timeline` has it.

    The range is twice the mean error to both sides, in which about nine of ten steps lie if errors are normally
    distributed. The errors of families are independent of each other, so that their squares add up, each weighted
    by its share of the time, with that of whole steps: the measured one of this GPU for the share that is like the
    measured steps, in FP32 and no bound. On top, operators whose time is a bound may take twice as long, and so
    may collectives. Hosts differ by half of the CPU's time, where that is the limit.

    Args:
        calls: the calls of the step.
        gpu: the GPU.
        table: the measured operators.
        notes: what orders the work of its streams.
    """
    priced = prices(calls, gpu, table)
    times = [priced.get(call.operation) if call.operation else None for call in calls]
    alone = [time.ns if time else 0.0 if call.collective else None
             for call, time in zip(calls, times, strict=True)]  # fmt: skip
    sent = [collective_ns(call.collective, gpu) if call.collective else 0.0 for call in calls]
    without, cpu = timeline(calls, alone, notes)
    end = without
    if any(sent):
        both = [None if ns is None else ns + more for ns, more in zip(alone, sent, strict=True)]
        end, _ = timeline(calls, both, notes)
    by_family: dict[str, float] = defaultdict(float)
    spread: dict[str, float] = defaultdict(float)
    bound = alike = 0.0
    for call, time in zip(calls, times, strict=True):
        if call.operation is not None and time is not None:
            by_family[call.operation.family] += time.ns
            if time.error is None:
                bound += time.ns
            else:
                spread[call.operation.family] += time.ns * time.error
                alike += time.ns * _is_like_steps(call.operation, time)
    gpu_ns = sum(by_family.values())
    whole_error = alike * _step_error(gpu, table) + (gpu_ns - alike) * _STEP_ERROR
    error = _RANGE * hypot(*spread.values(), whole_error)
    busy: dict[Literal["gpu", "cpu", "link"], float] = {"gpu": gpu_ns, "cpu": cpu, "link": sum(sent)}
    limit = max(busy, key=lambda name: busy[name])
    host = _HOSTS * cpu if limit == "cpu" else 0.0
    return StepTime(
        end,
        max(end - max(error, host), 0.0),
        end + max(error, host) + (bound + end - without) * _BOUND_ERROR,
        gpu_ns,
        cpu,
        limit,
        dict(sorted(by_family.items(), key=lambda item: -item[1])),
        bound / gpu_ns if gpu_ns else 0.0,
        alike / gpu_ns if gpu_ns else 0.0,
        sum(sent),
        end - without,
    )


def prices(calls: Iterable[StepCall], gpu: Gpu, table: Table) -> dict[Operation, OperatorTime]:
    """Return the time of each distinct operation among the calls of a step.

    Operators like those of the steps that were measured on this GPU take longer by as much as these steps did.
    """
    measured = table.steps(gpu)
    found = {}
    for operation in {call.operation for call in calls if call.operation is not None}:
        time = operator_time(operation, gpu, table)
        longer = measured.factor if measured and _is_like_steps(operation, time) else 1.0
        found[operation] = time._replace(ns=time.ns * longer)
    return found


def _is_like_steps(operation: Operation, time: OperatorTime) -> bool:
    """Return whether an operator is one like those of the measured steps, which were all in FP32."""
    return operation.type == "fp32" and time.error is not None


def _step_error(gpu: Gpu, table: Table) -> float:
    measured = table.steps(gpu)
    if measured is None:
        return _STEP_ERROR
    return measured.error * (1.0 if gpu.name in table.gpus else OTHER_MEMORY)
