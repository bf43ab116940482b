"""`WindowMemory`: the allocator's history of one window, from its first recorded step to the snapshot's file."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import get_ident
from typing import Any, BinaryIO, NamedTuple

from ...base import log
from ...base.compat import gpu, memory_history
from ...base.errors import CaptureError
from ...base.files import make_folder, part_file, publish
from ...base.guard import guard
from ...base.interrupts import is_interrupt
from ...base.patch import Patch, apply, undo
from ...base.run_folder import MEMORY_SNAPSHOT
from ...base.trace_marks import STEP_PREFIX
from ..regions import dispatch
from ..regions.region import Region
from .options import MemoryHistory

FEATURE = "recording GPU memory"
_NO_CUDA = "there is nothing to record: this build of torch has no allocator of CUDA or ROCm"
_NO_GPU = "there is nothing to record: the program did not use a GPU of CUDA or ROCm in the window"
_BEFORE = "a history of GPU memory is on already, of the program or of another window, and goes on undisturbed"
_DURING = "the program turned its own history of GPU memory on or off in the window, so this one gave way"
_GIVEN_UP = "the window was given up"
_logged: set[str] = set()  # reasons, each of which is logged once per process


class WindowMemory:
    """Records the history from `start` to `stop`, or to the first out-of-memory error, and has it written.

    Args:
        options: how much is recorded.
        folder: the folder of the window.
        prefix: how the name of the file begins; the time follows.
        skipped: why this window records none; None if it does.

    Attributes:
        dump: writes the snapshot; None before it was taken, and without one.
        stall_s: how long it held the program's threads so far.
        stopped_at: when it was taken, by `time.monotonic`; None before.
    """

    def __init__(self, options: MemoryHistory, folder: Path, prefix: str, skipped: str | None = None) -> None:
        self._options = options
        self._folder = folder
        self._prefix = prefix
        self._process = os.getpid()
        self._reason = skipped
        self._failed = False
        self._started = False
        self._on = False
        self._regions = RegionLog()
        self._region_count = 0
        self._switches: list[Patch] = []
        self._cancel: Callable[[], None] = lambda: None
        self._failed_allocation: AllocationFailure | None = None
        # Not a Lock, as a signal handler may end the window on the thread that takes the snapshot.
        self._taking = threading.RLock()
        self._taken = False
        self.dump: SnapshotDump | None = None
        self.stall_s = 0.0
        self.stopped_at: float | None = None

    def start(self) -> None:
        """Turn the history on: now or, if the program has not used CUDA yet, as soon as it does."""
        self._started = True
        if self._reason is not None:
            return
        with self._stall():
            if not (gpu.built_for_cuda() and memory_history.is_supported()):
                self._set_aside(_NO_CUDA)
                return
            self._reason = _NO_GPU
            self._cancel = gpu.when_initialized(self._turn_on)

    def _turn_on(self) -> None:
        with self._stall():
            if memory_history.is_on():
                self._set_aside(_BEFORE)
                return
            self._on = True  # first, for an interrupt
            self._reason = None
            memory_history.turn_on(self._options.stacks, self._options.entries)
            apply([Patch(owner, name, self._watched) for owner, name in memory_history.switches()], self._switches)
            out_of_memory.follow(self._on_out_of_memory)
            dispatch.active.add(self._regions)

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function for ``original``, by which the program turns its own history on or off."""

        def around(switch: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if self._on:
                self._set_aside(_DURING)
                self._turn_off()  # torch forgets its events, so that those of the program begin here
            return switch(*args, **kwargs)

        return guard.around(FEATURE, original, around)

    def step(self, number: int | None) -> None:
        """Note that step ``number`` begins; with None, that the last one ends."""
        if self._on:
            self._regions.step(number)
            if self.dump is not None:  # taken at an out-of-memory error on any thread; torch turns off on this one
                self.discard()

    def stop(self) -> None:
        """Turn the history off as it was before, and begin to write it."""
        self._cancel()
        if self._reason == _NO_GPU:
            self._set_aside(_NO_GPU)
        try:
            if self._on and self._process == os.getpid():  # a child may have a lock that nobody releases
                with self._taking:  # another thread may be taking it at an out-of-memory error
                    self._take()
        finally:
            self.discard()

    def discard(self) -> None:
        """Turn the history off; what was taken at an out-of-memory error stays. May be called again."""
        self._cancel()
        if self._on and self.dump is None:
            self._reason = _GIVEN_UP
        with self._stall():
            self._turn_off()

    def _turn_off(self) -> None:
        """Undo `_turn_on`, unless the program turned the history off itself; may be called again."""
        if not self._on:
            return
        out_of_memory.unfollow(self._on_out_of_memory)
        dispatch.active.remove(self._regions)
        undo(self._switches)
        self._on = False  # now, as another patch may still lead to `_watched`
        try:
            if self._process == os.getpid() and memory_history.is_on():
                memory_history.turn_off()
        except BaseException:
            self._on = True
            raise
        self._regions = RegionLog()  # the other one may be large

    def _on_out_of_memory(self, failed: AllocationFailure) -> None:
        if self._on and self._taking.acquire(blocking=False):  # one snapshot is enough
            try:
                self._take(failed)
            finally:
                self._taking.release()

    def _take(self, failed: AllocationFailure | None = None) -> None:
        """Take the snapshot, unless it was taken; the thread must have `_taking`."""
        if not self._on or self._taken:
            return
        self._taken = True
        with self._stall():
            self._failed_allocation = failed
            if memory_history.is_on():
                self._begin_dump()
            else:
                self._set_aside(_DURING)

    def _begin_dump(self) -> None:
        snapshot, device = memory_history.snapshot()
        regions = self._regions.annotations(device)
        snapshot["external_annotations"] = [*snapshot.get("external_annotations", ()), *regions]
        snapshot["instrument"] = {"device": device, "free_bytes": self._free_bytes(device)}
        path = self._folder / f"{self._prefix}.{time.time_ns()}{MEMORY_SNAPSHOT}"
        reason = self._lacks(snapshot, len(regions))
        dump = SnapshotDump(snapshot, path, self._options.size_bytes)
        self.stopped_at = time.monotonic()
        if self._on:  # a signal handler may have ended the window, whose line then says that it has none
            self.dump, self._reason, self._region_count = dump, reason, len(regions)
            dump.start()

    @guard.contained("the memory that is left")
    def _free_bytes(self, device: int) -> int:
        return memory_history.free_bytes(device)

    def _lacks(self, snapshot: dict[str, Any], regions: int) -> str | None:
        """Return what is left out of a snapshot before it is written."""
        histories = [events for events in snapshot.get("device_traces", ()) if events]
        reasons = []
        if any(len(events) >= self._options.entries for events in histories):
            reasons.append(f"only the newest {self._options.entries:,} events of a GPU were kept")
        if regions >= MOST:
            reasons.append(f"only the newest {MOST:,} begins and ends of regions were kept")
        if not all("time_us" in events[0] for events in histories):
            reasons.append("this version of torch does not say when an event was, so that none is in a region")
        return "; ".join(reasons) or None

    def _set_aside(self, reason: str) -> None:
        """Note that there will be no snapshot for ``reason``, and log that, once for each."""
        self._reason = reason
        if reason not in _logged:
            _logged.add(reason)
            log.warning(f'memory="snapshot": {reason}')

    @contextmanager
    def _stall(self) -> Iterator[None]:
        """Time the body, and contain its errors, which the manifest then has."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            if not is_interrupt(error):
                self._failed, self._reason = True, f"{type(error).__name__}: {error}".removesuffix(": ")
                with suppress(Exception):  # a second failure says no more
                    self._turn_off()
            guard.failed(FEATURE, error)
        finally:
            self.stall_s += time.perf_counter() - began

    def entry(self) -> dict[str, Any] | None:
        """Return what the manifest has about it: the key ``memory`` of the window; None if it never started.

        ``status`` is "recorded", "failed", "not recorded" or, before the line is written, "writing". ``reason``
        says why, or what was left out; null if nothing was. ``file`` is relative to the folder of the run, and
        ``bytes`` its size; ``entries`` is the number of events, and ``regions`` that of begins and ends of regions
        in it; ``stacks`` as in `memory_history`. ``stall_s`` is how long the recording blocked the loop, a part of
        ``cost``, and ``write_s`` how long the file took on a thread. ``out_of_memory`` is the allocation at whose
        failure the snapshot was taken, as `AllocationFailure`; else null.
        """
        if not self._started:
            return None
        dump = self.dump
        status = "failed" if self._failed else "not recorded"
        reason = self._reason
        if dump is not None:
            status = "failed" if dump.failure else "recorded" if dump.done else "writing"
            left_out = f'the oldest {dump.dropped:,} events are left out: "size" is {self._options.size}'
            reasons = (reason, left_out if dump.dropped else None, dump.failure)
            reason = "; ".join(filter(None, reasons)) or None
        failed = self._failed_allocation
        return {
            "status": status,
            "reason": reason,
            "file": f"{self._folder.name}/{dump.path.name}" if dump else None,
            "bytes": dump.bytes if dump else None,
            "entries": dump.entries if dump else None,
            "regions": self._region_count if dump else None,
            "stacks": self._options.stacks,
            "stall_s": self.stall_s,
            "write_s": dump.seconds if dump and dump.done else None,
            "out_of_memory": failed._asdict() if failed else None,
        }


def too_early(options: MemoryHistory, last: WindowMemory | None) -> str | None:
    """Return why a window that nobody requested records no history, in words; None if it does.

    A snapshot blocks the loop, so there is one at the earliest after `MemoryHistory.every`, or after 100 times as
    long as the last one blocked it.
    """
    if last is None or last.stopped_at is None:
        return None
    least = options.every_s
    wait_s = 100 * last.stall_s if least is None else least
    passed_s = time.monotonic() - last.stopped_at
    if passed_s >= wait_s:
        return None
    why = f"held the loop for {last.stall_s:.3g} s" if least is None else f"is {passed_s:.0f} s old"
    return f'the last snapshot {why}, so that the next one is due {wait_s:.3g} s after it ("every")'


MOST = 100_000  # begins and ends that are kept, the newest ones: 10 MB of a snapshot
Handle = tuple[str, int]  # the name of a range, and its number


class RegionLog:
    """An emitter that keeps begins and ends of regions; `dispatch.active.add` activates it."""

    name = "memory"

    def __init__(self) -> None:
        self._entries: deque[tuple[int, str, str, int, int]] = deque(maxlen=MOST)
        self._numbers = count()
        self._step: Handle | None = None

    def push(self, region: Region) -> Handle:
        """Note the begin of a region."""
        return self._begin(region.name)

    def pop(self, handle: Handle) -> None:
        """Note its end, on whichever thread."""
        self._entries.append((time.time_ns(), "END", handle[0], get_ident(), handle[1]))

    start = push
    end = pop

    def mark(self, region: Region) -> None:
        """Note an instant, as a range without a length."""
        self.pop(self.push(region))

    def step(self, number: int | None) -> None:
        """Note that step ``number`` begins, and the one before it ends; with None, only the latter."""
        ended, self._step = self._step, None
        if ended is not None:
            self.pop(ended)
        if number is not None:
            self._step = self._begin(f"{STEP_PREFIX}{number}")

    def _begin(self, name: str) -> Handle:
        handle = name, next(self._numbers)
        self._entries.append((time.time_ns(), "START", name, get_ident(), handle[1]))
        return handle

    def annotations(self, device: int) -> list[dict[str, Any]]:
        """Return the entries as torch has them in the ``external_annotations`` of a snapshot, and a little more.

        torch's own have ``name``, ``stage`` ("START" or "END"), ``device`` and ``time_us``, in us since the epoch.
        These also have ``source`` ("instrument"), ``range``, the number that a begin and its end share, and
        ``thread``, which `threading.get_ident` returned there.
        """
        return [
            {
                "name": name, "stage": stage, "device": device, "time_us": time_ns // 1000,
                "source": "instrument", "range": number, "thread": thread,
            }
            for time_ns, stage, name, thread, number in self._entries.copy()
        ]  # fmt: skip


_OUT_OF_MEMORY_FEATURE = "the snapshot of an out-of-memory error"


class AllocationFailure(NamedTuple):
    """An allocation that failed: the GPU, and the bytes asked for, allowed to the process, and free on the GPU."""

    device: int
    requested_bytes: int
    allowed_bytes: int
    free_bytes: int


class OutOfMemory:
    """Passes failed allocations on to listeners.

    torch cannot remove its observer, so there is one in a process, which does nothing without listeners.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[AllocationFailure], None]] = []
        self._attached = 0  # the process in which the observer is attached

    def follow(self, listener: Callable[[AllocationFailure], None]) -> None:
        """Call ``listener`` from now on, on the thread that allocates; CUDA must be initialized."""
        if self._attached != os.getpid() and memory_history.attach_out_of_memory_observer(self._observe):
            self._attached = os.getpid()
        self._listeners.append(listener)

    def unfollow(self, listener: Callable[[AllocationFailure], None]) -> None:
        """Stop that; a second call does nothing."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    @guard.contained(_OUT_OF_MEMORY_FEATURE)
    def _observe(self, device: int, requested: int, allowed: int, free: int) -> None:
        for listener in tuple(self._listeners):
            listener(AllocationFailure(device, requested, allowed, free))


out_of_memory = OutOfMemory()


_DUMP_FEATURE = "writing a memory snapshot"
_PROTOCOL = 4  # that of torch's own snapshots, for which its page is made
_WAIT_S = 0.1
_FREED_AT_ONCE = 1000  # events that are freed without a break, in which other threads can run

Snapshot = dict[str, Any]


class SnapshotDump:
    """Writes ``snapshot``, and then frees it, while the program goes on.

    Nobody else may use the snapshot. The pickler hands over 64 kB at a time, between which other threads run.

    Args:
        snapshot: what torch returned.
        path: the file; it appears whole, or not at all.
        size_bytes: its largest size.

    Attributes:
        done: whether it is over.
        entries: the events in the file.
        bytes: the size of the file; None before it is written, and where that failed.
        dropped: the events that were left out, as the file would have been too large.
        seconds: how long it took.
        failure: the reason why no file was written, in words; None otherwise.
    """

    def __init__(self, snapshot: Snapshot, path: Path, size_bytes: int) -> None:
        self.path = path
        self.done = False
        self.entries = count_events(snapshot)
        self.dropped = 0
        self.bytes: int | None = None
        self.seconds = 0.0
        self.failure: str | None = None
        self._size_bytes = size_bytes
        self._gave_up = False
        self._when_done: list[Callable[[], None]] = []
        self._thread = threading.Thread(
            target=self._run, args=(snapshot,), name="instrument memory snapshot", daemon=True
        )

    def start(self) -> None:
        """Begin; where no thread can be started, as at the end of the program, write at once."""
        try:
            self._thread.start()
        except RuntimeError:
            self._thread.run()

    @property
    def is_running(self) -> bool:
        """Whether its thread writes, or makes the calls of `when_done`."""
        return self._thread.is_alive()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call`` when it is over, on its thread, or now if it is."""
        self._when_done.append(call)
        if self.done:
            self._notify()

    def wait(self, timeout: float, waiting: Callable[[], None]) -> None:
        """Wait until it is over, and the calls of `when_done` are made; give up after ``timeout`` s.

        ``waiting`` is called ten times a second.
        """
        deadline = time.monotonic() + timeout
        while self.is_running and time.monotonic() < deadline:
            self._thread.join(_WAIT_S)
            waiting()
        if not self.done:
            self._gave_up = self.done = True
            self.failure = f"it was not written within {timeout:.0f} s after the end of the run"

    def _run(self, snapshot: Snapshot) -> None:
        began = time.perf_counter()
        try:
            self._write(snapshot)
        except Exception as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}".removesuffix(": ")
            guard.note(_DUMP_FEATURE, error)
        finally:
            self.seconds = time.perf_counter() - began
            self.done = True
            self._notify()
            _free(snapshot)

    def _notify(self) -> None:
        while self._when_done:
            with guard.contained(_DUMP_FEATURE):
                self._when_done.pop(0)()

    def _write(self, snapshot: Snapshot) -> None:
        make_folder(self.path.parent)
        with part_file(self.path) as part:
            while not self._fits(snapshot, part):
                if not drop_older_half(snapshot):
                    raise CaptureError(f"without events, it is larger than {self._size_bytes:,} bytes")
                left = count_events(snapshot)
                self.dropped, self.entries = self.dropped + self.entries - left, left
            self.check()
            size = part.stat().st_size
            publish(part, self.path)
            self.bytes = size

    def _fits(self, snapshot: Snapshot, part: Path) -> bool:
        """Write the snapshot to ``part``, unless it is too large."""
        with part.open("wb", buffering=0) as file:
            try:
                pickle.Pickler(LimitedFile(file, self._size_bytes, self), _PROTOCOL).dump(snapshot)
            except _TooLargeError:
                return False
        return True

    def check(self) -> None:
        """Raise if nobody waits for the file any more."""
        if self._gave_up:
            raise CaptureError(self.failure)


class _TooLargeError(Exception):
    """A file is about to exceed its limit."""


class LimitedFile:
    """Writes to ``file`` up to ``limit`` bytes."""

    def __init__(self, file: BinaryIO, limit: int, dump: SnapshotDump) -> None:
        self._file = file
        self._left = limit
        self._dump = dump

    def write(self, data: bytes) -> int:
        """Write ``data``.

        Raises:
            OSError: the system takes no more.
        """
        self._left -= len(data)
        if self._left < 0:
            raise _TooLargeError
        self._dump.check()
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        return len(data)


def count_events(snapshot: Snapshot) -> int:
    """Return the number of events of all GPUs."""
    return sum(map(len, snapshot.get("device_traces", ())))


def drop_older_half(snapshot: Snapshot) -> bool:
    """Remove the older half of the events of each GPU; return False if there were none."""
    had_events = count_events(snapshot) > 0
    for events in snapshot.get("device_traces", ()):
        del events[: (len(events) + 1) // 2]
    return had_events


def _free(snapshot: Snapshot) -> None:
    """Free a snapshot little by little: its millions of objects at once would hold all threads."""
    for events in snapshot.get("device_traces", ()):
        while events:
            del events[-_FREED_AT_ONCE:]
    snapshot.clear()
