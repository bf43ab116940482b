"""Reads the NVTX ranges and marks in a report of Nsight Systems."""

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
_SPANS = (59, _START_END, 70, 71)  # the last two, and mark 65, were imported from text files
_ID = 0xFFFFFFFF
_PAYLOAD = (
    *("uint64Value", "int64Value", "doubleValue", "uint32Value", "int32Value", "floatValue"),
    *("jsonText", "binaryData"),
)
_STEP = re.compile(r"[0-9]{1,18}")
_OWN_DOMAIN = "instrument"  # the domain in which this library marks windows and steps


class NvtxRanges(NamedTuple):
    """The columns of tables of a trace.

    Attributes:
        regions: the ranges of the program.
        steps: the ranges of `instrument.profile` around steps.
        others: marks, and the ranges of `instrument.profile` around windows.
        unfinished: the number of ranges without an end, which last until the end of all events. (If nsys knows
            when the program ended, it writes that as the end.)
    """

    regions: dict[str, Array]
    steps: dict[str, Array]
    others: dict[str, Array]
    unfinished: int


def read_nvtx_ranges(report: NsightReport, origins: Origins, last_ns: int) -> NvtxRanges:
    """Read ranges and marks; a range that another thread ended belongs to the thread that started it.

    Args:
        report: the open report.
        origins: the threads and processes of the report.
        last_ns: the last time in all other tables.
    """
    rows = _rows(report, origins)
    mark = np.isin(rows["eventType"], _MARKS)
    unfinished = ~mark & (rows["end"] == MISSING)
    times = np.concatenate((rows["start"], rows["end"]))
    rows["end"][unfinished] = times[times < LATEST].max(initial=last_ns)
    rows["end"][mark] = rows["start"][mark]
    rows = report.drop_invalid_times(RANGES, rows)

    strings, texts = report.strings, list(report.strings)
    mark = np.isin(rows["eventType"], _MARKS)
    own = (rows["domainId"] == strings[_OWN_DOMAIN]) & (rows["eventType"] == _START_END)
    number = map_unique(rows["payload"], lambda code: int(texts[code]) if _STEP.fullmatch(texts[code]) else -1)
    step = own & (rows["text"] == strings["step"]) & (number >= 0)
    window = own & (rows["text"] == strings["capture"])

    columns = event_columns(RANGES, rows) | {"name": rows["text"], "thread": origins.threads_of(rows["globalTid"])}
    looks = {name: rows[name] for name in ("category", "color", "payload")} | {"domain": rows["domainId"]}
    kinds = {"category": np.where(mark, strings["mark"], strings["capture"])}
    return NvtxRanges(
        _select(columns | looks, ~(mark | step | window)),
        _select(columns | {"number": number}, step),
        _select(columns | kinds, mark | window),
        int(unfinished.sum()),
    )


def _select(columns: dict[str, Array], rows: Array) -> dict[str, Array]:
    return {name: column[rows] for name, column in columns.items()}


def _rows(report: NsightReport, origins: Origins) -> Array:
    """Return ranges and marks, with numbers of strings as text, payload, domainId and category."""
    numbers = ("start", "end", "eventType", "category", "color", "textId", "jsonTextId", "globalTid", "domainId")
    rows = report.rows(RANGES, numbers, text=("text",), payload=_PAYLOAD)
    for column, shared in (("text", "textId"), ("payload", "jsonTextId")):
        empty = rows[column] == 0
        rows[column][empty] = map_unique(rows[shared][empty], lambda id: report.strings[report.string(id)])

    # Each process numbers its domains, and each domain its categories.
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
    """Return the names of domains or categories; the first name counts."""
    named = np.flatnonzero(rows["eventType"] == kind)
    named = named[np.argsort(rows["start"][named], kind="stable")][::-1]
    return dict(zip(keys[named].tolist(), rows["text"][named].tolist(), strict=True))


def _number(report: NsightReport, number: int) -> int:
    """Return the string for a number without a name; 0, the default domain and no category, is empty."""
    return report.strings[str(number) if number else ""]
