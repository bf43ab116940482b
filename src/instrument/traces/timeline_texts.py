"""The texts of a timeline: the names of slices, and what launched GPU work, as places in one list."""

from __future__ import annotations

import numpy as np

from ..page.names import shown_name
from .table import Array, Table
from .timeline_lanes import TimelineSource, distinct
from .trace_data import MODULE_PREFIX
from .work_classes import work_names


class TimelineTexts:
    """The texts of the slices that are shown one by one.

    Args:
        source: what the timeline is made of.
        name: the name of each slice, as in `Lane`.
        work: its GPU work, as in `Lane`.
        used: the slices whose texts are needed.

    Attributes:
        texts: the texts; the first is empty.
        name: the place of each slice's name in ``texts``; 0 if it is not needed.
        about: the place of each slice's launch in the columns of ``launches``; 0 for none.
        launches: what launched GPU work, and its own name (``work``), as places in ``texts``.
        causes: for each cause of idle time in ``texts``, its place there and a sentence that explains it.
    """

    def __init__(self, source: TimelineSource, name: Array, work: Array, used: Array) -> None:
        rows, of_row = np.unique(work[used], return_inverse=True)
        columns = {key: column[rows] for key, column in _launches(source).items()}
        columns = {key: np.append(0, column) for key, column in columns.items()}
        numbers = np.unique(np.concatenate((name[used], *columns.values())))
        places = {key: np.searchsorted(numbers, column) for key, column in columns.items()}
        first, place = distinct(*places.values())
        self.launches = {key: column[first].tolist() for key, column in places.items()}
        self.name, self.about = np.zeros(len(name), np.int64), np.zeros(len(name), np.int64)
        self.name[used] = np.searchsorted(numbers, name[used])
        self.about[used] = place[1:][of_row]
        self.texts = [text_of(source, number) for number in numbers.tolist()]
        strings, sentences = len(source.trace.strings), list(source.causes.values())
        self.causes = [
            (place, sentences[number - strings])
            for place, number in enumerate(numbers.tolist())
            if number >= strings
        ]


def text_of(source: TimelineSource, number: int) -> str:
    """Return a text by its number in the strings of the trace, which the causes of idle time follow."""
    strings = source.trace.strings
    if number >= len(strings):
        return list(source.causes)[number - len(strings)]
    return shown_name(strings[number].removeprefix(MODULE_PREFIX))


def _launches(source: TimelineSource) -> dict[str, Array]:
    """Return for each row of `TimelineSource.gpu`, and then for none, the numbers of the names of its launch."""
    gpu, trace = source.gpu, source.trace

    def names(events: Table, rows: Array) -> Array:
        return np.append(np.append(events.name, 0)[rows], 0)

    return {
        "work": np.append(work_names(gpu), 0),
        "call": names(trace.runtime, gpu.launch),
        "operator": names(trace.operators, gpu.operator),
        "region": names(trace.regions, gpu.region),
        "module": names(trace.frames, gpu.module),
    }
