"""`merge_traces`: writes one trace of several ranks, on one clock, that Perfetto and chrome://tracing open."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..errors import TraceError
from ..part_file import part_file, writing
from ..run_folder import last_window
from ..trace_marks import MERGE
from .align import Clock, align
from .insert_events import check_out, open_copy
from .rank_events import RankEvents, RankFile, read_rank_file
from .ranks import TraceSet, read_ranks
from .read import check_ranks_path
from .slim_note import note_losses
from .trace import ReadLosses
from .trace_files import MERGED_MARK, find_trace_files, rank_from_name

StrPath = str | os.PathLike[str]

_FIRST_PROCESS = 1000  # larger than any number of a GPU: some events have the process in its place
_BLOCK = 1 << 20


@dataclass(frozen=True)
class MergedTrace:
    """A merged trace, and what is in it.

    Attributes:
        path: the merged trace.
        bytes: its size.
        events: the number of its events, without names of processes and threads.
        clocks: by rank, the offset that was added to its times, what it comes from and how sure it is.
        files: by rank, the file that was read.
        missing: the ranks of the job that are neither merged nor left out by ``ranks``.
        failed: the files that could not be read, each with the reason.
        left_out: the files of other windows and the other folders, each with the reason.
        damaged: what could not be read of the files of ranks, by rank.
    """

    path: Path
    bytes: int
    events: int
    clocks: Mapping[int, Clock]
    files: Mapping[int, Path]
    missing: tuple[int, ...]
    failed: Mapping[Path, str]
    left_out: Mapping[Path, str]
    damaged: Mapping[int, ReadLosses]


def merge_traces(
    paths: StrPath | Iterable[StrPath],
    out: StrPath | None = None,
    *,
    ranks: Iterable[int] | None = None,
    steps: tuple[int, int] | None = None,
    skip_unreadable: bool = False,
) -> MergedTrace:
    """Write one trace of several ranks, on one clock, that Perfetto and chrome://tracing open.

    Each process of a rank gets an id of its own and a name such as "rank 3: GPU 0", in order of the ranks. Ids
    that link events are followed by the digits of the rank. Times are those of the lowest rank, by the offsets of
    `TraceSet.clocks`; all else stays as it is. An existing file is replaced once the new one is complete.

    Args:
        paths: the folder of a run, whose last window is taken; a folder or pattern of files; or several files.
        out: the file to write, gzipped if its name ends in ".gz"; by default the name of the folder of the files
            with ".merged.json.gz", beside that folder.
        ranks: the ranks to merge; None takes all that have a trace.
        steps: the first and the last step to merge, with what runs meanwhile, until their work ends; of the folder
            of a run, the last window with these steps is taken. None takes all steps.
        skip_unreadable: whether the other ranks are merged if files cannot be read.

    Returns:
        The merged trace.

    Raises:
        ValueError: a rank or a step is not in the traces, the ranks have no step in common, or ``out`` is one of
            the traces or not a file.
        TraceError: no file is found; or one cannot be read, comes from another profiler than torch.profiler or is
            a merged trace, unless the others are merged without it.
        OSError: a file cannot be read or written.
    """
    chosen = None if ranks is None else frozenset(ranks)
    if chosen is not None and not chosen:
        raise ValueError('"ranks" must hold at least one rank: it is empty')
    if steps is not None and not 0 <= steps[0] <= steps[1]:
        raise ValueError(f'"steps" must be the first and the last step, such as (10, 12): {steps!r}')
    found = _read(paths, chosen, steps, skip_unreadable=skip_unreadable)
    files = {rank: file for rank, file in found.items() if isinstance(file, RankFile)}
    if chosen is not None:
        files = {rank: file for rank, file in files.items() if rank in chosen}
    _check_steps(files, steps)
    target = _default_out([file.path for file in files.values()]) if out is None else Path(out)
    for file in files.values():
        check_out(file.path, target)
    clocks = align(files)
    with part_file(target) as part, writing(target.parent):
        merging = _Merging(files, clocks)
        with open_copy(part, packed=target.suffix == ".gz") as output:
            output.writelines(_in_blocks(merging.texts()))
        part.replace(target)
    return MergedTrace(
        target,
        target.stat().st_size,
        merging.events,
        clocks,
        {rank: file.path for rank, file in files.items()},
        tuple(found.missing) if chosen is None else (),
        found.failed,
        found.left_out,
        {rank: file.lost for rank, file in files.items() if file.lost},
    )


def _read(
    paths: StrPath | Iterable[StrPath],
    chosen: frozenset[int] | None,
    steps: tuple[int, int] | None,
    *,
    skip_unreadable: bool,
) -> TraceSet:
    """Read the files of the chosen ranks, one after the other in each process; keep little of each.

    Raises:
        ValueError: a chosen rank has no trace.
        TraceError, OSError: as `merge_traces`.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = last_window(os.fspath(paths), steps)
        if not Path(paths).is_file():
            check_ranks_path(paths)
    files, left_out = find_trace_files(paths)
    found = _read_chosen(files, chosen, partial(read_rank_file, steps=steps))
    found.left_out |= left_out
    if chosen is not None:
        found.failed = {path: why for path, why in found.failed.items() if rank_from_name(path) in {None, *chosen}}
    if found.failed and not skip_unreadable:
        path, reason = next(iter(found.failed.items()))
        others = "".join(f"; {other}: {why}" for other, why in list(found.failed.items())[1:])
        raise TraceError(path, f"{reason}{others}; skip_unreadable=True merges the other ranks")
    if unknown := (chosen or frozenset()) - found.keys() - set(map(rank_from_name, found.failed)):
        known = ", ".join(map(str, found))
        raise ValueError(f'"ranks" must be among those with a trace, {known}: {sorted(unknown, key=str)}')
    return found


