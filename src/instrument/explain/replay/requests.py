"""`Request`: what a user wants changed in a replay, in the words of the command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from ...base.findings import Site
from ...base.units import counted, parse_time
from ...read.measures.synchronizations import COPY, EXPLICIT, columns_of
from ...read.tables.intervals import clip, total_ns
from ...read.tables.nest import inside_rows
from ...read.tables.notes import to_record
from ...read.tables.table import MEMCPY, Array, Table
from ...read.tables.trace import Trace
from ..metrics.idle import MULTIPLE, SINGLE, cores_of, loading_by
from ..metrics.tables import one_of
from ..waits.trace_context import CallContext, TraceContext
from .graph import Graph, times_by_thread
from .replay import Change, Replayer, SavedWork, mean_ns, without_events

Words = str | Collection[str]
"""One text, or several."""
Speed = Words | Mapping[str, float]
"""Texts such as "kernel:gemm=2x", or a mapping such as ``{"kernel:gemm": 2}``."""

Fixed = Callable[[str], Change]
"""Returns the removal of what a rule finds, by its name."""


@dataclass(frozen=True)
class Request:
    """What a user wants changed: the arguments of `Diagnosis.what_if`, unchecked."""

    without: Words = ()
    speed: Speed | None = ()
    overlap: Words = ()
    launch: float | str | None = None
    replace: Words | Mapping[str, str] | None = ()
    workers: int | str | None = None
    fuse: Words = ()
    fix: Words = ()

    @staticmethod
    def from_words(text: str) -> Request:
        """Return the request of a command line, such as "--fuse optimizer --launch 0.1x".

        Raises:
            ValueError: it has another option, or one without a value.
        """
        given: dict[str, Any] = {}
        words = iter(shlex.split(text))
        for option, value in zip(words, words, strict=True):
            name = option.removeprefix("--")
            if name not in Request.__dataclass_fields__:
                raise ValueError(f'"change" must hold options of instrument whatif: {text!r:.200}')
            given[name] = value if name in ("launch", "workers") else [*given.get(name, ()), value]
        return Request(**given)

    def changes(self, replayer: Replayer, fixed: Fixed | None = None) -> Iterator[tuple[str, Change]]:
        """Yield each change, as a sentence says it and for a replay.

        Args:
            replayer: the replayer of the trace.
            fixed: returns the removal of what a rule finds; None if no rules were applied.

        Raises:
            TypeError: a value has another type.
            ValueError: a word is not one of those that are accepted, or the trace has no such thing.
        """
        without, fuse = _words_of("without", self.without), _words_of("fuse", self.fuse)
        speeds, replaced = _speeds_of(self.speed), _durations_of(self.replace)
        overlap, launch = _words_of("overlap", self.overlap), _launch_of(self.launch)
        workers, fixes = _workers_of(self.workers), _words_of("fix", self.fix)
        if fixes and fixed is None:
            raise ValueError(f'"fix" needs a function that returns the change of a rule: {fixes!r:.200}')
        for what in without:
            if not isinstance(what, str) or not _WITHOUT.fullmatch(what):
                raise ValueError(f'"without" must hold {WITHOUT}: {what!r}')
        for argument, words, accepted in (("overlap", overlap, "communication"), ("fuse", fuse, "optimizer")):
            for what in words:
                if what != accepted:
                    raise ValueError(f'"{argument}" must hold "{accepted}": {what!r}')
        if not replayer.has_cpu:
            return
        graph = replayer.graph
        for what in without:
            yield f"without {what}", _without(graph, what)
        for name, factor in speeds.items():
            yield f"with {name} {factor:g} times as fast", _faster(graph, name, factor)
        for name, length in replaced.items():
            yield f"with {name} taking {length}", _with_length(graph, name, length)
        if overlap:
            yield "with overlapped communication", _overlapped(replayer)
        for argument, given in (("fuse", fuse), ("launch", launch is not None)):
            if given and not graph.trace.gpu:
                raise ValueError(
                    f'"{argument}": the trace has no GPU work, so the CPU computes and does not launch; '
                    "--speed region:NAME=2x predicts a region that is faster"
                )
        if fuse:
            yield "with a fused optimizer", fused_optimizer(graph)
        if workers:
            yield _with_workers(replayer, *workers)
        if fixed:
            for name in fixes:
                yield f"with {name} fixed", fixed(name)
        if launch is not None:
            cheaper = SavedWork(1 - launch, but=graph.not_launching)
            yield f"with {100 * launch:g} % of the CPU's work", Change(work_saved=(cheaper,))


NOTHING = Request()


def joined(changes: Iterable[Change]) -> Change:
    """Return all changes at once."""
    return reduce(or_, changes, Change())


_KERNEL, _REGION = "kernel:", "region:"
_WITHOUT = re.compile(r"dataloader|copies|sync|sync:.+|region:.+", re.DOTALL)
WITHOUT = "dataloader, copies, sync, sync:FILE:LINE or region:NAME"
"""What a step can be replayed without."""


def _words_of(name: str, given: object) -> list[str]:
    """Return the words of an argument, which may be one text or several.

    Raises:
        TypeError: it is neither.
    """
    words = [given] if isinstance(given, str) else given
    if not isinstance(words, Collection) or isinstance(words, (bytes, Mapping)):
        raise TypeError(f'"{name}" must be a text or several: {given!r:.200}')
    return list(words)


def _speeds_of(given: object) -> dict[str, float]:
    """Return what becomes faster, kernels by a regular expression or "region:NAME", and how many times as fast.

    Args:
        given: texts such as "kernel:gemm=2x", or a mapping such as ``{"kernel:gemm": 2}``. "kernel:" may be left
            out. None for none.

    Raises:
        TypeError: it is neither.
        ValueError: a text is not such a one, or two are of one expression.
    """
    return _by_name("speed", given, _factor, "kernel:REGEX=Nx or region:NAME=Nx, such as kernel:gemm=2x")


def _durations_of(given: object) -> dict[str, Any]:
    """Return the regular expressions for names of kernels, and how long these take: text such as "50us".

    Raises:
        TypeError, ValueError: as in `_speeds_of`.
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
        for text in _words_of(argument, given):
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


