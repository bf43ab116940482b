"""Memory snapshots that fail: the loss is the same to the bit, the history is off, and the manifest says why."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument.base.guard import guard
from instrument.record.allocator_history import window_memory
from instrument.record.allocator_history.options import MemoryHistory
from instrument.record.handover import window_sender

from ..support.allocator import Allocator, allocator
from .test_memory_history import memories, run, snapshots
from .training import Recorder, expected, manifest, statuses, train

__all__ = ["allocator"]


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("call", ["record", "snapshot", "attach"])
def test_a_call_of_torch_that_fails(out: Path, allocator: Allocator, call: str) -> None:
    """The window is recorded without a snapshot."""
    allocator.failing[call] = RuntimeError("no")
    run(out, lambda number: allocator.allocate(), schedule="2-3", memory="snapshot")
    assert [(1, "recorded")] == statuses(manifest(out))
    (memory,) = memories(out)
    assert ("failed", "RuntimeError: no", None) == (memory["status"], memory["reason"], memory["file"])
    assert not allocator.on
    assert guard.failures["recording GPU memory"] >= 1


@pytest.mark.usefixtures("lenient")
def test_what_is_left_is_not_known(out: Path, allocator: Allocator) -> None:
    """The snapshot is there without it."""
    allocator.failing["left"] = RuntimeError("no")
    run(out, lambda number: allocator.allocate(), schedule="2-3", memory="snapshot")
    assert ["recorded"] == [memory["status"] for memory in memories(out)]
    assert {} == instrument.read_memory(snapshots(out)[0]).free_bytes


@pytest.mark.usefixtures("lenient")
def test_an_allocator_without_a_history(out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as cudaMallocAsync, which refuses even to say whether a history is on."""

    def refuse() -> bool:
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory")

    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", refuse)
    run(out, lambda number: allocator.allocate(), schedule="2-3", memory="snapshot")
    assert [(1, "recorded")] == statuses(manifest(out))
    (memory,) = memories(out)
    assert ("failed", None) == (memory["status"], memory["file"])
    assert "RuntimeError: cudaMallocAsync does not yet support recordHistory" == memory["reason"]
    assert [] == allocator.calls


@pytest.mark.usefixtures("lenient")
def test_a_history_that_cannot_be_turned_off(out: Path, allocator: Allocator) -> None:
    """The snapshot is written before."""

    def body(number: int) -> None:
        if number == 2:
            allocator.failing["record"] = RuntimeError("stuck")

    run(out, body, schedule="2", memory="snapshot")
    (memory,) = memories(out)
    assert ("recorded", "RuntimeError: stuck") == (memory["status"], memory["reason"])
    assert 1 == len(snapshots(out))


@pytest.mark.usefixtures("lenient")
def test_an_observer_that_fails(out: Path, allocator: Allocator) -> None:
    """The program gets torch's error, not that of the observer."""

    def body(number: int) -> None:
        allocator.failing["snapshot"] = RuntimeError("no")
        with pytest.raises(RuntimeError, match="CUDA out of memory"):
            allocator.run_out()

    run(out, body, schedule="2-4", memory="snapshot")
    (memory,) = memories(out)
    assert ("failed", "RuntimeError: no") == (memory["status"], memory["reason"])
    assert not allocator.on


