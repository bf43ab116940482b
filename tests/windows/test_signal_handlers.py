"""The program's signal handler may use the library although it interrupts the library on the same thread."""

from __future__ import annotations

import contextlib
import gc
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.base import files
from instrument.base.config import settings
from instrument.explain.waits.events import Recorder as SyncRecorder
from instrument.explain.waits.events import SyncEvent, Tally
from instrument.record.handover import finishing_process, window_sender
from instrument.record.handover import manifest as manifests

from .training import Recorder, manifest, statuses, train

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not hasattr(signal, "alarm"), reason="this system has no such signals"),
]
SIGNALS = (signal.SIGUSR1, signal.SIGALRM)


@pytest.fixture(autouse=True)
def limit_time() -> Iterator[None]:
    """Restore the handlers; fail a test whose thread waits for itself."""
    before = [signal.getsignal(number) for number in SIGNALS]
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the thread waits for itself"))
    signal.alarm(30)
    yield
    signal.alarm(0)
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def raise_signal_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Raise SIGUSR1 at the main thread's next call of ``owner.name``."""
    original, pending = getattr(owner, name), [signal.SIGUSR1]

    def call(*arguments: Any, **options: Any) -> Any:
        if pending and threading.current_thread() is threading.main_thread():
            signal.raise_signal(pending.pop())
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("exits", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (files.LineFile, "append"),
        (finishing_process.FinishingProcess, "send"),
        (finishing_process.FinishingProcess, "_start_thread"),
        (window_sender.WindowSender, "_submit"),
        (manifests, "append"),
        (subprocess, "Popen"),
    ],
)
def test_a_handler_that_stops_the_profile(
    out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, exits: bool
) -> None:
    """Each window has one line, whose files exist, whether the handler ends the program or not."""

    def handle(*_: Any) -> None:
        prof.stop()
        if exits:
            sys.exit("by the handler")

    monkeypatch.setattr(settings, "summary", True)
    monkeypatch.setattr(window_sender, "_WAIT_S", 20)
    signal.signal(signal.SIGUSR1, handle)
    recorder = Recorder()
    exporter = {"exporter": recorder} if owner is manifests else {}
    plan = instrument.schedule(active=1, repeat=3)
    prof = instrument.profile(out, schedule=plan, on_summary=lambda text: None, **exporter)
    raise_signal_in(monkeypatch, owner, name)
    with pytest.raises(SystemExit) if exits else contextlib.nullcontext(), prof:
        train(5, prof.step)
    entries = manifest(out)
    assert [1, 2, 3] == sorted(entry["window"] for entry in entries)
    assert sorted(prof.windows, key=str) == sorted(entries, key=str)
    assert all((out / file["path"]).exists() for entry in entries for file in entry["files"])
    assert recorder.count("start") == recorder.count("stop") + recorder.count("discard")
    assert not any("too long" in (entry["reason"] or "") for entry in entries)


def test_a_handler_that_synchronizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A synchronization in a handler, as one that saves a checkpoint, is counted besides the interrupted one."""
    recorder, event = SyncRecorder(), SyncEvent("item", "a copy")
    signal.signal(signal.SIGUSR1, lambda *_: recorder.add(event))
    for _ in range(2):
        raise_signal_in(monkeypatch, Tally, "add")
        recorder.add(event)
        monkeypatch.undo()
    assert [4] == [finding.count for finding in recorder.findings]


def test_a_handler_that_stops_and_exits_in_on_trace_ready(out: Path) -> None:
    """The window whose on_trace_ready is interrupted has its line and its files."""

    def ready(prof: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)

    def handle(*_: Any) -> None:
        prof.stop()
        sys.exit("by the handler")

    signal.signal(signal.SIGUSR1, handle)
    prof = instrument.profile(out, schedule="1,3", on_trace_ready=ready)
    with pytest.raises(SystemExit), prof:
        train(5, prof.step)
    assert [(1, "recorded"), (2, "not reached")] == sorted(statuses(manifest(out)))
    assert all((out / file["path"]).exists() for entry in manifest(out) for file in entry["files"])
    left, prof = weakref.ref(prof), None
    gc.collect()
    assert left() is None  # the end of the program has nothing to do for it
