"""Events of a Kineto file, decoded many at a time into columns."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import islice
from operator import attrgetter
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Raw, Struct

from .autograd import OWN_NAME
from .event_args import READERS, names, values
from .lanes import group_rows
from .table import Array, Interner, Strings, TooLargeError

# Where complete events of a category go. Some categories were named otherwise in 2021.
_TABLES = {
    "cpu_op": "operators",
    "operator": "operators",
    "user_annotation": "regions",
    "python_function": "frames",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "runtime": "runtime",
    "mtia_runtime": "runtime",
    "xpu_runtime": "runtime",
    "privateuse1_runtime": "runtime",
    "kernel": "gpu",
    "gpu_memcpy": "gpu",
    "memcpy": "gpu",
    "gpu_memset": "gpu",
    "memset": "gpu",
    "mtia_ccp_events": "gpu",
    "gpu_user_annotation": "gpu_regions",
    "cuda_sync": "syncs",
}
_CATEGORIES = (
    *_TABLES,
    *("Operator", "Runtime", "Kernel", "Memcpy", "Memset", "ac2g", "fwdbwd", "async", "async_cpu_to_gpu"),
    *("", "Trace", "overhead", "cpu_instant_event"),
)
_TIMED = frozenset("XiIRC")
_PHASES = frozenset("XiIRCMstf")
_FLOWS = frozenset("stf")  # which arrows a viewer draws; ids in the args say the same
_EXACT_US = float(2**41)  # up to here a float tells ns apart
_LATEST_US = 2.3e15  # as ns, sums and differences fit into 64 bits
_DECIMALS = re.compile(rb'"(?:ts|dur)"\s*:\s*-?\d+[.eE]')

_Key = TypeVar("_Key", bound=Hashable)


class TraceEvent(Struct, gc=False):
    """What every event has; ``ts`` and ``dur`` are in us."""

    ph: str = ""
    cat: str | None = ""
    name: str = ""
    pid: int | str | float | None = ""  # in the order in which Kineto writes them: that is decoded fastest
    tid: int | str | float | None = ""
    ts: float = math.nan
    dur: float = 0.0
    args: Raw = Raw(b"{}")

    def in_time(self) -> bool:
        """Tell whether it has a time, if it needs one, and its times fit into 64 bits of ns."""
        if math.isnan(self.ts):
            return self.ph not in _TIMED and abs(self.dur) < _LATEST_US
        return abs(self.ts) < _LATEST_US and abs(self.dur) < _LATEST_US


class _KnownEvent(TraceEvent, gc=False):
    """An event of a known phase and category: their words are not made anew for each, which saves a tenth."""

    ph: Literal["", "X", "i", "s", "t", "f", "M", "C"] = ""
    cat: Literal[_CATEGORIES] | None = ""  # type: ignore[valid-type]


class _ExactTimes(Struct, gc=False):
    ts: Decimal = Decimal(0)
    dur: Decimal = Decimal(0)


_decode_known = msgspec.json.Decoder(list[_KnownEvent]).decode
_decode = msgspec.json.Decoder(list[TraceEvent]).decode
_decode_exact = msgspec.json.Decoder(list[_ExactTimes]).decode


class Collector:
    """Takes the text of events and makes columns of them.

    Args:
        most_events: how many it takes.
        most_text: how many characters all words may have together.

    Attributes:
        words: numbers of words.
        threads: numbers of pairs of process and thread.
        thread_names: what some of these threads are called.
        count: how many events were taken.
        unread: how many of them are of phases that have no place in a trace, such as begins without durations.
    """

    def __init__(self, event_limit: int, text_limit: int) -> None:
        self.strings = Strings(text_limit)
        self._most = event_limit
        self.threads: Interner[tuple[Any, Any]] = Interner()
        self.thread_names: dict[tuple[Any, Any], str] = {}
        self.count = 0
        self.unread: dict[str, int] = {}
        self._kinds: Interner[tuple[str, str]] = Interner()
        self._origins: Interner[tuple[Any, ...]] = Interner()  # phase, category, process and thread
        self._kind_and_thread = np.empty((0, 2), np.int32)  # of each
        self._parts: dict[str, dict[str, list[Array]]] = defaultdict(lambda: defaultdict(list))

    def take(self, text: bytes | bytearray) -> int:
        """Take an array of events in JSON, all or none, and return how many.

        Raises:
            ValueError: if it is not one.
            RecursionError: if it is nested too deep.
            TooLargeError: if there are too many by now.
        """
        try:
            events: Sequence[TraceEvent] = _decode_known(text)
        except msgspec.ValidationError:
            events = _decode(text)
        if not events:
            return 0
        start_ns, duration_ns = _times(events, text)
        kinds, threads = self._origin(events)
        common = {
            "start_ns": start_ns,
            "duration_ns": duration_ns,
            "name": _numbers(self.strings, events, "name"),
            "thread": threads,
            "event": np.arange(self.count, self.count + len(events)),
        }
        self.count += len(events)
        if self.count > self._most:
            raise TooLargeError(f"it holds more than {self._most:,} events, as no trace of its size does")
        named = list(self._kinds)
        for kind, rows in group_rows(kinds):
            phase, category = named[kind]
            if phase not in _FLOWS:
                part = {name: column[rows] for name, column in common.items()}
                self._sort(phase, category, part, [events[row] for row in rows.tolist()])
        return len(events)

    def columns(self) -> dict[str, dict[str, Array]]:
        """Return the columns of each table; what was taken is gone then."""
        return {
            table: {column: np.concatenate(parts.pop(column)) for column in list(parts)}
            for table, parts in self._parts.items()
        }

    def _origin(self, events: Sequence[TraceEvent]) -> tuple[Array, Array]:
        """The numbers of the kind and of the thread of each event, by one look-up for both."""
        origins = _numbers(self._origins, events, "ph", "cat", "pid", "tid")
        if count := len(self._origins) - len(self._kind_and_thread):
            new = [*islice(reversed(self._origins), count)][::-1]
            rows = [(self._kinds[_kind(*key[:2])], self.threads[key[2:]]) for key in new]
            self._kind_and_thread = np.concatenate((self._kind_and_thread, np.array(rows, np.int32)))
        both = self._kind_and_thread[origins]
        return both[:, 0], both[:, 1]

    def _sort(self, phase: str, category: str, part: dict[str, Array], events: Sequence[TraceEvent]) -> None:
        """Put events of one phase and category where they belong."""
        if phase == "X":
            self._add(_TABLES.get(category, "others"), category, part, events)
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
                self.unread[event.ph] = self.unread.get(event.ph, 0) + 1

    def _add(self, table: str, category: str, part: dict[str, Array], events: Sequence[TraceEvent]) -> None:
        if events:
            for name, column in (part | READERS[table](self.strings, category, events)).items():
                self._parts[table][name].append(column)

    def _count(self, part: dict[str, Array], events: Sequence[TraceEvent]) -> None:
        """A counter may have several series, each of which gets a row of its own."""
        rows, series, numbers = values([event.args for event in events])
        table = self._parts["counters"]
        for name, column in part.items():
            table[name].append(column[rows])
        labels = [f"{events[row].name}: {word}" for row, word in zip(rows, series, strict=True)]
        table["name"][-1] = np.array([self.strings[label] for label in labels], np.int32)
        table["value"].append(np.array(numbers, np.float64))

    def _name(self, events: Sequence[TraceEvent]) -> None:
        named = [event for event in events if event.name == "thread_name"]
        for event, name in zip(named, names([event.args for event in named]), strict=True):
            place = event.pid, event.tid
            # Kineto may also give the name that the thread had before it had its own.
            if not OWN_NAME.search(self.thread_names.get(place, "")):
                self.thread_names[place] = name


def _kind(phase: str, category: str | None) -> tuple[str, str]:
    """What events are handled alike by; a file may have as many phases and categories as events."""
    known = (category or "").lower()
    return phase if phase in _PHASES else "", known if phase == "X" and known in _TABLES else ""


def _numbers(numbers: Interner[Any], events: Sequence[TraceEvent], *fields: str) -> Array:
    keys: Iterable[Any] = map(attrgetter(*fields), events)
    return np.fromiter(map(numbers.__getitem__, keys), np.int32, len(events))


def _times(events: Sequence[TraceEvent], text: bytes | bytearray) -> tuple[Array, Array]:
    """Start and duration in ns."""
    start = np.fromiter(map(attrgetter("ts"), events), np.float64, len(events))
    duration = np.fromiter(map(attrgetter("dur"), events), np.float64, len(events))
    missing = np.isnan(start)
    if missing.any():
        if any(not events[row].in_time() for row in np.flatnonzero(missing).tolist()):
            raise ValueError("an event without a time")
        start[missing] = 0
    latest = max(np.abs(start).max(), np.abs(duration).max())
    if not latest < _LATEST_US:
        raise ValueError(f"{latest:g} is no time in microseconds")
    if latest >= _EXACT_US and _DECIMALS.search(text):
        with suppress(ValueError, ArithmeticError):  # exponents that only floats can have
            return _exact_ns(text)
    return _ns(start), np.maximum(_ns(duration), 0)


def _exact_ns(text: bytes | bytearray) -> tuple[Array, Array]:
    """Of microseconds since 1970 with decimals: as floats they would be 125 ns off."""
    exact = _decode_exact(text)
    starts = [int((event.ts * 1000).to_integral_value()) for event in exact]
    durations = [max(int((event.dur * 1000).to_integral_value()), 0) for event in exact]
    return np.array(starts, np.int64), np.array(durations, np.int64)


def _ns(us: Array) -> Array:
    whole = np.floor(us)
    ns: Array = whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)
    return ns