def _launch_of(given: object) -> float | None:
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
    removed = Change({}, copies.astype(float), _waits_for(graph, copies))
    return without_events(graph.trace.runtime.where(launches)) | removed


def copies_ahead(graph: Graph, copies: Array) -> Change:
    """Return the change in which no other work waits for these memcpys, nor the CPU, as they run a step ahead."""
    return Change(asynchronous=_waits_for(graph, copies), overlapped=copies)


def _waits_for(graph: Graph, copies: Array) -> frozenset[int]:
    """Return the synchronizations that wait for memcpys alone."""
    return frozenset(
        number
        for number, wait in enumerate(graph.waits)
        if wait.copy >= 0
        and copies[wait.copy]
        and (wait.kind == COPY or (wait.kind == EXPLICIT and wait.adjacent))
    )


def _without_syncs(graph: Graph, line: str) -> Change:
    if not graph.waits:
        raise ValueError("the trace has no synchronizations")
    if not line:
        return Change(asynchronous=frozenset(range(len(graph.waits))))
    sites = [context.site for context in contexts_of_waits(graph)]
    if not any(sites):
        stacks = to_record(graph.trace.metadata, with_stack=True)
        raise ValueError(f"the trace has no lines of synchronizations: record with {stacks}")
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


def _overlapped(replayer: Replayer) -> Change:
    if not replayer.communication.any():
        raise ValueError("the trace has no kernels that communicate")
    return Change(overlapped=replayer.communication)


def _workers_of(given: object) -> tuple[int, bool] | None:
    """Return the number of workers of "4" or "2x", and whether it multiplies those of the loader."""
    if given is None:
        return None
    text = str(given)
    number = text.removesuffix("x")
    if isinstance(given, bool) or not isinstance(given, (int, str)) or not number.isdecimal() or not int(number):
        raise ValueError(
            f'"workers" must be a number from 1, or how many times as many, such as 2x: {given!r:.200}'
        )
    return int(number), text != number


