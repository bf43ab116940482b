"""The names in a slim trace: of events, as they are or replaced, and of its processes and threads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from ...read.kineto.insert_events import FIRST_LANE
from ...read.tables.trace import Thread

Id = int | str | float | None
"""The id of a process or a thread in a trace."""


class Names:
    """Keeps all names as they are."""

    def event(self, table: str, name: str) -> str:
        """Return the name of an event of a table."""
        return name

    def category(self, name: str | None) -> str | None:
        """Return the category of an event."""
        return name

    def value(self, text: str) -> str:
        """Return a value of the args of an event, as JSON."""
        return text

    def lane(self, number: Id) -> Id:
        """Return the id of a process or thread, which may be text."""
        return number

    def label(self, kind: str, text: str) -> str:
        """Return the name or the labels of a process or thread."""
        return text

    def metadata(self, about: dict[str, Any]) -> Mapping[str, Any]:
        """Return the metadata."""
        return about


Place = tuple[Id, Id]

_OF_PROCESS = ("process_name", "process_labels", "process_sort_index")
_SORTED = ("process_sort_index", "thread_sort_index")
_OF_THREAD = ("thread_name", "thread_sort_index")
_ARGS = ("name", "labels", "sort_index")


class _Name(Struct, gc=False):
    ph: str = ""
    name: str = ""
    pid: Id = ""
    tid: Id = ""
    args: Raw = Raw(b"{}")


_decode = msgspec.json.Decoder(_Name).decode


class LaneNames:
    """The metadata events that name the processes and threads of the events that stay.

    Args:
        threads: the threads of the trace, whose order stays, because numbers of threads follow from it.
        names: gives the names that are written.
    """

    def __init__(self, threads: Sequence[Thread], names: Names) -> None:
        self._names = names
        self._order: dict[Place, int] = {(each.process, each.thread): row for row, each in enumerate(threads)}
        self._thread_names: dict[Place, str] = {(each.process, each.thread): each.name for each in threads}
        self._lanes = dict[tuple[Place, int], Place]()
        self._used = dict[Place, Place]()
        self._found = dict[tuple[str, Id, Id], Mapping[str, object]]()

    def place(self, process: Id, thread: Id) -> Place:
        """Return a process and thread, and remember that an event of it stays."""
        place = process, thread
        return self._used.setdefault(place, place)

    def lane(self, place: Place, number: int) -> Place:
        """Return a lane of a thread for events that overlap others on it."""
        key = place, number
        if key not in self._lanes:
            lane = FIRST_LANE + len(self._lanes)
            while (place[0], lane) in self._order:
                lane += 1
            self._lanes[key] = place[0], lane
        return self._lanes[key]

    @property
    def lanes(self) -> list[list[Id]]:
        """The lanes: the process, the id of the lane, and the id of the thread."""
        return [[process, lane, place[1]] for (place, _), (process, lane) in self._lanes.items()]

    def take(self, texts: Iterable[bytes]) -> None:
        """Remember the names among the texts of events; of several, the reader takes the first."""
        for text in texts:
            if b'"M"' not in text:
                continue
            event = _decode(text)
            if event.ph == "M" and event.name in (*_OF_PROCESS, *_OF_THREAD):
                key = event.name, event.pid, event.tid if event.name in _OF_THREAD else 0
                if key not in self._found and (args := json_object(event.args)):
                    self._found[key] = args

    def events(self) -> Iterator[dict[str, object]]:
        """Yield the metadata events of what stays, in the order of the threads."""
        processes = {process for process, _ in self._used}
        last = len(self._order)
        for (name, process, thread), args in sorted(
            self._found.items(), key=lambda item: self._order.get(item[0][1:], last)
        ):
            if name in _OF_PROCESS and process not in processes:
                continue
            if name in _OF_THREAD and (process, thread) not in self._used:
                continue
            if name in _SORTED and args.get("sort_index") in (process, thread):
                continue  # viewers sort by these numbers anyway
            if name == "thread_name":
                args = {"name": self._thread_names.get((process, thread), "")}
            yield self._event(name, process, thread, {key: args[key] for key in _ARGS if key in args})
        for process, lane, thread in self.lanes:
            yield self._event("thread_name", process, lane, {"name": f"thread {thread}: overlaps"})

    def _event(self, name: str, process: Id, thread: Id, args: Mapping[str, object]) -> dict[str, object]:
        shown = {
            key: self._names.label(name, value) if isinstance(value, str) else value
            for key, value in args.items()
            if isinstance(value, (str, int, float))
        }
        place = {"pid": self._names.lane(process), "tid": self._names.lane(thread)}
        return {"ph": "M", "name": name, **place, "args": shown}


def json_object(raw: Raw) -> dict[str, object]:
    """Return a JSON object, whose text may be damaged; an empty one if the text is something else."""
    try:
        found = json.loads(bytes(raw).decode("utf-8", "replace"), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
