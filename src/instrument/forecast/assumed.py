"""What a step of one GPU would exchange on several: the gradients, or with FSDP the parameters, too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

from ..base.units import size
from ..syncs.counting.calls import Place, Span
from ..syncs.counting.memory import Models
from ..syncs.counting.memory_use import MemoryUse
from ..syncs.counting.streams import StreamNote
from .operations import MATMULS
from .recorded import step_calls, stream_notes
from .schedule import Schedule, buckets, reduced
from .timeline import StepCall

Parallel = Literal["dp", "fsdp"]
PARALLEL: tuple[Parallel, ...] = ("dp", "fsdp")
_GATHERING = -2  # the stream on which parameters are gathered


class Plan(NamedTuple):
    """A step as a forecast takes it.

    Attributes:
        calls: its calls.
        notes: what orders them on the streams.
        peak_bytes: the memory of a GPU at the peak; None if it is not known.
        ranks: the number of GPUs.
        assumed: what the program does not do itself, in words; empty if nothing was assumed.
    """

    calls: list[StepCall]
    notes: list[StreamNote]
    peak_bytes: int | None
    ranks: int = 1
    assumed: str = ""


def as_recorded(span: Span, memory: MemoryUse | None, ranks: int = 1) -> Plan:
    """Return the step as the program runs it, as the first of so many ranks."""
    return Plan(step_calls(span, ranks), stream_notes(span), memory.peak_bytes if memory else None, ranks)


def assumed(parallel: Parallel, span: Span, memory: MemoryUse, models: Models, ranks: int) -> Plan:
    """Return the step of a program for one GPU as each of several would run it.

    Args:
        parallel: "dp", as DistributedDataParallel does it; "fsdp", as `fully_shard` does on each block.
        span: the step.
        memory: the memory of the run.
        models: what it trains.
        ranks: the number of GPUs.

    Raises:
        ValueError: the program calls no module with parameters to train.
    """
    if not models.parameters:
        raise ValueError("the script calls no module whose parameters are trained: nothing is exchanged")
    return (_data_parallel if parallel == "dp" else _sharded)(span, memory, models, ranks)


def _data_parallel(span: Span, memory: MemoryUse, models: Models, ranks: int) -> Plan:
    places = [place for _, place in span]
    last = _ends(places)
    ready = sorted((_end(last, path), number) for path, number in models.parameters.items())
    total = sum(models.parameters.values())
    words = (
        f"assumed: DistributedDataParallel on {ranks} GPUs, each with the batch of the script; {size(total)} of "
        f"gradients in {len(buckets(ready))} buckets, whose memory counts"
    )
    peak = memory.peak_bytes + total
    return Plan(*reduced(step_calls(span), stream_notes(span), ready, ranks), peak, ranks, words)


def _ends(places: Sequence[Place]) -> dict[str, int]:
    """Return after which operator the last backward pass of each module is over; "" is all of it."""
    last: dict[str, int] = {}
    for index, place in enumerate(places):
        if place.phase == "backward":
            for path in _around(place.module):
                last[path] = index + 1
    return last


def _end(last: dict[str, int], path: str) -> int:
    """Return after which operator the gradient of a parameter is complete."""
    return next((last[each] for each in [*_around(path)][1:] if each in last), 0)


def _around(path: str) -> Iterator[str]:
    """Yield a path, and what is around it, up to all: ""."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def blocks(models: Models) -> tuple[str, list[str]]:
    """Return the class of the modules that people would shard one by one, and their paths.

    Of the classes with several members of lists of modules, it is the one whose modules hold the most parameters;
    the outer one of two that hold the same.
    """
    held: dict[str, int] = defaultdict(int)
    for path, number in models.parameters.items():
        for each in _around(path):
            held[each] += number
    of: dict[str, list[str]] = defaultdict(list)
    for path, kind in models.members.items():
        if held[path]:
            of[kind].append(path)
    for kind, paths in of.items():
        of[kind] = [path for path in paths if not any(each.startswith(f"{path}.") for each in paths)]
    repeated = [kind for kind, paths in of.items() if len(paths) > 1]
    if not repeated:
        return "", []
    best = max(repeated, key=lambda kind: (sum(held[path] for path in of[kind]), -len(of[kind])))
    return best, of[best]