def slowly(allocator: Allocator, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Call ``meanwhile`` while torch takes the first snapshot."""
    take, calls = allocator.snapshot, [meanwhile]

    def changed(*_: object) -> dict[str, Any]:
        if calls:
            calls.pop()()
        return take()

    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", changed)


def run_out(allocator: Allocator) -> None:
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        allocator.run_out()


def test_several_threads_that_run_out(out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one takes the snapshot; the others get torch's error at once."""

    def others() -> None:
        threads = [threading.Thread(target=run_out, args=(allocator,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    slowly(allocator, monkeypatch, others)
    run(out, lambda number: run_out(allocator) if number == 2 else None, schedule="2-3", memory="snapshot")
    assert ["recorded"] == [memory["status"] for memory in memories(out)]
    assert 1 == len(snapshots(out))
    assert 1 == allocator.calls.count(("snapshot",))


def test_the_end_of_a_window_while_another_thread_runs_out(
    out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window has the snapshot of that thread, for which its end waits."""
    began, ending = threading.Event(), threading.Event()
    other = threading.Thread(target=run_out, args=(allocator,))
    stop = window_memory.WindowMemory.stop

    def stopping(memory: window_memory.WindowMemory) -> None:
        threading.Timer(0.1, ending.set).start()
        stop(memory)

    def meanwhile() -> None:
        began.set()
        assert ending.wait(60)

    def body(number: int) -> None:
        if number == 3:
            other.start()
            assert began.wait(60)

    monkeypatch.setattr(window_memory.WindowMemory, "stop", stopping)
    slowly(allocator, monkeypatch, meanwhile)
    run(out, body, schedule="2-3", memory="snapshot")
    other.join()
    assert 1 == allocator.calls.count(("snapshot",))
    (memory,) = memories(out)
    assert "recorded" == memory["status"]
    assert 2**40 == memory["out_of_memory"]["requested_bytes"]
    assert [memory["file"]] == [str(path.relative_to(out)) for path in snapshots(out)]
    assert not allocator.on


def test_a_window_that_a_signal_handler_ends_in_its_snapshot(
    tmp_path: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for itself, leaves no file, and its line says so."""
    memory = window_memory.WindowMemory(MemoryHistory(), tmp_path, "rank0")
    slowly(allocator, monkeypatch, memory.stop)  # a handler runs on the thread that it interrupts
    memory.start()
    run_out(allocator)
    entry = memory.entry()
    assert entry is not None
    assert ("not recorded", "the window was given up", None) == (entry["status"], entry["reason"], entry["file"])
    assert [] == list(tmp_path.iterdir())
    assert not allocator.on


def test_ctrl_c_in_a_snapshot(out: Path, allocator: Allocator) -> None:
    """It reaches the program, and the history is off."""
    allocator.failing["snapshot"] = KeyboardInterrupt()
    with (
        pytest.raises(KeyboardInterrupt),
        instrument.profile(out, schedule="2-3", memory="snapshot", exporter=Recorder()) as prof,
    ):
        train(10, prof.step)
    assert not allocator.on
    (memory,) = memories(out)
    assert ("not recorded", "the window was given up") == (memory["status"], memory["reason"])


def test_a_window_that_fails(out: Path, allocator: Allocator, lenient: None) -> None:
    """Its history is off, and its line says that it was given up."""
    with instrument.profile(out, schedule="2-3,6", memory="snapshot", exporter=Recorder("stop")) as prof:
        assert expected(10) == train(10, prof.step)
    assert not allocator.on
    assert [(1, "failed"), (2, "failed")] == statuses(manifest(out))
    assert {"the window was given up"} == {memory["reason"] for memory in memories(out)}


def test_out_of_memory_in_a_window_that_fails(out: Path, allocator: Allocator, lenient: None) -> None:
    """Its line has the snapshot that was taken."""

    def body(number: int) -> None:
        with pytest.raises(RuntimeError, match="CUDA out of memory"):
            allocator.run_out()

    with instrument.profile(out, schedule="2-3", memory="snapshot", exporter=Recorder("stop")) as prof:
        assert expected(10) == train(10, prof.step, body)
    (line,) = manifest(out)
    assert ("failed", "recorded") == (line["status"], line["memory"]["status"])
    assert [line["memory"]["file"]] == [file["path"] for file in line["files"]]


def writing(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    """Call ``before`` before each write to a snapshot."""
    write = window_memory.LimitedFile.write

    def changed(file: Any, data: bytes) -> int:
        before()
        return write(file, data)

    monkeypatch.setattr(window_memory.LimitedFile, "write", changed)


@pytest.mark.usefixtures("lenient")
def test_a_full_disk(out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot fails, and leaves nothing; the next one is tried."""
    failed = threading.Event()

    def before() -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def body(number: int) -> None:
        assert number < 5 or failed.wait(60)

    writing(monkeypatch, before)
    run(out, body, schedule="2,7", memory=MemoryHistory(every="0.0001s"))
    first, second = memories(out)
    assert ("failed", "OSError: [Errno 28] No space left on device") == (first["status"], first["reason"])
    assert "recorded" == second["status"]
    assert [Path(second["file"]).name] == [path.name for path in out.rglob("*memory*")]


def test_a_slow_disk(out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on; the lines of later windows come after that of the snapshot."""
    may_write = threading.Event()

    def body(number: int) -> None:
        if number == 8:
            assert not (out / "manifest.jsonl").exists()
            may_write.set()

    writing(monkeypatch, lambda: may_write.wait(60))
    run(out, body, schedule="1,3,5", memory=MemoryHistory(every="1h"))
    assert [(1, "recorded"), (2, "recorded"), (3, "recorded")] == statuses(manifest(out))
    assert ["recorded", "not recorded", "not recorded"] == [memory["status"] for memory in memories(out)]


@pytest.mark.usefixtures("lenient")
def test_a_disk_that_hangs(out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the run gives up, and no file appears later."""
    released = threading.Event()
    monkeypatch.setattr(window_sender, "_WAIT_S", 0.2)
    writing(monkeypatch, lambda: released.wait(60))
    run(out, schedule="2", memory="snapshot")
    (memory,) = memories(out)
    assert "failed" == memory["status"]
    assert "it was not written within 0 s after the end of the run" == memory["reason"]
    released.set()
    for thread in threading.enumerate():
        if thread.name == "instrument memory snapshot":
            thread.join(60)
    assert [] == list(out.rglob("*memory*"))


def test_no_thread_can_be_started(out: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot is written at once, as at the end of a program."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    run(out, schedule="2", memory="snapshot")
    assert ["recorded"] == [memory["status"] for memory in memories(out)]
