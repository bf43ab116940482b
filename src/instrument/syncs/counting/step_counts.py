"""`StepCounts`: what one step of a dry run does on the GPU."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from ...base.findings import Direction
from ...base.guard import guard
from .calls import Call, Memory, Phase, Place, Span
from .compilation import Compiled
from .kernels import Launches, launches_of
from .launches import Launch
from .recorder import FEATURE
from .work import Work, work_of

By = Literal["phase", "region", "module", "line", "operator"]
_KEYS: Mapping[str, Callable[[Call, Place], str]] = {
    "phase": lambda call, place: place.phase,
    "region": lambda call, place: " > ".join(place.region),
    "module": lambda call, place: place.module,
    "line": lambda call, place: str(place.site or place.via or ""),
    "operator": lambda call, place: call.name,
}


@dataclass(frozen=True, order=True)
class Copies:
    """Copies between the CPU and the GPU.

    Attributes:
        direction: "H2D" or "D2H".
        pinned: whether the memory of the CPU is pinned.
        count: the number of copies.
        bytes: their bytes.
    """

    direction: Direction
    pinned: bool
    count: int
    bytes: int


@dataclass(frozen=True, order=True)
class Collectives:
    """The collectives of one kind in one process group.

    Attributes:
        name: the operator, such as "c10d::allreduce_".
        group: the name of the process group.
        count: the number of calls.
        bytes: the bytes of their inputs or results, whichever are more.
    """

    name: str
    group: str
    count: int
    bytes: int


class Row(NamedTuple):
    """A row of `StepCounts.by`: what belongs to one phase, region, module, line or operator."""

    name: str
    operators: int
    kernels: int
    flops: int
    read: int
    written: int


@dataclass(frozen=True)
class StepCounts:
    """What one step does on the GPU.

    Attributes:
        step: the number of the step, from 1 on.
        operators: the operators, including those that only make a view.
        launching: the operators that launch kernels.
        kernels: the number of kernels by family, most first; without memcpys and memsets.
        memcpys: the number of copies inside the GPU's memory.
        memsets: the number of memsets.
        flops: floating-point operations by kind ("matmul", "attention", "convolution") and pass.
        priced: the operators that launch kernels and whose operations are known.
        read: the bytes that kernels read: the distinct inputs of each operator.
        written: the bytes that they write: its distinct results.
        copies: the copies between CPU and GPU.
        synchronizations: how often the CPU waits for the GPU.
        collectives: the collectives.
        optimizer: "fused", "foreach" or "single", as the optimizers update; None without one.
        unknown: operators whose kernels are not known, with their number; each counts as one kernel.
        compiled_kernels: those of `kernels` that belong to graphs of torch.compile. What a compiler makes of them
            is not known: they are counted as those of the operators in the graphs.
        graphs: the graphs that torch.compile made.
        graph_breaks: its graph breaks.
        recompilations: how often it compiled a function once more.
        by_data: operators whose results have sizes that depend on data, so that other data may give other counts.
        span: the operators of the step in order, with their places.
        prices: what each of their calls does.
    """

    step: int
    operators: int
    launching: int
    kernels: dict[str, int]
    memcpys: int
    memsets: int
    flops: dict[str, dict[Phase, int]]
    priced: int
    read: int
    written: int
    copies: list[Copies]
    synchronizations: int
    collectives: list[Collectives]
    optimizer: str | None
    unknown: dict[str, int]
    compiled_kernels: int
    graphs: int
    graph_breaks: int
    recompilations: int
    by_data: list[str]
    span: Span = field(repr=False, compare=False)
    prices: Prices = field(repr=False, compare=False)

    @property
    def kernel_count(self) -> int:
        """The number of kernels."""
        return sum(self.kernels.values())

    @property
    def flop_count(self) -> int:
        """The floating-point operations of matmuls, attention and convolutions."""
        return sum(sum(phases.values()) for phases in self.flops.values())

    @property
    def flops_coverage(self) -> float | None:
        """The share of the operators that launch kernels whose operations are known."""
        return self.priced / self.launching if self.launching else None

    def by(self, what: By) -> list[Row]:
        """Return the counts by phase, region, module, line or operator, in the order of their first call.

        Raises:
            ValueError: ``what`` is none of these.
        """
        if what not in _KEYS:
            raise ValueError(f'"what" must be one of {", ".join(_KEYS)}: {what!r}')
        rows: dict[str, list[int]] = {}
        for call, place, times in self.span.counted():
            row = rows.setdefault(_KEYS[what](call, place), [0] * 5)
            about = self.prices[call]
            moved = (about.work.read, about.work.written) if about.kernels else (0, 0)
            for index, value in enumerate((1, about.kernels, about.work.flops, *moved)):
                row[index] += value * times
        return [Row(name, *values) for name, values in rows.items()]

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as a dict of JSON values."""
        values = {name: value for name, value in vars(self).items() if name not in ("span", "prices")}
        return values | {
            "kernel_count": self.kernel_count,
            "flop_count": self.flop_count,
            "flops_coverage": self.flops_coverage,
            "copies": [asdict(each) for each in self.copies],
            "collectives": [asdict(each) for each in self.collectives],
        }


