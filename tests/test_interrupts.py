"""Exceptions that the program's signal handlers raise inside the library reach the program."""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import logging
import os
import pathlib
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument.base import process_id
from instrument.base.disk import nearest_folder
from instrument.base.files import LineFile, make_folder
from instrument.base.guard import Guard
from instrument.base.interrupts import Suppressed, is_interrupt
from instrument.base.patch import Patch, apply, undo
from instrument.record.exporters.sessions import sessions
from instrument.record.handover.finishing_process import FinishingProcess

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals of POSIX")


def unlock_logging() -> None:
    """Release the locks of `logging` that stay locked where a signal handler raises just after they were taken.

    They would stop each thread that logs, also in later tests. CPython takes each lock before the ``try``.
    """
    handlers = [reference() for reference in logging._handlerList]  # type: ignore[attr-defined]
    for lock in (logging._lock, *(handler.lock for handler in handlers if handler)):  # type: ignore[attr-defined]
        while lock is not None and lock._is_owned():
            lock.release()


class TimeLimit(Exception):
    """Raised by the program when a time limit expires."""


def plain(signum: int, frame: Any) -> None:
    raise TimeLimit


def stars(*_: Any) -> None:
    raise TimeLimit


def nested(signum: int, frame: Any) -> None:
    def raising() -> None:
        stars()

    with contextlib.ExitStack() as stack:
        stack.callback(raising)


def rebinding(signum: Any, frame: Any) -> None:
    signum = frame = None  # noqa: F841
    raise TimeLimit


def deleting(signum: int, frame: Any) -> None:
    del signum, frame
    raise TimeLimit


def after(what: str, signum: int, frame: Any) -> None:
    raise TimeLimit(what)


def captured(signum: int, frame: Any) -> None:
    def show() -> Any:
        return signum, frame

    raise TimeLimit(show)


def chained(signum: int, frame: Any) -> None:
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        plain(signum, frame)


class Handlers:
    def method(self, signum: int, frame: Any) -> None:
        raise TimeLimit

    @classmethod
    def of_class(cls, signum: int, frame: Any) -> None:
        raise TimeLimit

    def changed(self, *given: Any) -> None:
        given = ()  # noqa: F841
        raise TimeLimit

    def __call__(self, signum: int, frame: Any) -> None:
        del frame
        raise TimeLimit


@functools.lru_cache
def cached(number: int) -> None:
    raise TimeLimit


HANDLERS = [
    plain,
    stars,
    nested,
    rebinding,
    deleting,
    captured,
    chained,
    lambda *_: stars(),
    lambda signum, frame: cached(signum),
    Handlers().method,
    Handlers.of_class,
    Handlers().changed,
    Handlers(),
    functools.partial(after, "late"),
    functools.partial(functools.partial(deleting)),
]


