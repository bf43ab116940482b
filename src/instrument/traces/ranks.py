"""The traces of the ranks of one job."""

from __future__ import annotations

import os
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import cached_property
from itertools import chain
from pathlib import Path

from ..errors import TraceError
from .align import Clock, align
from .processes import Processes
from .table import Array
from .trace import Trace
from .trace_files import find, process_of, rank_from_name
from .worker import attempt

MOST_RANKS = 1_000_000
"""A file that claims a higher rank or number of ranks is not believed."""


class TraceSet(Mapping[int, Trace]):
    """Traces by rank, in ascending order: ``traces[3]``, ``for rank, trace in traces.items()``.

    Attributes:
        world_size: the number of ranks of the job, as the files say; else one more than the highest.
        missing: the ranks that there is no trace of.
        failed: files that could not be read, and why.
        left_out: files that were read and belong to another window or run than the traces, and what they hold; and
            folders that were not read, as the traces are those of another one.
        guessed: ranks that neither a file nor its name tells: numbers that were free, in order of the names.
    """

    def __init__(
        self,
        traces: Mapping[int, Trace],
        *,
        failed: Mapping[Path, str] | None = None,
        left_out: Mapping[Path, str] | None = None,
        guessed: Iterable[int] = (),
    ) -> None:
        self._traces = dict(sorted(traces.items()))
        self.failed = dict(failed or {})
        self.left_out = dict(left_out or {})
        self.guessed = list(guessed)
        said = [size for trace in traces.values() if (size := trace.world_size) and size <= MOST_RANKS]
        self.world_size = max([*said, max(traces, default=-1) + 1])
        self.missing = [rank for rank in range(self.world_size) if rank not in self._traces]

    def __getitem__(self, rank: int) -> Trace:
        if rank not in self._traces:
            raise KeyError(f"there is no trace of rank {rank!r}; there are those of {_short(self.ranks)}")
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
        """Those that there is a trace of."""
        return list(self._traces)

    @cached_property
    def clocks(self) -> dict[int, Clock]:
        """How the clocks compare, by `align`; may be set to what that returns for other collectives."""
        return align(self)

    @property
    def offsets_ns(self) -> dict[int, int]:
        """What to add to times of each rank to have them on the clock of the lowest one."""
        return {rank: clock.offset_ns for rank, clock in self.clocks.items()}

    def start_ns(self, rank: int, kind: str = "gpu") -> Array:
        """Return the starts of a table of a rank, on the clock of the lowest rank."""
        starts: Array = getattr(self[rank], kind).start_ns + self.clocks[rank].offset_ns
        return starts


def read_ranks(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    read: Callable[[Path], Trace],
    executor: Executor | None = None,
) -> TraceSet:
    """Read the traces of one job, one file a rank.

    The rank of a file is what it says itself, else what its name says: ``rank0``, ``worker_3``, ``r1``,
    ``trace_0.json``. Where ranks have several files, the set holds that window which most ranks have, of those the
    last, and `TraceSet.left_out` names the files of the others.

    Args:
        paths: files, a pattern for `glob`, or a folder. Of a folder the files that end in one of `find.SUFFIXES`
            are taken; without any, those of its subfolders if they are named after ranks, else those of
            the last subfolder that has some, and `TraceSet.left_out` names the others.
        read: reads one file.
        executor: calls ``read``; by default as many processes of this machine as there are cores.

    Raises:
        TraceError: there is no file, or none that can be read.
    """
    files, others = find(paths)
    results = _read_all(files, read, executor)
    failed = {path: result for path, result in results.items() if isinstance(result, str)}
    claims: dict[int, list[Trace]] = defaultdict(list)
    nameless = []
    for path, result in results.items():
        if isinstance(result, Trace):
            result.path = path  # not the absolute one that it was read by
            rank = result.rank if _plausible(result.rank) else rank_from_name(path)
            if rank is None:
                nameless.append(result)
            else:
                claims[rank].append(result)
    guessed = [rank for rank in range(len(files)) if rank not in claims][: len(nameless)]
    for rank, trace in zip(guessed, nameless, strict=True):
        claims[rank].append(trace)
    if not claims:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in list(failed.items())[:3])
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        raise TraceError(files[0].parent, f"none of {len(failed)} files can be read: {reasons}{more}")
    traces, left_out = _one_window(claims)
    left_out |= dict.fromkeys(others, "only the last of these folders is read")
    return TraceSet(traces, failed=failed, left_out=left_out, guessed=guessed)


def _short(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) < 20 else f"{ranks[0]} to {ranks[-1]}"


def _plausible(rank: int | None) -> bool:
    return rank is not None and 0 <= rank < MOST_RANKS


def _read_all(
    files: list[Path], read: Callable[[Path], Trace], executor: Executor | None
) -> dict[Path, Trace | str]:
    """What each file holds, or the reason that it cannot be read."""
    if executor is not None:
        futures = {path: executor.submit(attempt, read, path.absolute()) for path in files}
        return {path: _result(future) for path, future in futures.items()}
    count = min(_cores(), len(files))
    if count > 1 and _travels(read):
        with suppress(OSError), Processes(count - 1) as processes:  # where none can be started, all is done here
            futures = {path: processes.submit(attempt, read, path.absolute()) for path in files}
            # This process, which need not be started, reads from the other end until they meet.
            here = {path: attempt(read, path) for path in reversed(files) if futures[path].cancel()}
            return {path: here.get(path) or _result(futures[path]) for path in files}
    return {path: attempt(read, path) for path in files}


def _travels(read: Callable[[Path], Trace]) -> bool:
    """Whether another process can import it."""
    try:
        return b"__main__" not in pickle.dumps(read)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


def _result(future: Future[Trace | str]) -> Trace | str:
    try:
        return future.result()
    except Exception as error:  # of the executor: a worker that died
        return f"{type(error).__name__}: {error}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _one_window(claims: Mapping[int, list[Trace]]) -> tuple[dict[int, Trace], dict[Path, str]]:
    """Of each rank the trace of that window which most of them have, of those the last."""
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
            left_out[trace.path] = f"rank {rank}{process_of(trace.path)}, {_window(trace)}{same}"
    return chosen, left_out


def _window(trace: Trace) -> str:
    if not trace.steps:
        return "no steps"
    numbers = trace.steps.number
    return f"steps {numbers.min()}-{numbers.max()}"


def _begin_ns(trace: Trace) -> int:
    tables = (trace.operators, trace.runtime, trace.gpu, trace.regions, trace.steps)
    return min((int(rows.start_ns[0]) for rows in tables if rows), default=0) + trace.epoch_ns