def _read_chosen(files: list[Path], chosen: frozenset[int] | None, read: Callable[[Path], RankFile]) -> TraceSet:
    """Read the files that may be of chosen ranks by their names, or all if the ranks in the files are others."""
    named = {path: rank_from_name(path) for path in files}
    if chosen is not None and chosen <= set(named.values()):
        found = read_ranks([path for path, rank in named.items() if rank in {None, *chosen}], read)
        if chosen <= found.keys() or found.failed:
            return found
    return read_ranks(files, read)


def _check_steps(files: Mapping[int, RankFile], steps: tuple[int, int] | None) -> None:
    """Check that the ranks are of one window, and have the chosen steps.

    Raises:
        ValueError: they have no step in common, or not these steps.
    """
    numbers = {rank: set(file.steps.number.tolist()) for rank, file in files.items()}
    spans = {rank: f"{min(own)}-{max(own)}" if own else "none" for rank, own in numbers.items()}
    if steps is not None:
        lacking = [f"rank {rank} has {spans[rank]}" for rank, file in files.items() if file.kept_ns is None]
        if lacking:
            raise ValueError(f'"steps" must be recorded on all ranks: {steps[0]}-{steps[1]}; {", ".join(lacking)}')
    marked = [own for own in numbers.values() if own]
    if marked and not set.intersection(*marked):
        each = ", ".join(f"rank {rank} has steps {span}" for rank, span in spans.items())
        raise ValueError(f'"paths" must be of one window, with steps that all ranks have: {each}')


def _default_out(files: list[Path]) -> Path:
    folder = Path(os.path.commonpath([path.absolute().parent for path in files]))
    return folder.with_name(f"{folder.name}.merged.json.gz")


@dataclass
class _Merging:
    """Writes a merged trace.

    Attributes:
        files: the files by rank.
        clocks: the clocks by rank.
        events: the number of events that were written.
    """

    files: Mapping[int, RankFile]
    clocks: Mapping[int, Clock]
    events: int = 0
    _notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    _lanes: list[list[Any]] = field(default_factory=list)

    def texts(self) -> Iterator[bytes]:
        """Yield the JSON, rank by rank; each file is read again."""
        lowest = self.files[min(self.files)]
        about: dict[str, Any] = {"schemaVersion": 1, MERGED_MARK: True, "displayTimeUnit": "ms"}
        if lowest.epoch_ns:
            about["baseTimeNanoseconds"] = lowest.epoch_ns
        yield msgspec.json.encode(about)[:-1] + b',"traceEvents":['
        process, separator = _FIRST_PROCESS, b"\n"
        for rank, file in self.files.items():
            events = RankEvents(
                rank,
                file,
                self.clocks[rank].offset_ns,
                first_process=process,
                digits=len(str(max(self.files))),
            )
            for event in events:
                yield separator + event
                separator = b",\n"
            process += len(events.processes)
            self.events += events.events
            self._lanes += events.lanes()
            self._notes[str(rank)] = self._note(rank, events)
        yield b"\n]," + msgspec.json.encode({MERGE: self._whole_note()})[1:] + b"\n"

    def _note(self, rank: int, events: RankEvents) -> dict[str, Any]:
        """Return what the metadata says of a rank."""
        file = self.files[rank]
        return {
            "file": file.path.name,
            "clock": asdict(self.clocks[rank]),
            "processes": {str(new): before for new, before in events.process_ids().items()},
            "metadata": file.metadata,
        }

    def _whole_note(self) -> dict[str, Any]:
        lost = ReadLosses()
        for file in self.files.values():
            lost.events += file.lost.events
            lost.bytes += file.lost.bytes
            lost.repaired += file.lost.repaired
            for reason, count in file.lost.reasons.items():
                lost.reasons[reason] = lost.reasons.get(reason, 0) + count
        return {"ranks": self._notes, "lanes": self._lanes} | ({"lost": note_losses(lost)} if lost else {})


def _in_blocks(texts: Iterable[bytes]) -> Iterator[bytes]:
    """Join short texts: gzip takes a call for each."""
    held, size = [], 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size >= _BLOCK:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)
