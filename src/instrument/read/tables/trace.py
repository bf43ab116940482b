"""`Trace`: the recording of one process, what can be done with it, and its export to Arrow, pandas and Parquet."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ...base.page_file import InNotebook
from ...base.part_file import make_folder
from .table import COLUMNS, KERNEL, MEMCPY, MEMSET, PIP, TEXT, Array, Table
from .trace_data import MODULE, MODULE_PREFIX, Coverage, Device, ReadLosses, Thread, TraceData, UnreadDevice

if TYPE_CHECKING:
    import pandas
    import pyarrow

__all__ = ["MODULE", "MODULE_PREFIX", "Coverage", "Device", "ReadLosses", "Thread", "Trace", "UnreadDevice"]


class Trace(TraceData, InNotebook):
    """The recording of one process, as tables of events: the attributes of `TraceData`."""

    def __repr__(self) -> str:
        return f"<trace {self.path}: {len(self.gpu):,} on the GPU, {len(self.operators):,} operators>"

    @property
    def kernels(self) -> Table:
        """The kernels: rows of `gpu`, renumbered from 0."""
        return self.gpu.where(self.gpu.category == KERNEL)

    @property
    def memcpys(self) -> Table:
        """The memcpys: rows of `gpu`, renumbered from 0."""
        return self.gpu.where(self.gpu.category == MEMCPY)

    @property
    def memsets(self) -> Table:
        """The memsets: rows of `gpu`, renumbered from 0."""
        return self.gpu.where(self.gpu.category == MEMSET)

    def read_only(self) -> Trace:
        """Return a copy whose tables share their memory with this trace, and cannot be written."""
        copied = copy(self)
        tables = {name: value for name, value in vars(self).items() if isinstance(value, Table)}
        vars(copied).update({name: table.read_only() for name, table in tables.items()})
        return copied

    def args(self, table: Table, row: int) -> dict[str, Any]:
        """Return everything that the file says about one event.

        The file is read again, which is slow: meant for a few events.

        Args:
            table: a table of this trace, or a selection of its rows.
            row: the row in that table.

        Raises:
            OSError: the file cannot be opened any more.
            TraceError: the file is damaged at this event.
        """
        if self.look_up is None:
            return {}
        return self.look_up(int(table.event[row]))

    def to_arrow(self) -> dict[str, Any]:
        """Return the tables as ``pyarrow.Table``, by name; see `instrument.read.tables.trace.to_arrow`.

        Raises:
            ImportError: pyarrow is not installed.
        """
        return to_arrow(self)

    def to_pandas(self) -> dict[str, Any]:
        """Return the tables as ``pandas.DataFrame``, by name.

        Raises:
            ImportError: pandas or pyarrow is not installed.
        """
        return to_pandas(self)

    def to_parquet(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write one Parquet file per table into ``folder`` and return their paths.

        Raises:
            ImportError: pyarrow is not installed.
            NotADirectoryError: ``folder`` is a file.
            OSError: ``folder`` cannot be written to.
        """
        return to_parquet(self, folder)

    def _page(self) -> str:
        from ...show.sections.trace import page_of

        return page_of(self)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_") and name != "look_up"]


_NOT_EXPORTED = {*COLUMNS, "strings", "threads", "look_up"}


@overload
def to_arrow(source: TraceData) -> dict[str, pyarrow.Table]: ...
@overload
def to_arrow(source: Table) -> pyarrow.Table: ...
def to_arrow(source: TraceData | Table) -> dict[str, pyarrow.Table] | pyarrow.Table:
    """Return the tables of a trace by name, or a single table, as ``pyarrow.Table``.

    Text columns become dictionary columns with the strings in use. The tables of a trace have more columns:
    ``row``, to which links such as ``gpu.region`` refer; and in tables with a ``thread``, its ``process``,
    ``thread_id`` and ``thread_name``, null if unknown. The metadata of each schema has the other attributes of the
    trace as JSON, under the key ``instrument``.

    Raises:
        ImportError: pyarrow is not installed.
    """
    if isinstance(source, Table):
        return _arrow(dict(source), source.strings)
    about = {b"instrument": _about(source)}
    return {kind: _arrow_table(source, kind).replace_schema_metadata(about) for kind in COLUMNS}


