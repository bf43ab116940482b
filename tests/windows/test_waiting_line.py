"""The line at a terminal while the end of a run waits."""

from __future__ import annotations

import io
import os
import pty
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

import instrument
from instrument.record.handover import summary_output
from instrument.record.handover.summary_output import WaitingLine

from ..support.finishing import finishing_pid
from .training import expected, manifest, statuses, train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def terminal() -> Iterator[tuple[int, IO[str]]]:
    """A terminal: the descriptor that reads what is shown, and the file that a program writes to."""
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stream:
        yield reader, stream
    os.close(reader)


def test_a_long_wait(out: Path, terminal: tuple[int, IO[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the windows and their size, and is erased when they are finished."""
    monkeypatch.setattr(summary_output, "_AFTER_S", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal[1])
    shown: list[str] = []

    def watch(number: int) -> None:
        while "..." not in "".join(shown):
            shown.append(os.read(terminal[0], 1000).decode())
        os.kill(number, signal.SIGCONT)

    with instrument.profile(out, schedule="0") as prof:
        train(2, prof.step)
        number = finishing_pid()
        os.kill(number, signal.SIGSTOP)
        watcher = threading.Thread(target=watch, args=(number,))
        watcher.start()
    watcher.join()
    shown += iter(lambda: os.read(terminal[0], 1).decode(), "K")
    assert "\r\ninstrument: finishing 1 window, 0 MB ...\r\x1b[" == "".join(shown)  # of unknown width
    assert [(1, "recorded")] == statuses(manifest(out))


def test_a_line_that_fails(out: Path, monkeypatch: pytest.MonkeyPatch, lenient: None) -> None:
    """The end of the run waits for its windows all the same."""

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(WaitingLine, "__init__", fail)
    with instrument.profile(out, schedule="0") as prof:
        assert expected(4) == train(4, prof.step)
    assert [(1, "recorded")] == statuses(manifest(out))


def test_a_short_wait(out: Path, terminal: tuple[int, IO[str]]) -> None:
    """Nothing is shown in the first two seconds."""
    line = WaitingLine("waiting", terminal[1])
    line.update()
    line.erase()
    terminal[1].write("end")
    terminal[1].flush()
    assert b"end" == os.read(terminal[0], 1000)


def test_a_stream_that_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file gets nothing."""
    monkeypatch.setattr(summary_output, "_AFTER_S", 0.0)
    stream = io.StringIO()
    line = WaitingLine("waiting", stream)
    line.update()
    line.erase()
    assert "" == stream.getvalue()


def test_an_erased_line_does_not_come_back(terminal: tuple[int, IO[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hide the summary that follows."""
    monkeypatch.setattr(summary_output, "_AFTER_S", 0.0)
    line = WaitingLine("waiting", terminal[1])
    line.update()
    line.erase()
    line.update()
    terminal[1].write("|")
    terminal[1].flush()
    assert "\r\nwaiting ...\r\x1b[K" == "".join(iter(lambda: os.read(terminal[0], 1).decode(), "|"))
