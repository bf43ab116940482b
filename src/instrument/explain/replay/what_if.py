"""`what_if`: reads what a user wants changed, and predicts by a replay how long a step would be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np

from ...base.findings import Site
from ...base.units import counted, duration, parse_time
from ...read.measures.synchronizations import COPY, EXPLICIT, columns_of
from ...read.tables.nest import inside_rows
from ...read.tables.table import MEMCPY, Array, Table
from ..metrics.tables import one_of
from ..waits.trace_context import CallContext, TraceContext
from .critical_path import CLASSES, CriticalPath, critical_path
from .graph import Graph, times_by_thread
from .replay import Change, Replayer, SavedWork, mean_ns, without_events

_KERNEL, _REGION = "kernel:", "region:"
_WITHOUT = re.compile(r"dataloader|copies|sync|sync:.+|region:.+", re.DOTALL)
WITHOUT = "dataloader, copies, sync, sync:FILE:LINE or region:NAME"
"""What a step can be replayed without."""


def words_of(name: str, given: object) -> list[str]:
    """Return the words of an argument, which may be one text or several.

    Raises:
        TypeError: it is neither.
    """
    words = [given] if isinstance(given, str) else given
    if not isinstance(words, Collection) or isinstance(words, (bytes, Mapping)):
        raise TypeError(f'"{name}" must be a text or several: {given!r:.200}')
    return list(words)


def speeds_of(given: object) -> dict[str, float]:
    """Return what becomes faster, kernels by a regular expression or "region:NAME", and how many times as fast.

    Args:
        given: texts such as "kernel:gemm=2x", or a mapping such as ``{"kernel:gemm": 2}``. "kernel:" may be left
            out. None for none.

    Raises:
        TypeError: it is neither.
        ValueError: a text is not such a one, or two are of one expression.
    """
    return _by_name("speed", given, _factor, "kernel:REGEX=Nx or region:NAME=Nx, such as kernel:gemm=2x")


def durations_of(given: object) -> dict[str, Any]:
    """Return the regular expressions for names of kernels, and how long these take: text such as "50us".

    Raises:
        TypeError, ValueError: as in `speeds_of`.
    """
    return _by_name("replace", given, str, "kernel:REGEX=DURATION, such as kernel:gemm=50us")


def _by_name(argument: str, given: object, value: Callable[[str], Any], accepted: str) -> dict[str, Any]:
    """Return the values of texts NAME=VALUE or of a mapping, by name without "kernel:"."""
    if given is None:
        return {}
    pairs: list[tuple[str, Any]] = []
    if isinstance(given, Mapping):
        pairs = [(str(name), each) for name, each in given.items()]
    else:
        for text in words_of(argument, given):
            name, _, words = text.rpartition("=") if isinstance(text, str) else ("", "", "")
            try:
                if name.removeprefix(_KERNEL) in ("", _REGION):
                    raise ValueError
                pairs.append((name, value(words)))
            except ValueError:
                raise ValueError(f'"{argument}" must hold {accepted}: {text!r:.200}') from None
    values = {name.removeprefix(_KERNEL): each for name, each in pairs}
    if len(values) < len(pairs):
        raise ValueError(f'"{argument}" must hold each regular expression once: {given!r:.200}')
    return values


def _factor(text: str) -> float:
    return float(text.removesuffix("x"))


def launch_of(given: object) -> float | None:
    """Return the part that the CPU's work still takes; None if it is not changed.

    Raises:
        ValueError: it is neither a number from 0 to 1 nor text such as "0.1x".
    """
    if given is None:
        return None
    try:
        part = _factor(given) if isinstance(given, str) else given
    except ValueError:
        part = None
    if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 <= part <= 1:
        raise ValueError(f'"launch" must be a part from 0 to 1, such as 0.1x: {given!r:.200}')
    return float(part)


def requested_change(
    replayer: Replayer,
    without: Collection[str],
    speed: Mapping[str, float],
    overlap: Collection[str],
    launch: float | None,
    replaced: Mapping[str, Any],
) -> Change:
    """Return the change that a user asks for; see `instrument.explain.replay.what_if.what_if`.

    Raises:
        ValueError: a word is not one of those, or the trace has no such thing.
    """
    for what in without:
        if not isinstance(what, str) or not _WITHOUT.fullmatch(what):
            raise ValueError(f'"without" must hold {WITHOUT}: {what!r}')
    for what in overlap:
        if what != "communication":
            raise ValueError(f'"overlap" must hold "communication": {what!r}')
    if not replayer.has_cpu:
        return Change()
    change = Change()
    for what in without:
        change |= _without(replayer.graph, what)
    for pattern, factor in speed.items():
        change |= _faster(replayer.graph, pattern, factor)
    for pattern, length in replaced.items():
        change |= _with_length(replayer.graph, pattern, length)
    if launch is not None:
        change |= Change(work_saved=(SavedWork(1 - launch),))
    for _ in overlap:
        if not replayer.communication.any():
            raise ValueError("the trace has no kernels that communicate")
        change |= Change(overlapped=replayer.communication)
    return change


def _without(graph: Graph, what: str) -> Change:
    """Return the change in which one of `WITHOUT` costs nothing."""
    kind, _, name = what.partition(":")
    if what == "dataloader":
        return _without_input(graph)
    if what == "copies":
        return _without_copies(graph)
    if kind == "sync":
        return _without_syncs(graph, name)
    return _without_region(graph, name)


def _without_input(graph: Graph) -> Change:
    if not graph.batches:
        raise ValueError("the trace has no ranges of a DataLoader")
    return Change(graph.batches)


def _without_copies(graph: Graph) -> Change:
    copies = graph.trace.gpu.category == MEMCPY
    if not copies.any():
        raise ValueError("the trace has no memcpys")
    return without_copies(graph, copies)


def without_copies(graph: Graph, copies: Array) -> Change:
    """Return the change without these memcpys, a mask of `Trace.gpu`, their launches, and the waits for them."""
    launch = graph.trace.gpu.launch
    launches = np.unique(launch[copies & (launch >= 0)])
    waits = [
        number
        for number, wait in enumerate(graph.waits)
        if wait.copy >= 0
        and copies[wait.copy]
        and (wait.kind == COPY or (wait.kind == EXPLICIT and wait.adjacent))
    ]
    return without_events(graph.trace.runtime.where(launches)) | Change({}, copies.astype(float), frozenset(waits))


def _without_syncs(graph: Graph, line: str) -> Change:
    if not graph.waits:
        raise ValueError("the trace has no synchronizations")
    if not line:
        return Change(asynchronous=frozenset(range(len(graph.waits))))
    sites = [context.site for context in contexts_of_waits(graph)]
    if not any(sites):
        raise ValueError("the trace has no lines of synchronizations: record with with_stack=True")
    at_line = [row for row, site in enumerate(sites) if site and _is_at(site, line)]
    if not at_line:
        lines = sorted({str(site) for site in sites if site})
        raise ValueError(f"no synchronization at {line!r}; the lines are: {', '.join(lines) or 'none'}")
    return Change(asynchronous=frozenset(at_line))


def _is_at(site: Site, line: str) -> bool:
    """Return whether a line is that of FILE:LINE, or FILE where the trace has no numbers of lines."""
    file, _, number = line.rpartition(":") if site.line else (line, "", "0")
    return number == str(site.line) and bool(file) and f"/{site.file}".endswith(f"/{file.removeprefix('./')}")


def contexts_of_waits(graph: Graph) -> list[CallContext]:
    """Return the context of each synchronization of a graph."""
    contexts = TraceContext(graph.trace, *columns_of(graph.waits, "thread", "start_ns"))
    return [contexts.context(row) for row in range(len(graph.waits))]


def _without_region(graph: Graph, name: str) -> Change:
    regions, work = _region(graph, name)
    return without_events(regions) | Change({}, work.astype(float))


def _region(graph: Graph, name: str) -> tuple[Table, Array]:
    """Return the calls of a region, and a mask of the GPU work that they launched."""
    regions, gpu = graph.trace.regions, graph.trace.gpu
    rows = np.flatnonzero(one_of(regions, "name", (name,)))
    if not len(rows):
        names = [regions.strings[code] for code in np.unique(regions.name).tolist()]
        close = get_close_matches(name, names, 3, 0.5)
        raise ValueError(f"no region {name!r}" + (f"; close names are: {', '.join(close)}" if close else ""))
    inside = np.append(inside_rows(rows, regions.parent), False)
    return regions.where(rows), inside[gpu.region]


def _faster(graph: Graph, pattern: str, factor: float) -> Change:
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0.001 <= factor < float("inf"):
        raise ValueError(f'"speed" must hold numbers from 0.001 on: {factor!r}')
    part = 1 - 1 / factor
    if pattern.startswith(_REGION):
        regions, work = _region(graph, pattern.removeprefix(_REGION))
        return Change(saved=work * part, work_saved=(SavedWork(part, times_by_thread(regions)),))
    return Change({}, np.where(_kernels(graph, "speed", pattern), part, 0.0))


def _with_length(graph: Graph, pattern: str, length: object) -> Change:
    """Return the change in which kernels take this time each."""
    took, rows = graph.trace.gpu.duration_ns, _kernels(graph, "replace", pattern)
    return Change(saved=np.where(rows, 1 - parse_time(length, "replace") / np.maximum(took, 1), 0.0))


def _kernels(graph: Graph, argument: str, pattern: str) -> Array:
    """Return a mask of the GPU work whose names match a regular expression."""
    try:
        searched = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f'"{argument}" must hold regular expressions: {pattern!r} ({error})') from None
    gpu = graph.trace.gpu
    rows: Array = gpu.matching("name", searched) | gpu.matching("short_name", searched)
    if not rows.any():
        raise ValueError(f"no kernel, memcpy or memset has a name with {pattern!r}")
    return rows


Words = str | Collection[str]
"""One text, or several."""
Speed = Words | Mapping[str, float]
"""Texts such as "kernel:gemm=2x", or a mapping such as ``{"kernel:gemm": 2}``."""


@dataclass(frozen=True)
class WhatIf:
    r"""The step as it would be with a change; as text, one sentence.

    Attributes:
        change: the change in words; empty without one.
        before_ns: the recorded length of a step in ns: the mean.
        step_ns: the predicted length in ns: the mean; None if the prediction abstains.
        self_error: the error of the replay without a change: the median over the steps of
            \|replayed - recorded\| / recorded. None if nothing can be replayed.
        max_error: the maximum over the steps.
        steps: the number of steps; 1 without steps, as the whole trace then counts as one.
        has_steps: whether the trace has steps.
        abstained: what prevents a prediction; None if one was made.
        critical_path: what determines the length of the steps with the change; None if the prediction abstains.
    """

    change: str
    before_ns: int
    step_ns: int | None
    self_error: float | None
    max_error: float | None
    steps: int
    has_steps: bool
    abstained: str | None = None
    critical_path: CriticalPath | None = field(default=None, repr=False)

    @property
    def win_ns(self) -> int | None:
        """How much shorter a step becomes, in ns; negative if it becomes longer, None without a prediction."""
        return None if self.step_ns is None else self.before_ns - self.step_ns

    def __str__(self) -> str:
        if self.step_ns is None:
            return f"No prediction: {self.abstained}."
        if not self.change:
            if not self.has_steps:
                return f"The whole trace, which has no steps, takes {duration(self.before_ns)}."
            return f"A step takes {duration(self.before_ns)} (mean of {counted(self.steps, 'step')})."
        change = 100 * (self.step_ns / self.before_ns - 1) if self.before_ns else 0.0
        what = "a step" if self.has_steps else "the whole trace"
        return (
            f"{self.change[0].upper()}{self.change[1:]}, {what} would take {duration(self.step_ns)} instead of "
            f"{duration(self.before_ns)} ({change:+.1f} %)."
        )

    def to_json(self) -> str:
        """Return the prediction as JSON text; see `as_dict` for its keys."""
        return json.dumps(as_dict(self), indent=2, allow_nan=False)


def what_if(
    replayer: Replayer,
    *,
    without: Words = (),
    speed: Speed | None = (),
    overlap: Words = (),
    launch: float | str | None = None,
    replace: Words | Mapping[str, str] | None = (),
) -> WhatIf:
    """Return the step as it would be with a change.

    The trace is replayed: each event happens as soon as what it waits for is done. The CPU's own work, the
    durations of GPU work, and the delays of launches, streams and synchronizations are those of the trace. First
    the trace is replayed without the change: if that is over 5 % off, the prediction abstains.

    Args:
        replayer: the replayer of the trace.
        without: what costs nothing, in one text or several: "dataloader" (the loop's wait for its next batch),
            "copies" (memcpys, the calls that launch them, and the waits for them), "sync" (all synchronizations),
            "sync:FILE:LINE" (those at a line), "region:NAME" (all calls of a region, and all that they launch).
        speed: how many times as fast kernels become, by regular expressions that are searched in their names:
            "kernel:gemm=2x", several such texts, or a mapping such as ``{"kernel:gemm": 2}``. "kernel:" may be
            left out. "region:NAME=2x": the CPU's work in all calls of a region, and all that they launch. None
            changes nothing.
        overlap: "communication": no other work waits for kernels that communicate.
        launch: the part that the CPU's work still takes, such as "0.1x": all but the loop's waits for a batch and
            for the GPU, as with CUDA graphs or a compiled step.
        replace: how long each kernel of such a name takes, as with another kernel: "kernel:gemm=50us", several
            such texts, or a mapping such as ``{"kernel:gemm": "50us"}``.

    Raises:
        TypeError: an argument has another type.
        ValueError: a word is not one of these, or the trace has no such thing.
    """
    causes, faster, work = words_of("without", without), speeds_of(speed), words_of("overlap", overlap)
    left, replaced = launch_of(launch), durations_of(replace)
    change = requested_change(replayer, causes, faster, work, left, replaced)
    if not replayer.has_cpu:
        return WhatIf("", 0, None, None, None, 0, has_steps=False, abstained=replayer.abstained)
    errors = replayer.errors
    words = [f"without {what}" for what in causes]
    words += [f"with {pattern} {factor:g} times as fast" for pattern, factor in faster.items()]
    words += [f"with {pattern} taking {length}" for pattern, length in replaced.items()]
    words += [f"with overlapped {what}" for what in work]
    words += [] if left is None else [f"with {left:g} times the work of the CPU"]
    before = mean_ns(replayer.recorded_ns)
    figures = float(np.median(errors)), float(errors.max()), len(errors), bool(replayer.trace.steps)
    if replayer.abstained:
        return WhatIf(", ".join(words), before, None, *figures, replayer.abstained)
    path = critical_path(replayer, change)
    return WhatIf(", ".join(words), before, replayer.step_ns(change), *figures, None, path)


_NUMBERS = (
    "change", "before_ns", "step_ns", "win_ns", "self_error", "max_error", "steps", "has_steps", "abstained",
)  # fmt: skip


def as_dict(guess: WhatIf) -> dict[str, Any]:
    """Return a prediction as a dict of JSON values.

    ``change``, ``before_ns``, ``step_ns``, ``win_ns``, ``self_error``, ``max_error``, ``steps``, ``has_steps`` and
    ``abstained`` are the attributes of `WhatIf`. ``critical_path`` is null, or has ``total_ns`` (of all steps),
    ``classes`` (each with its ``ns`` and ``definition``), ``parts`` (each ``region`` and ``class`` with its
    ``ns``), which both add up to ``total_ns``, and ``off_path`` (each name of GPU work that is never on it, with
    the ``ns`` of its durations and its least ``slack_ns``).
    """
    path = guess.critical_path
    return {
        **{name: getattr(guess, name) for name in _NUMBERS},
        "critical_path": path
        and {
            "total_ns": path.total_ns,
            "classes": {kind: {"ns": ns, "definition": CLASSES[kind]} for kind, ns in path.by_class().items()},
            "parts": [
                {"region": region, "class": kind, "ns": ns} for (region, kind), ns in path.by_region().items()
            ],
            "off_path": [
                {"name": work.name, "ns": work.duration_ns, "slack_ns": work.slack_ns} for work in path.off_path
            ],
        },
    }
