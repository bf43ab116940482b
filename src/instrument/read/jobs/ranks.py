"""Reads the traces of the ranks of one job."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import cached_property
from itertools import chain
from pathlib import Path

from ...base.errors import TraceError
from ...base.process_id import usable_cores
from ...base.units import steps_text
from ..tables.notes import about_ranks
from ..tables.table import Array
from ..tables.trace import Trace
from .align import Clock, align
from .processes import Processes, read_or_reason
from .trace_files import Paths, Reasons, find_trace_files, process_from_name, rank_from_name

MAX_RANKS = 1_000_000
"""Higher ranks and numbers of ranks in a file are ignored."""


class TraceSet(Mapping[int, Trace]):
    """The traces of a job by rank, in ascending order: a read-only mapping from rank to `Trace`.

    ``traces[3]`` is the trace of rank 3, and raises KeyError if the set has none.

    Attributes:
        world_size: the number of ranks of the job, as the files say; otherwise the highest rank plus one.
        missing: the ranks without a trace.
        failed: the files that could not be read, each with the reason.
        left_out: files of another window or run, each with what it holds; and folders that were not read, because
            the traces come from another folder.
        guessed: ranks that neither a file nor its name gives: free numbers, in order of the file names.
    """

    def __init__(
        self,
        traces: Mapping[int, Trace],
        *,
        failed: Reasons | None = None,
        left_out: Reasons | None = None,
        guessed: Iterable[int] = (),
    ) -> None:
        self._traces = dict(sorted(traces.items()))
        self.failed = dict(failed or {})
        self.left_out = dict(left_out or {})
        self.guessed = list(guessed)
        said = [size for trace in traces.values() if (size := trace.world_size) and size <= MAX_RANKS]
        self.world_size = max([*said, max(traces, default=-1) + 1])
        self.missing = [rank for rank in range(self.world_size) if rank not in self._traces]

    def __getitem__(self, rank: int) -> Trace:
        if rank not in self._traces:
            ranks = ", ".join(map(str, self)) if len(self) < 20 else f"{min(self)} to {max(self)}"
            raise KeyError(f"no trace of rank {rank!r}; the set has the ranks {ranks}")
        return self._traces[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._traces)

    def __len__(self) -> int:
        return len(self._traces)

    def __repr__(self) -> str:
        counts = {"missing": len(self.missing), "failed": len(self.failed), "left out": len(self.left_out)}
        others = "".join(f", {count} {word}" for word, count in counts.items() if count)
        return f"<traces of {len(self)} of {self.world_size} ranks{others}>"

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a trace, in ascending order."""
        return list(self._traces)

    @cached_property
    def clocks(self) -> dict[int, Clock]:
        """The clock of each rank, as `align` compares them; may be set to the result for other collectives."""
        return align(self)

    @property
    def offsets_ns(self) -> dict[int, int]:
        """The offset from the times of each rank to times on the clock of the lowest rank, in ns."""
        return {rank: clock.offset_ns for rank, clock in self.clocks.items()}

    def start_ns(self, rank: int, kind: str = "gpu") -> Array:
        """Return the starts of the rows of a table, in ns on the clock of the lowest rank.

        Args:
            rank: a rank of the set.
            kind: the name of the table, such as "gpu" or "regions".

        Raises:
            KeyError: the set has no trace of the rank.
            AttributeError: a trace has no such table.
        """
        starts: Array = getattr(self[rank], kind).start_ns + self.clocks[rank].offset_ns
        return starts

    def map(self, change: Callable[[Trace], Trace]) -> TraceSet:
        """Return a set of what ``change`` returns for each trace."""
        traces = {rank: change(trace) for rank, trace in self.items()}
        return TraceSet(traces, failed=self.failed, left_out=self.left_out, guessed=self.guessed)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]


def read_ranks(paths: Paths, read: Callable[[Path], Trace], executor: Executor | None = None) -> TraceSet:
    """Read the traces of one job, one file per rank.

    The rank of a file comes from the file itself, otherwise from its name: ``rank0``, ``worker_3``, ``r1``,
    ``trace_0.json``. If ranks have several files, the set holds the last window that most ranks have, and
    `TraceSet.left_out` lists the other files.

    Args:
        paths: files, a pattern for `glob`, or a folder. In a folder, the files that end in one of
            `trace_files.SUFFIXES` are read; if it has none, the files of its subfolders if these are named after
            ranks, otherwise the files of its last subfolder that has some: by name, and of several runs the run
            that was written last. `TraceSet.left_out` lists the others.
        read: reads one file.
        executor: calls ``read``; by default, as many processes of this machine as it has cores.

    Raises:
        TraceError: no file is found, or none can be read as the trace of a rank.
    """
    files, left_out = find_trace_files(paths)
    results = _read_all(files, read, executor)
    failed = {path: result for path, result in results.items() if isinstance(result, str)}
    read_traces = []
    for path, result in results.items():
        if isinstance(result, Trace):
            result.path = path  # it was read by its absolute path
            read_traces.append(result)
    if not read_traces:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in list(failed.items())[:3])
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        raise TraceError(files[0].parent, f"none of {len(failed)} files can be read: {reasons}{more}")
    return set_of(read_traces, failed=failed, left_out=left_out)


