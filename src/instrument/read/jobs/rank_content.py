"""Reduces a rank's trace to what comparing ranks needs, so that any number of ranks fits into memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np

from ...base.trace_marks import MACHINE, MERGE
from ..measures.region_steps import with_steps
from ..tables.intervals import clip, merge_overlaps, total_ns
from ..tables.lanes import map_unique
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
    kept = {
        "gpu": _copied(gpu.where(collective_kernels(trace)), strings),
        "steps": _copied(steps, strings),
    }
    texts, nothing = list(strings), {"start_ns": np.empty(0, np.int64)}
    # what says which rank, or which ranks, the trace is of, and where they ran
    about = {key: trace.metadata[key] for key in ("distributedInfo", MACHINE, MERGE) if trace.metadata.get(key)}
    return RankContent(
        **{field.name: getattr(trace, field.name) for field in fields(Trace)}
        | {name: table(name, kept.get(name, nothing), texts) for name in COLUMNS}
        | {"strings": texts, "look_up": None, "metadata": about},
        window_ns=end - start,
        compute_ns=total_ns(compute),
    )


def _copied(rows: Table, strings: Strings) -> dict[str, Array]:
    """Return the columns with strings renumbered, so that the strings of other rows can go."""
    return {
        name: map_unique(column, lambda code: strings[rows.strings[code]]) if name in TEXT else column.copy()
        for name, column in rows.items()
    }
