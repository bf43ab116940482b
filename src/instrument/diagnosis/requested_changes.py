"""Reads what a user wants changed: steps without a cause, faster kernels, overlapped communication."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches

import numpy as np

from ..findings import Site
from ..replay.changes import Change, without_events
from ..replay.graph import Graph
from ..replay.replayer import Replayer
from ..syncs.trace_context import CallContext, TraceContext
from ..traces.main_threads import main_thread
from ..traces.nest import inside_rows
from ..traces.synchronizations import COPY, EXPLICIT
from ..traces.table import MEMCPY, Array
from .idle_causes import INPUT, named_ranges

_KERNEL = "kernel:"
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
    """Return the regular expressions for names of kernels, and how many times as fast these become.

    Args:
        given: texts such as "kernel:gemm=2x", or a mapping such as ``{"kernel:gemm": 2}``. "kernel:" may be left
            out. None for none.

    Raises:
        TypeError: it is neither.
        ValueError: a text is not such a one, or two are of one expression.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        pairs = [(str(pattern), factor) for pattern, factor in given.items()]
    else:
        pairs = [_speed(text) for text in words_of("speed", given)]
    faster = {pattern.removeprefix(_KERNEL): factor for pattern, factor in pairs}
    if len(faster) < len(pairs):
        raise ValueError(f'"speed" must hold each regular expression once: {given!r:.200}')
    return faster


def _speed(text: object) -> tuple[str, float]:
    name, _, factor = text.rpartition("=") if isinstance(text, str) else ("", "", "")
    try:
        if not name.removeprefix(_KERNEL):
            raise ValueError
        return name, float(factor.removesuffix("x"))
    except ValueError:
        raise ValueError(f'"speed" must hold kernel:REGEX=Nx, such as kernel:gemm=2x: {text!r:.200}') from None


def requested_change(
    replayer: Replayer, without: Collection[str], speed: Mapping[str, float], overlap: Collection[str]
) -> Change:
    """Return the change that a user asks for; see `instrument.diagnosis.what_if.what_if`.

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
    main = main_thread(graph.trace)
    tables = [found.where(found.thread == main) for found in named_ranges(graph.trace, INPUT)]
    if not any(tables):
        raise ValueError("the trace has no ranges of a DataLoader")
    return without_events(*tables)


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
    found = [row for row, site in enumerate(sites) if site and _is_at(site, line)]
    if not found:
        known = sorted({str(site) for site in sites if site})
        raise ValueError(f"no synchronization at {line!r}; the lines are: {', '.join(known) or 'none'}")
    return Change(asynchronous=frozenset(found))


def _is_at(site: Site, line: str) -> bool:
    """Return whether a line is that of FILE:LINE, or FILE where the trace has no numbers of lines."""
    file, _, number = line.rpartition(":") if site.line else (line, "", "0")
    return number == str(site.line) and bool(file) and f"/{site.file}".endswith(f"/{file.removeprefix('./')}")


def contexts_of_waits(graph: Graph) -> list[CallContext]:
    """Return the context of each synchronization of a graph."""
    threads, times = (
        np.array([getattr(wait, name) for wait in graph.waits], np.int64) for name in ("thread", "start_ns")
    )
    contexts = TraceContext(graph.trace, threads, times)
    return [contexts.context(row) for row in range(len(graph.waits))]


def _without_region(graph: Graph, name: str) -> Change:
    regions, gpu = graph.trace.regions, graph.trace.gpu
    codes = [code for code in np.unique(regions.name).tolist() if regions.strings[code] == name]
    rows = np.flatnonzero(np.isin(regions.name, codes))
    if not len(rows):
        names = [regions.strings[code] for code in np.unique(regions.name).tolist()]
        close = get_close_matches(name, names, 3, 0.5)
        raise ValueError(f"no region {name!r}" + (f"; close names are: {', '.join(close)}" if close else ""))
    inside = np.append(inside_rows(rows, regions.parent), False)
    return without_events(regions.where(rows)) | Change({}, inside[gpu.region].astype(float))


def _faster(graph: Graph, pattern: str, factor: float) -> Change:
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0.001 <= factor < float("inf"):
        raise ValueError(f'"speed" must hold numbers from 0.001 on: {factor!r}')
    try:
        searched = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f'"speed" must hold regular expressions: {pattern!r} ({error})') from None
    gpu = graph.trace.gpu
    rows: Array = gpu.matching("name", searched) | gpu.matching("short_name", searched)
    if not rows.any():
        raise ValueError(f"no kernel, memcpy or memset has a name with {pattern!r}")
    return Change({}, np.where(rows, 1 - 1 / factor, 0.0))