def set_of(
    traces: Collection[Trace], *, failed: Reasons | None = None, left_out: Reasons | None = None
) -> TraceSet:
    """Return the set of these traces, of which some may be of other windows; see `read_ranks`.

    Args:
        traces: at least one trace, each with its path.
        failed: as in `TraceSet`.
        left_out: as in `TraceSet`; the traces of other windows, and merged traces, are added.

    Raises:
        TraceError: all of them are merged traces.
    """
    counts = {trace.path: len(about_ranks(trace.metadata)) for trace in traces}
    merged = {path: f"a merged trace of {count} ranks" for path, count in counts.items() if count}
    if merged and len(merged) == len(traces):
        raise TraceError(next(iter(merged)), "it is a merged trace; read_trace reads it as one trace")
    claims: dict[int, list[Trace]] = defaultdict(list)
    nameless = []
    for trace in traces:
        if trace.path in merged:
            continue
        has_rank = trace.rank is not None and 0 <= trace.rank < MAX_RANKS
        rank = trace.rank if has_rank else rank_from_name(trace.path)
        if rank is None:
            nameless.append(trace)
        else:
            claims[rank].append(trace)
    every = len(traces) - len(merged) + len(failed or {})
    guessed = [rank for rank in range(every) if rank not in claims][: len(nameless)]
    for rank, trace in zip(guessed, nameless, strict=True):
        claims[rank].append(trace)
    chosen, others = _one_window(claims)
    return TraceSet(chosen, failed=failed, left_out=others | merged | dict(left_out or {}), guessed=guessed)


def _read_all(
    files: list[Path], read: Callable[[Path], Trace], executor: Executor | None
) -> dict[Path, Trace | str]:
    """Return the trace of each file, or the reason that it cannot be read."""
    if executor is not None:
        futures = {path: executor.submit(read_or_reason, read, path.absolute()) for path in files}
        return {path: _result(future) for path, future in futures.items()}
    count = min(usable_cores(), len(files))
    if count > 1 and _is_importable(read):
        # If no process can be started, this one reads all files below.
        with suppress(OSError), Processes(count - 1) as processes:
            futures = {path: processes.submit(read_or_reason, read, path.absolute()) for path in files}
            # This process reads from the other end of the list until it meets the others.
            own = {path: read_or_reason(read, path) for path in reversed(files) if futures[path].cancel()}
            return {path: own.get(path) or _result(futures[path]) for path in files}
    return {path: read_or_reason(read, path) for path in files}


def _is_importable(read: Callable[[Path], Trace]) -> bool:
    """Return whether another process can import the function."""
    try:
        return b"__main__" not in pickle.dumps(read)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


def _result(future: Future[Trace | str]) -> Trace | str:
    try:
        return future.result()
    except Exception as error:  # raised by the executor, if a worker died
        return f"{type(error).__name__}: {error}"


def _one_window(claims: Mapping[int, list[Trace]]) -> tuple[dict[int, Trace], dict[Path, str]]:
    """Choose for each rank the trace of the last window that most ranks have; return the other files as well."""
    ranks_with = Counter(window for traces in claims.values() for window in {_window(trace) for trace in traces})
    last: dict[str, int] = {}
    for trace in chain.from_iterable(claims.values()):
        window, begin = _window(trace), _begin_ns(trace)
        last[window] = max(begin, last.get(window, begin))
    best = max(last, key=lambda window: (ranks_with[window], last[window]))
    chosen, left_out = {}, {}
    for rank, traces in claims.items():
        order = sorted(traces, key=lambda trace: (_window(trace) != best, abs(_begin_ns(trace) - last[best])))
        chosen[rank] = order[0]
        for trace in order[1:]:
            same = ", another run" if _window(trace) == _window(order[0]) else ""
            left_out[trace.path] = f"rank {rank}{process_from_name(trace.path)}, {_window(trace)}{same}"
    return chosen, left_out


def _window(trace: Trace) -> str:
    if not trace.steps:
        return "no steps"
    numbers = trace.steps.number
    return steps_text(int(numbers.min()), int(numbers.max()))


def _begin_ns(trace: Trace) -> int:
    tables = (trace.operators, trace.runtime, trace.gpu, trace.regions, trace.steps)
    return min((int(rows.start_ns[0]) for rows in tables if rows), default=0) + trace.epoch_ns