class _About(NamedTuple):
    launches: Launches
    work: Work
    kernels: int


class Prices(dict[Call, _About]):
    """What each call does, computed at the first look."""

    def __missing__(self, call: Call) -> _About:
        try:
            launches, work = launches_of(call), work_of(call)
        except Exception as error:  # arguments that a rule does not expect
            guard.failed(FEATURE, error)
            launches, work = Launches((Launch("other"),), False), Work("", 0, False, 0, 0)
        kernels = sum(launch.family not in ("memcpy", "memset") for launch in launches.works)
        about = self[call] = _About(launches, work, kernels)
        return about


def step_counts(number: int, span: Span, prices: Prices, synchronizations: int, made: Compiled) -> StepCounts:
    """Return the counts of the step with a number, in which the CPU waits so often and torch.compile made this."""
    kernels: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    copies: dict[tuple[Direction, bool], list[int]] = {}
    collectives: dict[tuple[str, str], list[int]] = {}
    flops: dict[str, Counter[Phase]] = {}
    launching = priced = read = written = compiled = 0
    updates: set[str] = set()
    by_data: dict[str, None] = {}
    for call, place, times in span.counted():
        about = prices[call]
        for launch in about.launches.works:
            kernels[launch.family] += times
            if launch.family == "memcpy" and (launch.source, launch.target) != ("gpu", "gpu"):
                kernels["memcpy"] -= times
                direction, pinned = _direction(launch.source, launch.target)
                _add(copies.setdefault((direction, pinned), [0, 0]), launch, times)
            elif launch.family == "collective":
                group = span.record.group_of(call)
                _add(collectives.setdefault((call.name, group.shown if group else ""), [0, 0]), launch, times)
        if about.kernels:
            launching += times
            compiled += about.kernels * times * place.compiled
            priced += about.work.known * times
            read, written = read + about.work.read * times, written + about.work.written * times
        if about.work.kind:
            flops.setdefault(about.work.kind, Counter())[place.phase] += about.work.flops * times
        if not about.launches.known:
            unknown[call.name] += times
        if place.phase == "optimizer" and not (place.via and place.via.file.endswith(_CLIPPING)):
            updates.add(_way_of_update(call.name))
        if torch.Tag.dynamic_output_shape in call.operator.tags:
            by_data[call.name] = None
    memcpys, memsets = kernels.pop("memcpy", 0), kernels.pop("memset", 0)
    return StepCounts(
        number, len(span), launching, dict(kernels.most_common()), memcpys, memsets,
        {kind: dict(phases) for kind, phases in flops.items()}, priced, read, written,
        sorted(Copies(*key, *values) for key, values in copies.items()), synchronizations,
        sorted(Collectives(*key, *values) for key, values in collectives.items()),
        next((way for way in ("fused", "foreach", "single") if way in updates), None), dict(unknown),
        compiled, made.graphs, made.graph_breaks, made.recompilations, list(by_data), span, prices,
    )  # fmt: skip


def _add(total: list[int], launch: Launch, times: int) -> None:
    total[:] = [total[0] + times, total[1] + launch.bytes * times]


def _direction(source: Memory, target: Memory) -> tuple[Direction, bool]:
    return ("H2D", source == "pinned") if target == "gpu" else ("D2H", target == "pinned")


_CLIPPING = f"{os.sep}nn{os.sep}utils{os.sep}clip_grad.py"


def _way_of_update(name: str) -> str:
    short = name.rpartition("::")[2]
    return "fused" if short.startswith("_fused_") else "foreach" if short.startswith("_foreach_") else "single"