def _sharded(span: Span, memory: MemoryUse, models: Models, ranks: int) -> Plan:
    places = [place for _, place in span]
    kind, paths = blocks(models)
    shares = {
        path: sum(number for name, number in models.parameters.items() if name.startswith(f"{path}."))
        for path in paths
    }
    rest = sum(models.parameters.values()) - sum(shares.values())
    calls = [
        _share(call, ranks) if place.phase == "optimizer" else call
        for call, place in zip(step_calls(span), places, strict=True)
    ]
    schedule = Schedule(calls, stream_notes(span), ranks)
    for begin, end in _passes(places):
        _exchange(schedule, places, begin, end, shares, rest)
    kinds = memory.by_category()
    kept = sum(kinds.get(each, 0) for each in ("parameters", "gradients", "optimizer_state"))
    whole = 3 * max(shares.values(), default=0) + 2 * rest
    peak = memory.peak_bytes - kept + kept // ranks + min(whole, 2 * sum(models.parameters.values()))
    of = f"each of {len(paths)} {kind} and on the rest" if paths else "the whole model"
    words = (
        f"assumed: fully_shard on {of}, on {ranks} GPUs, each with the batch of the script; a GPU keeps "
        f"1/{ranks} of parameters, gradients and optimizer state, and at the peak two blocks and the gradients "
        "of one"
    )
    return Plan(*schedule.result(), peak, ranks, words)


def _share(call: StepCall, ranks: int) -> StepCall:
    """Return a call of the optimizer that updates only its part of the parameters."""
    work = call.operation
    if work is None or work.family in MATMULS:
        return call
    return call._replace(operation=work._replace(bytes=work.bytes // ranks, flops=work.flops // ranks))


def _passes(places: Sequence[Place]) -> Iterator[tuple[int, int]]:
    """Yield where each forward pass begins and its backward pass ends."""
    begin, end, went_back = 0, 0, False
    for index, place in enumerate(places):
        if place.phase in ("backward", "recomputed"):
            went_back, end = True, index + 1
        elif went_back and place.phase == "forward" and place.module:
            yield begin, end
            begin, went_back = index, False
    if went_back:
        yield begin, end


def _exchange(
    schedule: Schedule, places: Sequence[Place], begin: int, end: int, shares: dict[str, int], rest: int
) -> None:
    """Put the exchanges of one forward and backward pass into a step, as `fully_shard` orders them.

    A block is gathered while the one before computes, at the earliest when the second one before has begun, and
    its gradients are reduced behind its backward pass.
    """
    forward: dict[str, int] = {}
    backward: dict[str, int] = {}
    ends: dict[str, int] = {}
    for index in range(begin, end):
        place = places[index]
        path = next((each for each in _around(place.module) if each in shares), None)
        if path is not None and place.phase == "forward":
            forward.setdefault(path, index)
        elif path is not None:
            backward.setdefault(path, index)
            ends[path] = index + 1
    if rest:
        inside = next((index for index in range(begin, end) if places[index].module), begin)
        schedule.wait(inside, schedule.send(inside, "all-gather", rest, stream=_GATHERING))
        schedule.copy(inside, rest)
    begun: list[int] = []
    scattered = 0
    for path, at in forward.items():
        gathered = schedule.send(at, "all-gather", shares[path], stream=_GATHERING)
        begun.append(_begin(schedule, at, gathered, begun))
        schedule.copy(at, shares[path])
    order = list(backward)
    gathered = schedule.send(backward[order[0]], "all-gather", shares[order[0]], stream=_GATHERING) if order else 0
    for path, following in zip_longest(order, order[1:]):
        begun.append(_begin(schedule, backward[path], gathered, begun))
        schedule.copy(backward[path], shares[path])
        if following is not None:
            gathered = schedule.send(backward[path], "all-gather", shares[following], stream=_GATHERING)
        schedule.copy(ends[path], shares[path])
        scattered = schedule.send(ends[path], "reduce-scatter", shares[path])
    if rest:
        schedule.copy(end, rest)
        scattered = schedule.send(end, "reduce-scatter", rest)
    schedule.wait(end, scattered)


def _begin(schedule: Schedule, at: int, gathered: int, begun: Sequence[int]) -> int:
    """Have a block wait for its parameters; return the event at which it begins."""
    for event in begun[-1:]:
        schedule.wait(at, event, stream=_GATHERING)
    schedule.wait(at, gathered)
    return schedule.record(at)