@overload
def to_pandas(source: TraceData) -> dict[str, pandas.DataFrame]: ...
@overload
def to_pandas(source: Table) -> pandas.DataFrame: ...
def to_pandas(source: TraceData | Table) -> dict[str, pandas.DataFrame] | pandas.DataFrame:
    """Return the tables of a trace by name, or a single table, as ``pandas.DataFrame``, with text as categories.

    The columns are those of `to_arrow`, except ``row``, which is the index.

    Raises:
        ImportError: pandas or pyarrow is not installed.
    """
    if isinstance(source, Table):
        return source.to_pandas()
    try:
        import pandas  # noqa: F401
    except ImportError as error:
        raise ImportError(f"data frames need pandas: {PIP}") from error
    return {kind: rows.drop_columns("row").to_pandas() for kind, rows in to_arrow(source).items()}


def to_parquet(trace: TraceData, folder: str | os.PathLike[str]) -> list[Path]:
    """Write one Parquet file per table, with the columns of `to_arrow`, and return their paths.

    Existing files are replaced once all tables are written; if writing fails, no file is replaced.

    Args:
        trace: the trace.
        folder: the folder for the files, created if missing.

    Raises:
        ImportError: pyarrow is not installed.
        NotADirectoryError: ``folder`` is a file.
        OSError: the folder cannot be written to.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f'"folder" must be a folder: {str(folder)!r} is a file')
    tables = to_arrow(trace)
    import pyarrow.parquet

    make_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as parts:
        for kind, rows in tables.items():
            pyarrow.parquet.write_table(rows, Path(parts, f"{kind}.parquet"))
        return [Path(parts, f"{kind}.parquet").replace(folder / f"{kind}.parquet") for kind in tables]


def _arrow_table(trace: TraceData, kind: str) -> pyarrow.Table:
    rows: Table = getattr(trace, kind)
    columns: dict[str, Any] = {"row": np.arange(len(rows), dtype=np.int32)} | dict(rows)
    result = _arrow(columns, rows.strings)
    if "thread" in rows:
        unknown = rows.thread < 0
        places = {
            "process": [str(thread.process) for thread in trace.threads],
            "thread_id": [str(thread.thread) for thread in trace.threads],
            "thread_name": [thread.name for thread in trace.threads],
        }
        for name, texts in places.items():
            column = _dictionary(np.where(unknown, 0, rows.thread), texts or [""], unknown)
            result = result.append_column(name, column)
    return result


def _arrow(columns: dict[str, Array], strings: list[str]) -> pyarrow.Table:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(f"Arrow and Parquet need pyarrow: {PIP}") from error
    return pyarrow.table(
        {
            name: _dictionary(column, strings) if name in TEXT else pyarrow.array(column)
            for name, column in columns.items()
        }
    )


def _dictionary(codes: Array, strings: list[str], unknown: Array | None = None) -> pyarrow.DictionaryArray:
    """Return a dictionary column of the strings in use."""
    import pyarrow

    used, numbers = np.unique(codes, return_inverse=True)
    # JSON may escape half a surrogate pair, which cannot be encoded.
    texts = [strings[code].encode(errors="backslashreplace").decode() for code in used.tolist()]
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}  # threads share names
    indices = np.array([places[text] for text in texts], np.int32)[numbers]
    dictionary = pyarrow.array(list(places), pyarrow.string())
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(indices, mask=unknown), dictionary)


def _about(trace: TraceData) -> bytes:
    """Return all attributes that are not tables, as JSON."""
    about = {item.name: getattr(trace, item.name) for item in fields(trace) if item.name not in _NOT_EXPORTED}
    return json.dumps(about, default=_plain).encode()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else str(value)
