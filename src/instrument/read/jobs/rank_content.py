"""Reduces a rank's trace to what comparing ranks needs, so that any number of ranks fits into memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np

from ...base.trace_marks import MACHINE, MERGE
from ..measures.region_steps import with_steps
from ..tables.intervals import clip, merge_overlaps, total_ns
from ..tables.table import COLUMNS, KERNEL, TEXT, Array, Strings, Table, table
from ..tables.trace import Trace
from ..tables.work_classes import Collectives, communication_mask
from .align import collective_kernels
from .read import read_file


@dataclass
class RankContent(Trace):
    """A trace with its steps and collectives only.

    Attributes:
        window_ns: the time of its steps and of the work that they launched or, without steps, of all GPU work.
        compute_ns: the part of it during which a kernel that does not communicate runs.
    """

    window_ns: int = 0
    compute_ns: int = 0


def read_rank_content(path: Path, collectives: Collectives = "auto", steps_from: str | None = None) -> RankContent:
    """Read one file, and keep its steps (see `with_steps`) and collectives; errors as those of `read_trace`."""
    return content_of(with_steps(read_file(path), steps_from), collectives)


def rank_content_reader(collectives: Collectives, steps_from: str | None) -> partial[RankContent]:
    """Return a function that reads a file, and that other processes can import."""
    return partial(read_rank_content, collectives=collectives, steps_from=steps_from)


def content_of(trace: Trace, collectives: Collectives = "auto") -> RankContent:
    """Return what `RankContent` keeps of a trace."""
    gpu, steps = trace.gpu, trace.steps
    start = int(steps.start_ns.min()) if steps else int(gpu.start_ns.min()) if gpu else 0
    own = gpu.where(gpu.step >= 0) if steps else gpu
    ends = [int(part.end_ns.max()) for part in (steps, own) if part]
    end = max(ends, default=start)
    counted = own or gpu  # not the work of earlier steps that still runs when the recording begins
    computes = ~communication_mask(counted, collectives) & (counted.category == KERNEL)
    compute = clip(merge_overlaps(counted.start_ns[computes], counted.end_ns[computes]), start, end)
    strings = Strings()
    kept = {"steps": steps, "gpu": gpu.where(collective_kernels(trace))}
    tables = {name: _copied(kept[name], strings) if name in kept else None for name in COLUMNS}
    texts = list(strings)
    return RankContent(
        **{field.name: getattr(trace, field.name) for field in fields(Trace)}
        | {name: _empty(name, texts) if rows is None else Table(rows, texts) for name, rows in tables.items()}
        | {"strings": texts, "look_up": None, "metadata": _about_ranks(trace)},
        window_ns=end - start,
        compute_ns=total_ns(compute),
    )


def _copied(rows: Table, strings: Strings) -> dict[str, Array]:
    """Return the columns with strings renumbered, so that the strings of other rows can go."""
    columns = {}
    for name in rows:
        column = rows[name]
        if name in TEXT:
            codes, of = np.unique(column, return_inverse=True)
            column = np.array([strings[rows.strings[code]] for code in codes.tolist()], column.dtype)[of]
        columns[name] = column.copy()
    return columns


def _empty(kind: str, texts: list[str]) -> Table:
    return table(kind, {"start_ns": np.empty(0, np.int64)}, texts)


def _about_ranks(trace: Trace) -> dict[str, object]:
    """Return the metadata that says which rank, or which ranks, the trace is of, and where they ran."""
    return {key: trace.metadata[key] for key in ("distributedInfo", MACHINE, MERGE) if trace.metadata.get(key)}