@pytest.fixture
def handle() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGALRM)
    yield lambda handler: signal.signal(signal.SIGALRM, handler) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def raise_alarm() -> None:
    signal.raise_signal(signal.SIGALRM)
    time.sleep(0)  # the handler runs here at the latest


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    "handler", HANDLERS, ids=lambda handler: getattr(handler, "__name__", repr(type(handler)))
)
def test_errors_of_signal_handlers_pass(
    handler: Any, handle: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Interrupts pass through each kind of containment, also nested; nothing is counted or logged."""
    handle(handler)
    guard = Guard()

    def block() -> None:
        with guard.contained("outer"), guard.contained("inner"):
            raise_alarm()

    calls = [
        block,
        guard.contained("outer")(guard.contained("inner")(raise_alarm)),
        guard.prepared("making", otherwise=lambda: None)(raise_alarm),
        guard.around("following", list, lambda original: raise_alarm()),
        guard.around("following", list, list, when=lambda: raise_alarm() or True),
    ]
    for call in calls:
        with pytest.raises(TimeLimit) as caught:
            call()
        assert is_interrupt(caught.value)
    assert not guard.failures
    assert not caplog.records


@pytest.mark.usefixtures("lenient")
def test_other_errors_are_contained(handle: Callable[[Any], None]) -> None:
    """A function is not taken for a signal handler because of a frame or a number among its arguments."""
    handle(plain)
    guard = Guard()

    def failing(number: int, frame: Any) -> None:
        raise ValueError

    def inner_frame() -> Any:
        return sys._getframe()

    frame = sys._getframe()
    for arguments in [(14, inner_frame()), (1000, frame), (True, frame), (frame, 14)]:
        assert guard.contained("looking")(failing)(*arguments) is None
    assert guard.contained("looking")(Color)(9) is None  # an Enum, as the default handler is
    assert guard.failures == {"looking": 5}


class Color(enum.Enum):
    red = 1


@pytest.mark.parametrize("kind", [TimeoutError, RuntimeError])
def test_suppressing_spares_signal_handlers(kind: type[Exception], handle: Callable[[Any], None]) -> None:
    def late(*_: Any) -> None:
        raise kind

    handle(late)
    with Suppressed(OSError, RuntimeError):
        raise kind
    with pytest.raises(kind), Suppressed(OSError, RuntimeError):
        raise_alarm()


MAKES_FOLDERS = getattr(pathlib, "_normal_accessor", os)  # the first in Python 3.10


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (MAKES_FOLDERS, "mkdir", lambda folder: make_folder(folder / "new")),
        (MAKES_FOLDERS, "mkdir", lambda folder: make_folder(folder / "new" / "in it")),
        (Path, "lstat", nearest_folder),
        (Path, "read_bytes", lambda _: process_id.machine()),
        (Path, "read_text", lambda _: process_id.start_time(os.getpid())),
        (Path, "stat", lambda _: process_id.place()),
    ],
)
def test_time_limits_reach_the_program_from_calls_that_may_fail(
    owner: Any,
    name: str,
    call: Callable[[Path], object],
    tmp_path: Path,
    handle: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An `OSError` of a signal handler is not taken for one of the file system."""

    def late(*_: Any) -> None:
        raise TimeoutError

    handle(late)
    real = getattr(owner, name)

    def interrupted(*given: Any, **options: Any) -> Any:
        result = real(*given, **options)
        raise_alarm()
        return result

    with monkeypatch.context() as patched, pytest.raises(TimeoutError):
        patched.setattr(owner, name, interrupted)
        call(tmp_path)


def test_a_time_limit_while_a_job_is_sent(
    handle: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The program receives it, and the process that finishes windows receives the job."""
    answers: list[dict[str, Any]] = []
    handle(plain)
    process = FinishingProcess(tmp_path, answers.append, lambda process: None)
    append = LineFile.append

    def interrupted(file: LineFile, value: Any) -> None:
        append(file, value)
        raise_alarm()

    with monkeypatch.context() as patched, pytest.raises(TimeLimit):
        patched.setattr(LineFile, "append", interrupted)
        process.send({"kind": "report", "job": 1})
    process.end(60)
    assert 1 in [answer.get("job") for answer in answers]


def test_patches_are_undone_where_a_signal_handler_raises(
    handle: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Owner:
        first = second = 0

    handle(plain)
    patches: list[Patch] = []
    apply([Patch(Owner, name, lambda _: 1) for name in ("first", "second")], patches)
    real, calls = Patch.undo, iter([True])

    def late(patch: Patch) -> None:
        if next(calls, False):
            raise_alarm()
        real(patch)

    monkeypatch.setattr(Patch, "undo", late)
    with pytest.raises(TimeLimit):
        undo(patches)
    assert (Owner.first, Owner.second, patches) == (0, 0, [])


@pytest.mark.usefixtures("lenient")
def test_a_time_limit_directly_after_torch_has_stopped(
    tmp_path: Path,
    handle: Callable[[Any], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The window failed, nothing stops torch a second time, and the next window is recorded."""
    handle(plain)
    real = sessions.release

    def release(capture: Any) -> None:
        real(capture)
        monkeypatch.undo()
        raise_alarm()

    with instrument.profile(tmp_path, schedule="1,3", on_trace_ready=lambda prof: None) as prof:
        prof.step()
        monkeypatch.setattr(sessions, "release", release)
        with pytest.raises(TimeLimit):
            prof.step()
        prof.step()
        prof.step()
    assert [("failed", "interrupted by TimeLimit"), ("recorded", None)] == [
        (entry["status"], entry["reason"]) for entry in prof.windows
    ]
    assert "failed and was skipped" not in caplog.text


class Alarms:
    """Sets time limits from a microsecond to about 10 ms around the code to interrupt."""

    def __init__(self, kind: type[Exception], seed: int) -> None:
        self.fired = self.caught = 0
        self._kind = kind
        powers = random.Random(seed).sample(range(110), 110)
        self._delays = itertools.cycle(1e-6 * 1.09**power for power in powers)

    def late(self, *_: Any) -> None:
        self.fired += 1
        raise self._kind

    def limit(self, call: Callable[[], object]) -> None:
        try:
            signal.setitimer(signal.ITIMER_REAL, next(self._delays))
            call()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except self._kind:
            self.caught += 1
        unlock_logging()


def train(count: int, around: Callable[[int], Any], after: Callable[[], None] = lambda: None) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number in range(count):
        with around(number):
            loss = model(torch.randn(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        after()
    return found


@pytest.mark.corpus
@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(("kind", "seed"), [(TimeLimit, 1), (TimeLimit, 3), (TimeoutError, 4)])
def test_alarms_at_any_moment_of_a_recording(
    kind: type[Exception],
    seed: int,
    tmp_path: Path,
    handle: Callable[[Any], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program receives the interrupts, training continues, and later windows can still open.

    Python passes an error to `sys.unraisablehook` if the handler runs in a destructor, such as that of `Popen`.
    One in several hundred is lost in an import or in a log handler.
    """
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda given: unraisable.append(given.exc_type))
    with instrument.profile(tmp_path / "first", schedule="1", on_trace_ready=lambda prof: None) as prof:
        train(3, lambda number: contextlib.nullcontext(), prof.step)  # imports the needed modules
    alarms, count, entered = Alarms(kind, seed), 330, torch.profiler.record_function.__enter__
    handle(alarms.late)
    schedule = instrument.schedule(wait=0, warmup=1, active=1)

    def annotated() -> None:
        for _ in range(20):
            with instrument.annotate("inside"):
                pass

    @contextlib.contextmanager
    def around(number: int) -> Iterator[None]:
        alarms.limit(annotated)
        with instrument.annotate(f"step {number}"):
            yield

    with instrument.profile(tmp_path, schedule=schedule, on_trace_ready=lambda prof: None) as prof:
        trained = train(count, around, lambda: alarms.limit(prof.step))
    assert trained == train(count, lambda number: contextlib.nullcontext())
    assert alarms.caught > count / 10
    assert alarms.fired - alarms.caught - len(unraisable) <= alarms.fired / 100
    assert not torch.autograd._profiler_enabled()
    reasons = {entry["reason"] for entry in prof.windows if entry["status"] == "failed"}
    assert reasons == {f"interrupted by {kind.__name__}"}
    assert "another torch profiler is active" not in {entry["reason"] for entry in prof.windows}
    assert sessions.owner is None
    assert entered is torch.profiler.record_function.__enter__
    failures = [line for line in caplog.text.splitlines() if "failed and was skipped" in line]
    assert all(
        "finishing a window" in line for line in failures
    )  # interrupted before the window was sent to the process
