"""Decodes the events of a Kineto file into columns, many at a time, and pairs those that begin and end a range."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import islice
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct

from ..tables.autograd import OWN_NAME
from ..tables.counters import counter_name
from ..tables.lanes import group_rows
from ..tables.table import Array, Interner, Strings, Tables, TooLargeError
from ..tables.trace import ReadLosses
from .event_args import LATEST_US, READERS, TraceEvent, names, values

_SEARCHED = 64  # open ranges that are searched for the name of an end
_NAME = 60  # characters


def close_ranges(parts: Sequence[Mapping[str, Array]], tables: Tables, texts: list[str], lost: ReadLosses) -> None:
    """Set the durations of the ranges that have begun, in place, and drop those that do not end.

    Ranges of a thread nest: an end without a name, or with that of the innermost open range, ends that one. An end
    with another name ends the innermost range of this name, as where asyncio tasks take turns on a thread.

    Events without a known category on the threads of the ranges become regions as well: programs that write their
    own ranges write them in either way.

    Args:
        parts: the events that begin or end a range, in any order, with a column ``begin``.
        tables: the columns of each table.
        texts: the strings that their numbers stand for.
        lost: records what has no begin or no end.
    """
    if not parts:
        return
    every = {
        name: np.concatenate([part[name] for part in parts])
        for name in ("event", "thread", "start_ns", "name", "begin")
    }
    end_of, open_, without_begin = _pair(every)
    _say(lost, "no end", [texts[code] for code in every["name"][open_].tolist()])
    _say(lost, "no begin", [texts[code] for code in every["name"][without_begin].tolist()])
    begins = np.flatnonzero(every["begin"])
    begins = begins[np.argsort(every["event"][begins])]
    numbers, ends = every["event"][begins], end_of[begins]
    for name, columns in tables.items():
        at = np.minimum(np.searchsorted(numbers, columns["event"]), max(len(numbers) - 1, 0))
        ours = numbers[at] == columns["event"] if len(numbers) else np.zeros(len(columns["event"]), bool)
        rows = ends[at[ours]]
        columns["duration_ns"][ours] = np.where(rows >= 0, every["start_ns"][rows] - columns["start_ns"][ours], 0)
        kept = ~ours
        kept[ours] = rows >= 0
        tables[name] = {column: values[kept] for column, values in columns.items()}
    take_others(tables, np.unique(every["thread"][begins]))


def _pair(every: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Return for each row the row that ends it, or -1; the begins without an end; and the ends without a begin."""
    order = np.lexsort((every["event"], every["start_ns"], every["thread"])).tolist()
    thread, name, begin = (every[column].tolist() for column in ("thread", "name", "begin"))
    end_of = np.full(len(order), -1)
    ends: list[int] = []
    open_: list[int] = []
    at = None
    for row in order:
        if thread[row] != at:
            at, open_ = thread[row], []
        if begin[row]:
            open_.append(row)
            continue
        places = range(len(open_) - 1, max(len(open_) - 1 - _SEARCHED, -1), -1)
        place = next((place for place in places if not name[row] or name[open_[place]] == name[row]), None)
        if place is None:
            ends.append(row)
        else:
            end_of[open_.pop(place)] = row
    return end_of, np.flatnonzero(every["begin"] & (end_of < 0)), np.array(ends, np.int64)


def _say(lost: ReadLosses, lacks: str, names: Iterable[str]) -> None:
    if names := list(names):
        shown = dict.fromkeys(f"{name:.{_NAME}}" for name in names)
        which = ", ".join(list(shown)[:3]) + ", ..." * (len(shown) > 3)
        lost.add(f"ranges with {lacks}: {which}", events=len(names))


def take_others(tables: Tables, threads: Array) -> None:
    """Make regions of the events without a known category that last, on some threads."""
    others = tables.get("others")
    if others is None:
        return
    ours = (others["duration_ns"] > 0) & np.isin(others["thread"], threads)
    regions = tables.get("regions") or {name: others[name][:0] for name in _OF_REGIONS}
    tables["regions"] = {
        name: np.concatenate((column, others[name][ours] if name in others else np.full(ours.sum(), -1)))
        for name, column in regions.items()
    }
    tables["others"] = {name: column[~ours] for name, column in others.items()}


_OF_REGIONS = ("event", "thread", "start_ns", "duration_ns", "name")


