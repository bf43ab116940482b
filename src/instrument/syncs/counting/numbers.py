"""Makes the numbers that a project can hold from the counts of a step: integers by name, each with its places."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from ...base.findings import SyncFinding
from ...base.numbered_names import Path, joined_paths
from ...explain.contract.numbers import KERNELS, WITHOUT_KERNEL, Number, Numbers, Spot
from .calls import PHASES, Place
from .compilation import EventKind
from .counts import Counts
from .launches import Launch
from .step_counts import StepCounts

_NO_WORD = re.compile(r"[^\w:-]+")
_KINDS = ("matmul", "attention", "convolution")
_PARTS = {
    "kernels": KERNELS,
    "flops": [f"{kind}.{phase}" for kind in _KINDS for phase in PHASES],
    **{f"{way}_{what}": ["pageable", "pinned"] for way in ("h2d", "d2h") for what in ("bytes", "copies")},
}
_SINGLE = ("operators", "memcpys", "memsets", "read_bytes", "written_bytes", "collectives", "collective_bytes")
_OF_COMPILER: Mapping[str, EventKind] = {
    "compiled_graphs": "graph", "graph_breaks": "graph break", "recompilations": "recompilation",
}  # fmt: skip
KNOWN = (*_SINGLE, *_PARTS, *(f"{whole}.{part}" for whole, parts in _PARTS.items() for part in parts),
         *(f"flops.{kind}" for kind in _KINDS))  # fmt: skip
"""The numbers of operators, also of those that a program may lack."""


class PartOfPeak(Protocol):
    """What one place holds of the memory at its peak."""

    @property
    def place(self) -> Place:
        """The place."""

    @property
    def bytes(self) -> int:
        """How much."""


class Peak(Protocol):
    """The memory of the GPU at its peak."""

    @property
    def peak_bytes(self) -> int:
        """The peak."""

    @property
    def uses(self) -> Sequence[PartOfPeak]:
        """Its parts."""


def numbers_of(counts: Counts, syncs: Iterable[SyncFinding], memory: Peak | None = None) -> Numbers:
    """Return the numbers of the typical step.

    Graph breaks, compilations and the peak of memory are those of the whole run. Numbers of a step with operators
    whose results depend on data are marked as not exact.

    Args:
        counts: the counts of the run.
        syncs: where it synchronizes.
        memory: its peak; None if it is not known.
    """
    step = counts.step
    parts = _of_operators(step)
    exact = not step.by_data
    join = _joined({place.region for place in step.span.record.places})
    numbers = {name: Number(places.total(), join(places), exact) for name, places in parts.items()}
    waits: Counter[Spot] = Counter()
    for finding in syncs:
        waits[Spot(finding.region, finding.site or finding.via)] += finding.steps[step.step - 1]
    numbers["syncs"] = Number(waits.total(), join(waits))
    compiled = counts.compiled
    for name, kind in _OF_COMPILER.items():
        made = Counter(Spot(event.region, event.site or event.via) for event in compiled.of_kind(kind))
        numbers[name] = Number(made.total(), join(made))
    if memory is not None:
        held: Counter[Spot] = Counter()
        for use in memory.uses:
            held[_spot(use.place)] += use.bytes
        numbers["peak_bytes"] = Number(memory.peak_bytes, join(held), exact)
    return Numbers(numbers, KNOWN)


def _joined(regions: Iterable[Path]) -> Callable[[Counter[Spot]], Counter[Spot]]:
    """Return a function that adds up the places in regions whose names differ only in numbers, such as layers."""
    paths = dict.fromkeys(region[:depth] for region in sorted(regions) for depth in range(1, len(region) + 1))
    joined = joined_paths(paths)

    def join(places: Counter[Spot]) -> Counter[Spot]:
        sums: Counter[Spot] = Counter()
        for spot, value in places.items():
            if value:
                sums[spot._replace(region=joined.get(spot.region, spot.region))] += value
        return sums

    return join


def _of_operators(step: StepCounts) -> dict[str, Counter[Spot]]:
    """Return the numbers by name and place, with the sums of those with dots."""
    parts: dict[str, Counter[Spot]] = defaultdict(Counter)
    for name in (*_SINGLE, *_PARTS):
        parts[name] = Counter()

    def add(name: str, spot: Spot, value: int) -> None:
        words = name.split(".")
        for length in range(1, len(words) + 1):
            parts[".".join(words[:length])][spot] += value

    for call, place, times in step.span.counted():
        about, spot, group = step.prices[call], _spot(place), step.span.record.group_of(call)
        add("operators", spot, times)
        for launch in about.launches.works:
            for name, value in _of_launch(launch, group.shown if group else ""):
                add(name, spot, value * times)
        if about.kernels:
            add("read_bytes", spot, about.work.read * times)
            add("written_bytes", spot, about.work.written * times)
        if about.work.kind and about.work.flops:
            add(f"flops.{about.work.kind}.{place.phase}", spot, about.work.flops * times)
    return parts


def _of_launch(launch: Launch, group: str) -> list[tuple[str, int]]:
    """Return the names of the numbers that a launch adds to, and how much."""
    if launch.family == "memcpy" and (launch.source, launch.target) != ("gpu", "gpu"):
        to_gpu = launch.target == "gpu"
        direction, host = ("h2d", launch.source) if to_gpu else ("d2h", launch.target)
        kind = "pinned" if host == "pinned" else "pageable"
        return [(f"{direction}_copies.{kind}", 1), (f"{direction}_bytes.{kind}", launch.bytes)]
    if launch.family in WITHOUT_KERNEL:
        return [(f"{launch.family}s", 1)]
    kernel = [(f"kernels.{launch.family}", 1)]
    if launch.family == "collective":
        group = _NO_WORD.sub("_", group.removeprefix("mesh_"))
        kernel += [
            ("collectives", 1),
            (f"collective_bytes.{group}" if group else "collective_bytes", launch.bytes),
        ]
    return kernel


def _spot(place: Place) -> Spot:
    return Spot(place.region, place.site or place.via)
