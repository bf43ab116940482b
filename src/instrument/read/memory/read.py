"""`read_memory`: reads memory snapshots of torch and torch_npu; `chosen_snapshot` finds that of a run."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...base.errors import TraceError
from ...base.run_folder import entries_of, last_snapshots
from ...base.units import listed
from ..jobs.kinds import is_pickle, kind_of
from ..jobs.trace_files import but_pickles, rank_from_name
from ..tables.table import Array, Interner, Strings, Table, TooLargeError
from .pickled_data import DataReader, PickleError
from .snapshot import MemorySnapshot

_HOW = 'profile(memory="snapshot") or instrument run --memory snapshot records one'


class ChosenSnapshot(NamedTuple):
    """The snapshot to read.

    Attributes:
        path: the file.
        text: which one it is; empty if the caller named the file.
    """

    path: Path
    text: str


def chosen_snapshot(path: Path, rank: int | None = None) -> ChosenSnapshot:
    """Return the snapshot to read.

    Args:
        path: a file, or the folder of a run or of a window.
        rank: the rank, of several; None takes the lowest one. A file without a rank in its name is that of rank 0.

    Raises:
        ValueError: the rank has no snapshot there.
        TraceError: the folder has no memory snapshot.
    """
    if not path.is_dir():
        own = rank_from_name(path)
        if rank is not None and rank != (own or 0):
            accepted = (
                f"0 or left out, as the name of {path} has no rank"
                if own is None
                else f"{own}, as {path} is of this rank, or left out"
            )
            raise ValueError(f'"rank" must be {accepted}: {rank}')
        return ChosenSnapshot(path, "")
    files = {rank_from_name(file) or 0: file for file in last_snapshots(path)}
    if not files:
        outcomes = [entry["memory"] for entry in entries_of(path) if isinstance(entry.get("memory"), dict)]
        said = outcomes[-1].get("reason") if outcomes else None
        reason, others = said if isinstance(said, str) else None, but_pickles(path)
        why = f" of a run{others}" if others and not reason else f": {reason or _HOW}"
        raise TraceError(path, f"the folder has no memory snapshot{why}")
    ranks = sorted(files)
    if rank is not None and rank not in files:
        raise ValueError(f'"rank" must be one of {listed(ranks)}, which have a snapshot in {path}: {rank}')
    chosen = files[ranks[0] if rank is None else rank]
    if rank is not None or len(ranks) == 1:
        return ChosenSnapshot(chosen, f"{chosen} is shown")
    return ChosenSnapshot(chosen, f"{chosen} is shown; --rank takes another one of ranks {listed(ranks)}")


_NUMBERS = ("device", "address", "bytes", "stream", "time_ns", "stack", "device_free_bytes")
_TEXTS = ("action", "user_metadata", "compile_context")
_DEVICE_FREE = "device_free"  # what a failed allocation has instead of an address
_OWN = "instrument"  # what `instrument.profile` adds
_HOST = -1  # the device of pinned memory, which torch 2.14 can record as well
_MOST_DEVICES = 128  # torch numbers them by a signed byte
_MOST = 2**63  # the first number that a column cannot hold


def is_snapshot(path: Path) -> bool:
    """Return whether a file is a pickle: memory snapshots are, and no trace is.

    Raises:
        OSError: the file cannot be opened.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return is_pickle(file.read(2))


def read_memory(path: str | os.PathLike[str]) -> MemorySnapshot:
    """Read a memory snapshot, as ``torch.cuda.memory._dump_snapshot`` or `instrument.profile` writes it.

    A pickle of what ``torch.cuda.memory_snapshot()`` returns is read as one without a history.

    Nothing in the file is run. The file is read in pieces; a snapshot takes about four times its size in memory
    while it is read.

    Args:
        path: the file.

    Raises:
        TraceError: the file is not a snapshot, is damaged, or holds more than plain data; or it is a folder or
            another thing that is not a regular file, such as a pipe.
        OSError: the file cannot be opened.
    """
    path = Path(path)
    if path.is_dir():
        raise TraceError(path, "this is a folder; read_memory reads one file, such as rank0.TIME.memory.pickle")
    if path.exists() and not path.is_file():
        raise TraceError(path, "it is not a regular file, which read_memory reads; save the snapshot to one first")
    with path.open("rb") as file:
        if not is_pickle(head := file.peek(2)):
            kind, json = kind_of(path, head), head.startswith((b"{", b"["))
            trace = "it is JSON, such as a trace, which instrument diagnose reads" if json else ""
            more = f"; {said}" if (said := trace if kind.read else kind.text) else ""
            raise TraceError(path, f"it is not a pickle, the format in which torch writes memory snapshots{more}")
        events = _Events()
        try:
            data = DataReader(file, os.fstat(file.fileno()).st_size, events.take).read()
            return _snapshot(path, data, events)
        except (PickleError, TooLargeError, _FormatError, RecursionError) as error:
            raise TraceError(path, str(error)) from None