# The tables of complete events by category. Some categories had other names in 2021.
_TABLES = {
    category: table
    for table, categories in {
        "operators": ("cpu_op", "operator"),
        "regions": ("user_annotation",),
        "frames": ("python_function",),
        "runtime": (
            "cuda_runtime",
            "cuda_driver",
            "runtime",
            "mtia_runtime",
            "xpu_runtime",
            "privateuse1_runtime",
        ),
        "gpu": ("kernel", "gpu_memcpy", "memcpy", "gpu_memset", "memset", "mtia_ccp_events"),
        "gpu_regions": ("gpu_user_annotation",),
        "syncs": ("cuda_sync",),
    }.items()
    for category in categories
}
_CATEGORIES = (
    *_TABLES,
    *("Operator", "Runtime", "Kernel", "Memcpy", "Memset", "ac2g", "fwdbwd", "async", "async_cpu_to_gpu"),
    *("", "Trace", "overhead", "cpu_instant_event"),
)
_TIMED = frozenset("XBEiIRC")
_PHASES = frozenset("XBEiIRCMstf")
_FLOWS = frozenset("stf")  # arrows of a viewer; ids in the args have the same information
_EXACT_US = float(2**41)  # floats below are exact to the ns
_DECIMALS = re.compile(rb'"(?:ts|dur)"\s*:\s*-?\d+[.eE]')


class _KnownEvent(TraceEvent, gc=False):
    """An event of a known phase and category, whose strings are shared: that saves a tenth of the time."""

    ph: Literal["", "X", "i", "s", "t", "f", "M", "C", "B", "E"] = ""
    cat: Literal[_CATEGORIES] | None = ""  # type: ignore[valid-type]


class _ExactTimes(Struct, gc=False):
    ts: Decimal = Decimal(0)
    dur: Decimal = Decimal(0)


_decode_known = msgspec.json.Decoder(list[_KnownEvent]).decode
_decode = msgspec.json.Decoder(list[TraceEvent]).decode
_decode_exact = msgspec.json.Decoder(list[_ExactTimes]).decode