def _with_workers(replayer: Replayer, number: int, times: bool) -> tuple[str, Change]:
    """Return the change in which workers load the batches: at best, each is ready when the loop wants it.

    They load no batch in less than its time divided by their number. A DataLoader without workers loads in the
    time that the loop waits; that of others is not in the trace, but if the loop waits for it, it is a step.
    """
    graph = replayer.graph
    if not graph.batches:
        raise ValueError("the trace has no ranges of a DataLoader")
    loads = loading_by(graph.trace)
    if loads is (SINGLE if times else MULTIPLE):
        has, wanted = ("no workers", "number such as 4") if times else ("workers", "factor such as 2x")
        given = f"{number}x" if times else str(number)
        raise ValueError(f'"workers" must be a {wanted}, as the DataLoader has {has}: {given!r}')
    if times:
        loading_ns = replayer.loader.step_ns if replayer.loader else mean_ns(replayer.recorded_ns)
        return f"with {number} times as many workers", Change(graph.batches, least_ns=round(loading_ns / number))
    starts, ends = graph.loop.recorded_bounds(graph.trace)
    window = int(starts.min()), int(ends.max())
    waited_ns = sum(total_ns(clip(own, *window)) for own in graph.batches.values()) / len(starts)
    of_cores = mean_ns(replayer.recorded_ns) / (cores_of(graph.trace) or np.inf)  # for all the work of a step
    least_ns = round(max(waited_ns / number, of_cores))
    return f"with {counted(number, 'worker')}", Change(graph.batches, least_ns=least_ns)


_OPTIMIZER = re.compile(r"^Optimizer\.step#|^optimizer$")
_FUSED = re.compile("multi_tensor|foreach|fused_?(?:adam|sgd)", re.IGNORECASE)
_FUSED_BYTES = ((re.compile("Adam"), 7 / 19), (re.compile("SGD"), 5 / 8))
_FUSED_BYTES_OF_OTHERS = 1 / 2


def optimizer_ranges(trace: Trace) -> tuple[Table, str, Array] | None:
    """Return the table with the ranges of optimizers, the column of GPU work that links to it, and the rows."""
    for table, link in ((trace.regions, "region"), (trace.operators, "operator")):
        rows = np.flatnonzero(table.matching("name", _OPTIMIZER))
        if len(rows):
            return table, link, rows
    return None


def launched_inside(table: Table, rows: Array, links: Array) -> Array:
    """Return a mask of the GPU work that is launched in these rows of a table, to which it links."""
    inside: Array = np.append(inside_rows(rows, table.parent), False)[links]
    return inside


def is_fused(work: Table) -> Array:
    """Return which kernels update several parameters."""
    return work.matching("name", _FUSED)


def fused_optimizer(graph: Graph) -> Change:
    """Return the change in which one kernel updates all parameters.

    The CPU then spends no time in the optimizer, and of the kernels for single parameters only a part is left, by
    the tensors as large as a parameter that are read and written: those of Adam 19, a fused one 7; of SGD with
    momentum, 8 and 5. Of other optimizers, half is left.
    """
    found = optimizer_ranges(graph.trace)
    if found is None:
        raise ValueError("the trace has no range of an optimizer")
    table, link, rows = found
    gpu = graph.trace.gpu
    part = np.full(len(gpu), _FUSED_BYTES_OF_OTHERS)
    for name, left in _FUSED_BYTES:
        own = rows[table.where(rows).matching("name", name)]
        part[launched_inside(table, own, gpu[link])] = left
    single = np.flatnonzero(launched_inside(table, rows, gpu[link]) & ~is_fused(gpu))
    if not len(single):
        raise ValueError('"fuse": no kernel of the optimizer updates a single parameter, so it is fused already')
    left_so_far = np.floor(np.cumsum(part[single]))
    saved = np.zeros(len(gpu))
    saved[single[np.diff(left_so_far, prepend=0) < 1]] = 1.0
    return without_events(table.where(rows)) | Change(saved=saved)


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
    return regions.where(rows), launched_inside(regions, rows, gpu.region)


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