class _FormatError(Exception):
    """The data are not those of a snapshot; the message says what is wrong."""


class _Stacks:
    """Numbers the stacks and the frames."""

    def __init__(self, strings: Strings) -> None:
        self._strings = strings
        self._frames: Interner[tuple[int, int, int]] = Interner()
        self._numbers: Interner[tuple[int, ...]] = Interner()
        self._known: dict[int, tuple[int, Any]] = {}  # by the id of the list, which stays alive
        self._known_frames: dict[int, tuple[int, Any]] = {}
        assert self._numbers[()] == 0

    def number(self, frames: object) -> int:
        """Return the number of a list of frames."""
        if not frames or not isinstance(frames, (list, tuple)):
            return 0
        numbered = self._known.get(id(frames))
        if numbered is None:
            number = self._numbers[tuple(map(self._frame, frames))]
            numbered = self._known[id(frames)] = number, frames
        return numbered[0]

    def _frame(self, frame: Any) -> int:
        numbered = self._known_frames.get(id(frame))
        if numbered is None:
            if not isinstance(frame, Mapping):
                raise _FormatError("a frame of a stack is not a dictionary")
            name, file = (self._strings[_text(frame.get(key))] for key in ("name", "filename"))
            number = self._frames[name, file, _number(frame.get("line"), 0)]
            numbered = self._known_frames[id(frame)] = number, frame
        return numbered[0]

    def stacks(self) -> list[tuple[int, ...]]:
        """Return the rows of the frames of each stack."""
        return list(self._numbers)

    def table(self, strings: list[str]) -> Table:
        """Return the frames."""
        name, file, line = np.array(list(self._frames), np.int64).reshape(-1, 3).T
        return Table({"name": name.astype(np.int32), "file": file.astype(np.int32), "line": line}, strings)


class _Events:
    """The events of all devices, in the order of the file."""

    def __init__(self) -> None:
        self.strings = Strings()
        self.stacks = _Stacks(self.strings)
        self._columns = {name: array("q") for name in (*_NUMBERS, *_TEXTS)}

    def take(self, item: dict[Any, Any]) -> None:
        """Move an event into the columns, and leave its dictionary empty; leave other dictionaries alone."""
        if "action" not in item or ("addr" not in item and _DEVICE_FREE not in item):
            return
        columns = self._columns
        columns["device"].append(-1)
        columns["address"].append(_address(item.get("addr")))
        columns["device_free_bytes"].append(_number(item.get(_DEVICE_FREE)))
        columns["bytes"].append(_number(item.get("size"), 0))
        columns["stream"].append(_number(item.get("stream")))
        columns["time_ns"].append(_time_ns(item.get("time_us")))
        columns["stack"].append(self.stacks.number(item.get("frames")))
        for name in _TEXTS:
            columns[name].append(self.strings[_text(item.get(name))])
        item.clear()

    def table(self, devices: Sequence[int], counts: Sequence[int], strings: list[str]) -> Table:
        """Return the events of the GPUs.

        Args:
            devices: the devices, in the order of the file; `_HOST` for the host, whose events are left out.
            counts: how many events each of these has.
            strings: the texts.
        """
        if sum(counts) != len(self._columns["device"]):
            raise _FormatError("its events are not those of its devices")
        columns: dict[str, Array] = {name: np.asarray(values, np.int64) for name, values in self._columns.items()}
        columns["device"] = device = np.repeat(np.array(devices, np.int64), counts)
        table = Table(columns, strings)
        return table.where(device != _HOST) if _HOST in devices else table


def _snapshot(path: Path, data: Any, events: _Events) -> MemorySnapshot:
    if isinstance(data, list) and data and all(isinstance(each, dict) and "blocks" in each for each in data):
        data = {"segments": data}  # of torch.cuda.memory_snapshot()
    if not isinstance(data, dict) or not isinstance(data.get("segments"), (list, tuple)):
        raise _FormatError("it is not a memory snapshot: it has no segments")
    segments = list(_mappings(data["segments"], "segments"))
    settings = data.get("allocator_settings")
    columns = {
        "segments": _segments(segments, events),
        "blocks": _blocks(segments, events),
        "annotations": _annotations(data.get("external_annotations", ()), events.strings),
    }
    strings = list(events.strings)
    tables = {name: Table(each, strings) for name, each in columns.items()}
    recorded = events.table(*_devices(data), strings)
    blocks = tables["blocks"]
    _check_sizes(recorded.bytes, tables["segments"].bytes, blocks.bytes, blocks.requested_bytes)
    return MemorySnapshot(
        path,
        recorded,
        **tables,
        frames=events.stacks.table(strings),
        stacks=events.stacks.stacks(),
        settings=settings if isinstance(settings, dict) else {},
        free_bytes=_free_bytes(data.get(_OWN)),
    )


