"""`Trace`: the recording of one process, with what can be done with it; `TraceData` holds its tables."""

from __future__ import annotations

import os
from copy import copy
from pathlib import Path
from typing import Any

from ..guard import guard
from .table import KERNEL, MEMCPY, MEMSET, Table
from .trace_data import MODULE, MODULE_PREFIX, Coverage, Device, ReadLosses, Thread, TraceData, UnreadDevice

__all__ = ["MODULE", "MODULE_PREFIX", "Coverage", "Device", "ReadLosses", "Thread", "Trace", "UnreadDevice"]


class Trace(TraceData):
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
        """Return the tables as ``pyarrow.Table``, by name; see `instrument.traces.export.to_arrow`.

        Raises:
            ImportError: pyarrow is not installed.
        """
        from .export import to_arrow

        return to_arrow(self)

    def to_pandas(self) -> dict[str, Any]:
        """Return the tables as ``pandas.DataFrame``, by name.

        Raises:
            ImportError: pandas or pyarrow is not installed.
        """
        from .export import to_pandas

        return to_pandas(self)

    def to_parquet(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write one Parquet file per table into ``folder`` and return their paths.

        Raises:
            ImportError: pyarrow is not installed.
            NotADirectoryError: ``folder`` is a file.
            OSError: ``folder`` cannot be written to.
        """
        from .export import to_parquet

        return to_parquet(self, folder)

    @guard.contained("page in a notebook")
    def _repr_html_(self) -> str | None:
        from ..page.document import frame
        from .page_sections import page_of

        return frame(page_of(self))

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_") and name != "look_up"]
