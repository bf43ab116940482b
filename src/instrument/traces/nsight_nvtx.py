"""The NVTX ranges and marks of a report of Nsight Systems."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from .lanes import map_unique
from .nsight_origin import Origins
from .nsight_tables import LATEST, MISSING, RANGES, NsightReport, event_columns
from .table import Array

_CATEGORY, _DOMAIN = 33, 75
_MARKS = (34, 65)
_START_END = 60
_SPANS = (59, _START_END, 70, 71)  # the last two, and mark 65, were imported from a text file
_ID = 0xFFFFFFFF
_PAYLOAD = (
    *("uint64Value", "int64Value", "doubleValue", "uint32Value", "int32Value", "floatValue"),
    *("jsonText", "binaryData"),
)
_STEP = re.compile(r"[0-9]{1,18}")
# What torch's emit_nvtx appends to an operator's name; each call has another.
_NUMBERS = re.compile(r", (?:seq|op_id) = \d+|, input_op_ids = \[.*\]$")
_OWN = "instrument"  # the domain in which this library marks windows and steps


class NvtxRanges(NamedTuple):
    """Columns of tables of a trace.

    Attributes:
        regions: the ranges of the program.
        steps: those that `instrument.profile` puts around steps.
        others: marks, and the ranges that `instrument.profile` puts around windows.
        unfinished: how many have no end; they are taken to last until the end of all events. (Where nsys knows
            when the program ended, it writes that as the end.)
    """

    regions: dict[str, Array]
    steps: dict[str, Array]
    others: dict[str, Array]
    unfinished: int


def read_nvtx_ranges(report: NsightReport, origins: Origins, last_ns: int) -> NvtxRanges:
    """Read them.

    A range that another thread ended belongs to the thread that started it.

    Args:
        report: the open report.
        origins: of its events.
        last_ns: the last time in any other table.
    """
    rows = _rows(report, origins)
    mark = np.isin(rows["eventType"], _MARKS)
    unfinished = ~mark & (rows["end"] == MISSING)
    times = np.concatenate((rows["start"], rows["end"]))
    rows["end"][unfinished] = times[times < LATEST].max(initial=last_ns)
    rows["end"][mark] = rows["start"][mark]
    rows = report.drop_invalid_times(RANGES, rows)

    strings, texts = report.strings, list(report.strings)
    rows["text"] = map_unique(rows["text"], lambda code: strings[_NUMBERS.sub("", texts[code])])
    mark = np.isin(rows["eventType"], _MARKS)
    ours = (rows["domainId"] == strings[_OWN]) & (rows["eventType"] == _START_END)
    number = map_unique(rows["payload"], lambda code: int(texts[code]) if _STEP.fullmatch(texts[code]) else -1)
    step = ours & (rows["text"] == strings["step"]) & (number >= 0)
    window = ours & (rows["text"] == strings["capture"])

    columns = event_columns(RANGES, rows) | {"name": rows["text"], "thread": origins.threads_of(rows["globalTid"])}
    looks = {name: rows[name] for name in ("category", "color", "payload")} | {"domain": rows["domainId"]}
    kinds = {"category": np.where(mark, strings["mark"], strings["capture"])}
    return NvtxRanges(
        _some(columns | looks, ~(mark | step | window)),
        _some(columns | {"number": number}, step),
        _some(columns | kinds, mark | window),
        int(unfinished.sum()),
    )


def _some(columns: dict[str, Array], rows: Array) -> dict[str, Array]:
    return {name: column[rows] for name, column in columns.items()}


def _rows(report: NsightReport, origins: Origins) -> Array:
    """Ranges and marks, with text, payload, domainId and category as words and color as a trace has it."""
    numbers = ("start", "end", "eventType", "category", "color", "textId", "jsonTextId", "globalTid", "domainId")
    rows = report.rows(RANGES, numbers, text=("text",), payload=_PAYLOAD)
    for column, shared in (("text", "textId"), ("payload", "jsonTextId")):
        empty = rows[column] == 0
        rows[column][empty] = map_unique(rows[shared][empty], lambda id: report.strings[report.string(id)])

    # Domains are numbered by process, categories by domain.
    process = origins.processes_of(rows["globalTid"])
    domains = (process << 32) + (np.where(rows["domainId"] == MISSING, 0, rows["domainId"]) & _ID)
    places = np.unique(domains, return_inverse=True)[1]
    categories = (places << 32) + (np.where(rows["category"] == MISSING, 0, rows["category"]) & _ID)
    domain_names = _names(rows, domains, _DOMAIN)
    category_names = _names(rows, categories, _CATEGORY)

    chosen = np.isin(rows["eventType"], (*_SPANS, *_MARKS))
    rows, domains, categories = rows[chosen], domains[chosen], categories[chosen]
    rows["domainId"] = map_unique(domains, lambda key: domain_names.get(key, _number(report, key & _ID)))
    rows["category"] = map_unique(categories, lambda key: category_names.get(key, _number(report, key & _ID)))
    rows["color"] = np.where(rows["color"] == MISSING, -1, rows["color"] & 0xFFFFFFFF)
    return rows


def _names(rows: Array, keys: Array, kind: int) -> dict[int, int]:
    """The words that were given to domains or categories; the first counts."""
    named = np.flatnonzero(rows["eventType"] == kind)
    named = named[np.argsort(rows["start"][named], kind="stable")][::-1]
    return dict(zip(keys[named].tolist(), rows["text"][named].tolist(), strict=True))


def _number(report: NsightReport, number: int) -> int:
    """The word for what has no name; the default domain and no category, both 0, have none."""
    return report.strings[str(number) if number else ""]