def _segments(segments: Sequence[Mapping[str, Any]], events: _Events) -> dict[str, Array]:
    rows = [
        (
            _device(each.get("device", 0)),
            _address(each.get("address")),
            _number(each.get("total_size"), 0),
            _number(each.get("active_size"), 0),
            _number(each.get("stream")),
            events.strings[_text(each.get("segment_type"))],
            int(bool(each.get("is_expandable"))),
            events.stacks.number(each.get("frames")),
        )
        for each in segments
    ]
    return _table(("device", "address", "bytes", "active_bytes", "stream", "kind", "expandable", "stack"), rows)


def _blocks(segments: Sequence[Mapping[str, Any]], events: _Events) -> dict[str, Array]:
    rows = [
        (
            row,
            address,
            _number(each.get("size"), 0),
            _number(each.get("requested_size"), 0),
            events.strings[_text(each.get("state"))],
            events.stacks.number(_frames_of_block(each)),
        )
        for row, address, each in _placed_blocks(segments)
    ]
    return _table(("segment", "address", "bytes", "requested_bytes", "state", "stack"), rows)


def _annotations(marks: object, code: Strings) -> dict[str, Array]:
    name = "external_annotations"
    rows = [
        (
            code[_text(each.get("name"))],
            code[_text(each.get("stage"))],
            _number(each.get("device"), 0),
            _time_ns(each.get("time_us")),
            code[_text(each.get("source"))],
            _number(each.get("range")),
            _number(each.get("thread")),
        )
        for each in _mappings(_items(marks, name), name)
    ]
    return _table(("name", "stage", "device", "time_ns", "source", "range", "thread"), rows)


def _check_sizes(*columns: Array) -> None:
    for sizes in columns:
        if len(sizes) and (sizes.min() < 0 or sizes.astype(np.float64).sum() >= _MOST):
            raise _FormatError("a size is negative, or they add up to more than a number of 64 bits holds")


def _free_bytes(own: object) -> dict[int, int]:
    """Return what the driver had left of a GPU, which snapshots of `instrument.profile` say of one."""
    free = _number(own.get("free_bytes")) if isinstance(own, dict) else -1
    return {_number(own.get("device")): free} if isinstance(own, dict) and free >= 0 else {}


def _devices(data: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return the devices whose events the file has, in its order, and how many it has of each."""
    devices: list[int] = []
    counts: list[int] = []
    for key, value in data.items():
        if key == "device_traces":
            counts += [len(_items(events, key)) for events in _items(value, key)]
            devices += map(_device, range(len(value)))
        elif key == "host_traces":
            counts.append(len(_items(value, key)))
            devices.append(_HOST)
    return devices, counts


def _placed_blocks(segments: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """Yield the row of the segment, the address and the data of each block; torch 2.0 writes no addresses."""
    by_segment = [_items(segment.get("blocks", ()), "blocks") for segment in segments]
    blocks = _mappings(chain.from_iterable(by_segment), "blocks")
    for row, (segment, own) in enumerate(zip(segments, by_segment, strict=True)):
        address = segment.get("address")
        for block in islice(blocks, len(own)):
            address = block.get("address", address)
            yield row, _address(address), block
            address = address + _number(block.get("size"), 0) if isinstance(address, int) else None


def _frames_of_block(block: Mapping[str, Any]) -> object:
    """Return the frames of a block; torch 2.0 has them in the first entry of its history, the newest one."""
    history = block.get("history")
    if "frames" in block or not isinstance(history, list) or not history or not isinstance(history[0], dict):
        return block.get("frames")
    return history[0].get("frames")


def _table(names: Sequence[str], rows: Sequence[tuple[int, ...]]) -> dict[str, Array]:
    return dict(zip(names, np.array(rows, np.int64).reshape(-1, len(names)).T, strict=True))


def _items(value: object, name: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise _FormatError(f'its "{name}" is not a list')
    return value


def _mappings(items: Iterable[object], name: str) -> Iterator[Mapping[str, Any]]:
    """Yield dictionaries, each of which is there once: a few bytes can name one a million times."""
    seen: set[int] = set()
    for item in items:
        if not isinstance(item, dict):
            raise _FormatError(f'its "{name}" has an entry that is not a dictionary')
        if id(item) in seen:
            raise _FormatError(f'its "{name}" has the same entry twice')
        seen.add(id(item))
        yield item


def _device(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < _MOST_DEVICES:
        raise _FormatError(f"its devices are not numbered from 0 to {_MOST_DEVICES - 1}")
    return value


def _number(value: object, otherwise: int = -1) -> int:
    """Return an integer that fits into a column."""
    return value if isinstance(value, int) and -_MOST <= value < _MOST else otherwise


def _address(value: object) -> int:
    """Return an address as a signed number of 64 bits: those from 2**63 on, as of Intel's GPUs, are negative."""
    return _number(value - 2 * _MOST if isinstance(value, int) and _MOST <= value < 2 * _MOST else value)


def _time_ns(time_us: object) -> int:
    """Return a time in ns since the epoch; -1 if it is not known."""
    return time_us * 1000 if isinstance(time_us, int) and 0 <= time_us < _MOST // 1000 else -1


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
