"""The texts of the timeline: the names of slices, and what launched GPU work, as places in one list."""

from __future__ import annotations

import numpy as np

from ...page.names import shown_name
from ...traces.table import Array, Table
from ...traces.trace import MODULE_PREFIX
from ..idle_causes import CAUSES
from ..trace_facts import TraceFacts
from .gpu_work import work_names
from .timeline_lanes import distinct


class TimelineTexts:
    """The texts of the slices that are shown one by one.

    Args:
        facts: the facts of the trace.
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

    def __init__(self, facts: TraceFacts, name: Array, work: Array, used: Array) -> None:
        rows, of_row = np.unique(work[used], return_inverse=True)
        columns = {key: column[rows] for key, column in _launches(facts).items()}
        columns = {key: np.append(0, column) for key, column in columns.items()}
        numbers = np.unique(np.concatenate((name[used], *columns.values())))
        places = {key: np.searchsorted(numbers, column) for key, column in columns.items()}
        first, place = distinct(*places.values())
        self.launches = {key: column[first].tolist() for key, column in places.items()}
        self.name, self.about = np.zeros(len(name), np.int64), np.zeros(len(name), np.int64)
        self.name[used] = np.searchsorted(numbers, name[used])
        self.about[used] = place[1:][of_row]
        self.texts = [text_of(facts, number) for number in numbers.tolist()]
        strings, causes = len(facts.trace.strings), list(CAUSES.values())
        self.causes = [
            (place, f"The GPU idles while {causes[number - strings]}.")
            for place, number in enumerate(numbers.tolist())
            if number >= strings
        ]


def text_of(facts: TraceFacts, number: int) -> str:
    """Return a text by its number in the strings of the trace, which the causes of idle time follow."""
    strings = facts.trace.strings
    if number >= len(strings):
        return list(CAUSES)[number - len(strings)].replace("_", " ")
    return shown_name(strings[number].removeprefix(MODULE_PREFIX))


def _launches(facts: TraceFacts) -> dict[str, Array]:
    """Return for each row of `TraceFacts.gpu`, and then for none, the numbers of the names of its launch."""
    gpu, trace = facts.gpu, facts.trace

    def names(events: Table, rows: Array) -> Array:
        return np.append(np.append(events.name, 0)[rows], 0)

    return {
        "work": np.append(work_names(facts), 0),
        "call": names(trace.runtime, gpu.launch),
        "operator": names(trace.operators, gpu.operator),
        "region": names(trace.regions, gpu.region),
        "module": names(trace.frames, gpu.module),
    }
