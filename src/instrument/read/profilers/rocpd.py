"""Reads rocprofv3's databases, schemas 3 and 4, through the views in them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import TraceError
from ..tables.lanes import map_unique
from ..tables.links import assemble
from ..tables.table import Array, natural
from ..tables.trace import Device, ReadLosses, Trace
from .database import DATABASE_ERRORS, is_database, open_database, query_small, row_limit, text_limit
from .rocm import PROCESS_BIT, RocmColumns, process_unique_ids

_VIEWS = ("kernels", "regions", "memory_copies", "samples", "memory_allocations")
_REQUIRED = frozenset(_VIEWS[:3])
_VIEW = 56  # the bit of an event's number at which the number of its view begins

# For each column, expressions in order of preference; a view of either schema has one of them.
_Columns = dict[str, tuple[str, ...]]
_TEXTS: _Columns = {"guid": ("guid",), "name": ("name",)}
_NUMBERS: _Columns = {"id": ("id",), "pid": ("pid",), "tid": ("tid",), "correlation": ("stack_id",)}
_GPU: _Columns = _NUMBERS | {"stream": ("stream_id",), "queue": ("queue_id",)}
_KERNEL: _Columns = _GPU | {
    "device": ("agent_type_index",),
    "shared_bytes": ("lds_size", "lds_block_size"),
    "registers": ("vgpr_count", "arch_vgpr_count"),
    **{axis: (f"grid_{axis}",) for axis in "xyz"},
    **{axis.upper(): (f"workgroup_{axis}",) for axis in "xyz"},
}
_COPY: _Columns = _GPU | {
    "bytes": ("size",),
    "device": ("iif(src_agent_type = 'GPU', src_agent_type_index, dst_agent_type_index)",),
}
_CALL: _Columns = _NUMBERS | {"ancestor": ("parent_stack_id",)}
_CALL_TEXTS: _Columns = _TEXTS | {
    "kind": ("category",),
    "text": ("iif(json_valid(extdata), json_extract(extdata, '$.message'), '')",),
}
_MEMORY_TEXTS: _Columns = _TEXTS | {
    "name": ("type",),
    "category": ("iif(level = 'SCRATCH', 'scratch_memory', 'memory_allocation')",),
}
_SPAN = ("[start]", "[end]")


def read_rocpd(path: Path) -> Trace:
    """Read a database of rocprofv3, of one or more processes, without writing beside it.

    Raises:
        TraceError: the file is not such a database, or lacks its views.
        OSError: the file cannot be opened.
    """
    if not is_database(path):
        raise TraceError(path, "it is not an SQLite database")
    with open_database(path, log=False) as connection:
        return _Reader(path, connection, ReadLosses()).read()


class _Reader:
    def __init__(self, path: Path, connection: sqlite3.Connection, lost: ReadLosses) -> None:
        self._path = path
        self._connection = connection
        self._lost = lost
        self._row_limit = row_limit(path)
        self._collected = RocmColumns(text_limit(path))
        self._processes: dict[tuple[int, int], int] = {}  # by the number of the guid and the process id
        self._views = {name for (name,) in query_small(connection, "SELECT name FROM sqlite_master")}
        if missing := sorted(_REQUIRED - self._views):
            raise TraceError(path, f"it lacks the view {', '.join(missing)} that a database of rocprofv3 has")
        wal = path.with_name(path.name + "-wal")
        if wal.exists() and wal.stat().st_size:
            lost.add(f"{wal.name} beside it is not read", size=wal.stat().st_size)

    def read(self) -> Trace:
        devices = self._devices()
        sms = {device.id: device.sms for device in devices}
        kernels = self._part("kernels", _TEXTS, _KERNEL, _SPAN)
        kernels["sms"] = map_unique(kernels["device"], lambda device: sms.get(device, 0))
        self._collected.add_kernels(kernels)
        copies = self._part("memory_copies", _TEXTS, _COPY, _SPAN)
        self._collected.add_memcpys(copies | {"operation": copies["name"]})
        self._read_calls("regions", _SPAN)
        self._read_calls("samples", ("[timestamp]", "[timestamp]"))
        self._collected.add("others", self._part("memory_allocations", _MEMORY_TEXTS, _NUMBERS, _SPAN))
        self._read_counters()
        processes = self._dicts("SELECT * FROM processes")
        metadata = {row["tag"]: row["value"] for row in self._dicts("SELECT tag, value FROM rocpd_metadata")}
        names = self._dicts("SELECT pid, tid, name FROM threads WHERE name <> ''")
        texts = list(self._collected.strings)
        return assemble(
            self._path,
            "rocprof",
            self._collected.tables(),
            self._collected.strings,
            self._collected.threads({(row["pid"], row["tid"]): str(row["name"]) for row in names}),
            devices=devices,
            metadata=metadata | {"processes": processes},
            lost=self._lost,
            rank=self._environment("RANK"),
            world_size=self._environment("WORLD_SIZE"),
            look_up=partial(_look_up, self._path, [texts[guid] for guid, _ in self._processes]),
        )

    def _read_calls(self, view: str, span: tuple[str, str]) -> None:
        part = self._part(view, _CALL_TEXTS, _CALL, span, "category LIKE '%API%'")
        kinds = [code for word, code in self._collected.strings.items() if word.startswith("MARKER")]
        marker = np.isin(part["kind"], kinds)
        self._collected.add_markers({name: column[marker] for name, column in part.items()})
        self._collected.add_calls({name: column[~marker] for name, column in part.items()})

    def _read_counters(self) -> None:
        """Add the counters of each kernel, summed over their instances."""
        for view, name, value in (
            ("counters_collection", "counter_name", "value"),
            ("kernel_pmc_events", "pmc_name", "pmc_value"),
        ):
            if view in self._views:
                group = f"guid, dispatch_id, {name}"
                texts, reals = _TEXTS | {"name": (name,)}, {"value": (f"sum({value})",)}
                numbers = {column: _NUMBERS[column] for column in ("pid", "tid")}
                part = self._part(view, texts, numbers, _SPAN, f"true GROUP BY {group}", reals)
                self._collected.add("counters", part)
                return

    def _part(
        self,
        view: str,
        texts: _Columns,
        numbers: _Columns,
        span: tuple[str, str],
        where: str = "true",
        reals: Mapping[str, tuple[str, ...]] | None = None,
    ) -> dict[str, Array]:
        """Return the columns of a view, without rows of invalid times."""
        start, end = span
        valid = (
            f"typeof({start}) = 'integer' AND typeof({end}) = 'integer' "
            f"AND {start} BETWEEN 0 AND {end} AND {end} < {1 << 62}"
        )
        columns = [f"CAST(CAST({self._known(view, wanted)} AS TEXT) AS BLOB)" for wanted in texts.values()]
        columns += [f"iif({valid}, {start}, -1)", f"iif({valid}, {end} - {start}, -1)"]
        columns += [f"CAST(coalesce({self._known(view, wanted)}, -1) AS INTEGER)" for wanted in numbers.values()]
        columns += [f"CAST({self._known(view, wanted)} AS REAL)" for wanted in (reals or {}).values()]
        dtype = [(name, "i8") for name in (*texts, "start_ns", "duration_ns", *numbers)]
        dtype += [(name, "f8") for name in reals or {}]
        query = f"SELECT {', '.join(columns)} FROM {view} WHERE {where} LIMIT {self._row_limit}"
        table = np.fromiter(self._rows(view, query, len(texts)), np.dtype(dtype))
        kept = table[table["start_ns"] >= 0]
        if len(kept) < len(table):
            self._lost.add(f"{view}: invalid times", events=len(table) - len(kept))
        part = {name: np.ascontiguousarray(kept[name]) for name, _ in dtype}
        self._number(view, part)
        return part

    def _known(self, view: str, expressions: tuple[str, ...]) -> str:
        for expression in expressions:
            with suppress(*DATABASE_ERRORS):
                self._connection.execute(f"SELECT {expression} FROM {view} LIMIT 0")
                return expression
        return "NULL"

    def _rows(self, view: str, query: str, texts: int) -> Iterator[tuple[Any, ...]]:
        """Yield the rows up to any damage, with numbers of strings in place of text."""
        if view in self._views:

            @cache  # decodes each text once
            def number(text: bytes | None) -> int:
                return self._collected.strings[(text or b"").decode("utf-8", "replace")]

            try:
                for row in self._connection.execute(query):
                    yield (*map(number, row[:texts]), *row[texts:])
            except DATABASE_ERRORS as error:
                self._lost.add(f"{view}: {error}")

    def _dicts(self, query: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        try:
            names = [column[0] for column in self._connection.execute(query).description]
            rows.extend(dict(zip(names, row, strict=True)) for row in query_small(self._connection, query))
        except DATABASE_ERRORS as error:
            self._lost.add(str(error))
        return rows

    def _number(self, view: str, part: dict[str, Array]) -> None:
        """Number processes, threads and events, and make ids unique among processes."""

        def number(key: int) -> int:
            return self._processes.setdefault(divmod(key, 1 << 32), len(self._processes))

        process = map_unique((part["guid"] << 32) + (part["pid"] & (1 << 32) - 1), number)
        part["thread"] = self._collected.threads_of(part["pid"], part["tid"])
        for column, lowest in (("correlation", 1), ("ancestor", 1), ("stream", 0), ("queue", 0)):
            if column in part:
                part[column] = process_unique_ids(part[column], process, lowest)
        if "id" in part:
            event = process_unique_ids(part["id"], process)
            numbered = (event >= 0) & (process < 1 << _VIEW - PROCESS_BIT)
            part["event"] = np.where(numbered, event + (_VIEWS.index(view) << _VIEW), -1)

    def _devices(self) -> list[Device]:
        threads = "json_extract(extdata, '$.max_waves_per_cu') * json_extract(extdata, '$.wave_front_size')"
        memory = "SELECT sum(json_extract(value, '$.size_in_bytes')) FROM json_each(extdata, '$.mem_banks')"
        rows = self._dicts(
            "SELECT CAST(type_index AS INTEGER) AS id, CAST(coalesce(product_name, name, '') AS TEXT) AS name, "
            "CAST(coalesce(json_extract(extdata, '$.cu_count'), 0) AS INTEGER) AS sms, "
            f"CAST(coalesce({threads}, 0) AS INTEGER) AS threads_per_sm, "
            f"CAST(coalesce(({memory}), 0) AS INTEGER) AS memory_bytes "
            "FROM rocpd_info_agent WHERE type = 'GPU' AND type_index >= 0 AND json_valid(extdata) ORDER BY 1"
        )
        return list({row["id"]: Device(**row) for row in rows}.values())

    def _environment(self, name: str) -> int | None:
        """Return a number in the environment of the process, if the file has one process."""
        value = f"iif(json_valid(environment), json_extract(environment, '$.{name}'), '')"
        rows = self._dicts(f"SELECT CAST({value} AS TEXT) AS value FROM rocpd_info_process")
        number = natural(rows[0]["value"]) if len(rows) == 1 else -1
        return number if number >= 0 else None


def _look_up(path: Path, guids: Sequence[str], event: int) -> dict[str, Any]:
    if event < 0:
        return {}
    view, process = divmod(event >> PROCESS_BIT, 1 << _VIEW - PROCESS_BIT)
    query = f"SELECT * FROM {_VIEWS[view]} WHERE id = ? AND guid = ?"
    with open_database(path, log=False) as connection:
        cursor = connection.execute(query, (event & (1 << PROCESS_BIT) - 1, guids[process]))
        names = [column[0] for column in cursor.description]
        return dict(zip(names, cursor.fetchone() or (), strict=False))