class _Column:
    """A column that grows in place: thousands of small arrays would take twice the memory once they are joined."""

    def __init__(self) -> None:
        self._values: Array = np.empty(0)
        self._count = 0

    def append(self, values: Array) -> None:
        """Add values, all of one type."""
        if not self._count:
            self._values = np.empty(0, values.dtype)
        begin, self._count = self._count, self._count + len(values)
        if self._count > len(self._values):
            self._values.resize(max(self._count, len(self._values) * 5 // 4), refcheck=False)
        self._values[begin : self._count] = values

    def values(self) -> Array:
        """Return all values."""
        self._values.resize(self._count, refcheck=False)
        return self._values


class Collector:
    """Collects events into columns.

    Args:
        event_limit: the number of events that are accepted.
        text_limit: the number of characters that all strings may have together.

    Attributes:
        strings: the numbers of strings.
        threads: the numbers of pairs of process and thread.
        thread_names: the names of threads, as far as known.
        processes: the label of each process, such as "CPU" or "GPU 0", else its name.
        count: the number of events so far.
        unread: the numbers of events by phase, for phases that a `Trace` has no table for.
        ends: the events that begin or end a range, for `close_ranges`.
    """

    def __init__(self, event_limit: int, text_limit: int) -> None:
        self.strings = Strings(text_limit)
        self._event_limit = event_limit
        self.threads: Interner[tuple[Any, Any]] = Interner()
        self.thread_names: dict[tuple[Any, Any], str] = {}
        self.processes: dict[Any, str] = {}
        self._labelled = set[Any]()
        self.count = 0
        self.unread: dict[str, int] = {}
        self.ends: list[dict[str, Array]] = []
        self._kinds: Interner[tuple[str, str]] = Interner()
        self._origins: Interner[tuple[Any, ...]] = Interner()  # phase, category, process and thread
        self._kind_and_thread = np.empty((0, 2), np.int32)  # of each
        self._columns: dict[str, dict[str, _Column]] = defaultdict(lambda: defaultdict(_Column))

    def take(self, text: bytes | bytearray) -> int:
        """Take all events of a JSON array, or none, and return their number.

        Raises:
            ValueError: the text is not an array of events.
            RecursionError: the text is nested too deep.
            TooLargeError: the file has too many events.
        """
        try:
            events: Sequence[TraceEvent] = _decode_known(text)
        except msgspec.ValidationError:
            events = _decode(text)
        if not events:
            return 0
        start_ns, duration_ns = _times(events, text)
        kinds, threads = self._origin(events)
        names = self.strings
        common = {
            "start_ns": start_ns,
            "duration_ns": duration_ns,
            "name": np.array([names[event.name] for event in events], np.int32),
            "thread": threads,
            "event": np.arange(self.count, self.count + len(events)),
        }
        self.count += len(events)
        if self.count > self._event_limit:
            raise TooLargeError(f"it holds more than {self._event_limit:,} events, too many for its size")
        named = list(self._kinds)
        for kind, rows in group_rows(kinds):
            phase, category = named[kind]
            if phase not in _FLOWS:
                part = {name: column[rows] for name, column in common.items()}
                self._sort(phase, category, part, [events[row] for row in rows.tolist()])
        return len(events)

    def columns(self) -> Tables:
        """Return the columns of each table, and forget the events."""
        return {
            table: {name: columns.pop(name).values() for name in list(columns)}
            for table, columns in self._columns.items()
        }

    def _origin(self, events: Sequence[TraceEvent]) -> tuple[Array, Array]:
        """Return the numbers of the kind and of the thread of each event, by one lookup for both."""
        known = self._origins
        origins = [known[event.ph, event.cat, event.pid, event.tid] for event in events]
        if count := len(self._origins) - len(self._kind_and_thread):
            new = [*islice(reversed(self._origins), count)][::-1]
            rows = [(self._kinds[_kind(*key[:2])], self.threads[key[2:]]) for key in new]
            self._kind_and_thread = np.concatenate((self._kind_and_thread, np.array(rows, np.int32)))
        both = self._kind_and_thread[origins]
        return both[:, 0], both[:, 1]

    def _sort(self, phase: str, category: str, part: dict[str, Array], events: Sequence[TraceEvent]) -> None:
        """Add events of one phase and category to their tables."""
        if phase == "X":
            self._add(_TABLES.get(category, "others"), category, part, events)
        elif phase in ("B", "E"):
            self.ends.append(part | {"begin": np.full(len(events), phase == "B")})
            if phase == "B":
                self._add(_TABLES.get(category, "regions"), category, part, events)
        elif phase in ("i", "I", "R"):
            memory = part["name"] == self.strings["[memory]"]
            for table, mask in (("memory", memory), ("others", ~memory)):
                rows = np.flatnonzero(mask)
                some = {name: column[rows] for name, column in part.items()}
                self._add(table, category, some, [events[row] for row in rows.tolist()])
        elif phase == "C":
            self._count(part, events)
        elif phase == "M":
            self._name(events)
        else:
            for event in events:
                if event.ph or event.name:  # JAX ends its array with an empty event
                    self.unread[event.ph] = self.unread.get(event.ph, 0) + 1

    def _add(self, table: str, category: str, part: dict[str, Array], events: Sequence[TraceEvent]) -> None:
        if events:
            for name, column in (part | READERS[table](self.strings, category, events)).items():
                self._columns[table][name].append(column)

    def _count(self, part: dict[str, Array], events: Sequence[TraceEvent]) -> None:
        """Add counters: each of their series gets a row."""
        rows, series, numbers = values([event.args for event in events])
        labels = [counter_name(events[row].name, word) for row, word in zip(rows, series, strict=True)]
        counted = {name: column[rows] for name, column in part.items()} | {
            "name": np.array([self.strings[label] for label in labels], np.int32),
            "value": np.array(numbers, np.float64),
        }
        for name, column in counted.items():
            self._columns["counters"][name].append(column)

    def _name(self, events: Sequence[TraceEvent]) -> None:
        named = [event for event in events if event.name == "thread_name"]
        for event, name in zip(named, names([event.args for event in named]), strict=True):
            place = event.pid, event.tid
            # Kineto may also write the name that the thread had before autograd named it.
            if not OWN_NAME.search(self.thread_names.get(place, "")):
                self.thread_names[place] = name
        for event in events:  # MTIA's traces have a label for every event
            if event.name == "process_labels" and event.pid not in self._labelled:
                self._labelled.add(event.pid)
                self.processes[event.pid] = names([event.args])[0] or self.processes.get(event.pid, "")
            elif event.name == "process_name" and not self.processes.get(event.pid):
                self.processes[event.pid] = names([event.args])[0]


def _kind(phase: str, category: str | None) -> tuple[str, str]:
    """Return the kind of an event: unknown phases and categories, of which a file may have many, become empty."""
    lower = (category or "").lower()
    return phase if phase in _PHASES else "", lower if phase in ("X", "B") and lower in _TABLES else ""


def _times(events: Sequence[TraceEvent], text: bytes | bytearray) -> tuple[Array, Array]:
    """Return starts and durations in ns."""
    start = np.array([event.ts for event in events], np.float64)  # faster than `np.fromiter`
    duration = np.array([event.dur for event in events], np.float64)
    missing = np.isnan(start)
    if missing.any():
        if any(not events[row].in_time() for row in np.flatnonzero(missing).tolist()):
            raise ValueError("an event without a time")
        start[missing] = 0
    latest = max(np.abs(start).max(), np.abs(duration).max())
    if not latest < LATEST_US:
        raise ValueError(f"{latest:g} is not a time in microseconds")
    if latest >= _EXACT_US and _DECIMALS.search(text):
        with suppress(ValueError, ArithmeticError):  # exponents too large for a Decimal
            return _exact_ns(text)
    return _ns(start), np.maximum(_ns(duration), 0)


def _exact_ns(text: bytes | bytearray) -> tuple[Array, Array]:
    """Decode microseconds since 1970 with decimals, where floats are off by up to 125 ns."""
    exact = _decode_exact(text)
    starts = [int((event.ts * 1000).to_integral_value()) for event in exact]
    durations = [max(int((event.dur * 1000).to_integral_value()), 0) for event in exact]
    return np.array(starts, np.int64), np.array(durations, np.int64)


def _ns(us: Array) -> Array:
    whole = np.floor(us)
    ns: Array = whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)
    return ns
