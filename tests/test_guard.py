"""Tests of `guard`: contained errors, errors that pass, and failures of the containment itself."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import instrument
from instrument.base.errors import SyncError
from instrument.base.guard import Guard
from instrument.base.live_objects import IdentitySet
from instrument.base.patch import Patch, apply, undo
from instrument.record.handover.manifest import Manifest

Log = pytest.LogCaptureFixture


@pytest.fixture
def guard(lenient: None) -> Guard:
    return Guard()


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*args: object) -> None:
        raise error

    return call


def test_an_error_is_logged_once_and_counted(guard: Guard, caplog: Log) -> None:
    """Errors are contained by the decorator and by the context manager."""
    call = guard.contained("looking")(raising(RuntimeError("gone")))
    assert call() is None
    with guard.contained("looking"):
        raise RuntimeError("gone")
    assert guard.failures == {"looking": 2}
    assert [record.getMessage() for record in caplog.records] == [
        "instrument: looking failed and was skipped; training continues (error=RuntimeError('gone'))"
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), SyncError("a wait")], ids=repr)
def test_exceptions_that_are_not_failures_pass(guard: Guard, error: BaseException) -> None:
    """Interrupts, exits and requested errors pass through."""
    original = guard.around("following", raising(error), lambda original: original())
    contained = guard.contained("following")(raising(error))
    prepared = guard.prepared("following", otherwise=lambda: None)(raising(error))
    for call in (original, contained, prepared):
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error
    assert not guard.failures


def test_strict_settings_raise_the_error_itself() -> None:
    error, guard = OSError("full"), Guard()
    for call in (guard.contained("saving")(raising(error)), guard.around("saving", len, raising(error))):
        with pytest.raises(OSError, match="full") as caught:
            call()
        assert caught.value is error


def test_wrong_arguments_raise_and_other_errors_do_not(guard: Guard) -> None:
    prepared = guard.prepared("making", otherwise=lambda *given: given)
    with pytest.raises(ValueError, match='"depth" must be'):
        prepared(raising(ValueError('"depth" must be >= 0: -1')))(-1)
    assert prepared(raising(MemoryError()))(1, 2) == (1, 2)


class Original:
    """A function of the program or of torch."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.calls: list[Any] = []
        self.error = error

    def __call__(self, *args: Any) -> Any:
        self.calls.append(args)
        if self.error is not None:
            raise self.error
        return "result"


def fails_before(original: Callable[..., Any], *args: Any) -> Any:
    raise RuntimeError("before")


def fails_after(original: Callable[..., Any], *args: Any) -> Any:
    try:
        return original(*args)
    finally:
        raise RuntimeError("after")


@pytest.mark.parametrize("around", [fails_before, fails_after])
@pytest.mark.parametrize("error", [None, StopIteration(1), KeyboardInterrupt()], ids=repr)
def test_a_wrapper_calls_the_original_once(
    guard: Guard, around: Callable[..., Any], error: BaseException | None
) -> None:
    """The result or the same error object of the wrapped function passes through any failure around it."""
    original = Original(error)
    call = guard.around("following", original, around)
    if error is None:
        assert call(1) == "result"
    else:
        with pytest.raises(type(error)) as caught:
            call(1)
        assert caught.value is error
    assert original.calls == [(1,)]
    assert guard.failures == {"following": 1}


def test_an_error_that_passes_is_not_kept(guard: Guard) -> None:
    """The guard keeps no reference to the error, so that its tensors are freed when the program retries."""
    gc.disable()
    try:
        alive = IdentitySet()

        def original() -> None:
            tensor = torch.ones(1)
            alive.add(tensor)
            raise ValueError

        with contextlib.suppress(ValueError):
            guard.around("following", original, lambda original: original())()
        assert len(alive) == 0
    finally:
        gc.enable()


def test_a_log_that_fails(guard: Guard, capsys: pytest.CaptureFixture[str]) -> None:
    """An error of the application's log handler does not reach the loop, and the failure is still reported."""
    handler = logging.Handler()
    handler.emit = raising(MemoryError("in the handler"))  # type: ignore[method-assign]
    logging.getLogger("instrument").addHandler(handler)
    try:
        guard.failed("saving", OSError("full"))
    finally:
        logging.getLogger("instrument").removeHandler(handler)
    assert "saving failed and was skipped; training continues" in capsys.readouterr().err


class Unprintable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_whose_repr_raises(guard: Guard, capsys: pytest.CaptureFixture[str]) -> None:
    guard.failed("saving", Unprintable())
    guard.failed("saving", Unprintable())
    assert guard.failures == {"saving": 2}


def at_depth(depth: int, call: Callable[[], None]) -> None:
    if depth:
        at_depth(depth - 1, call)
    else:
        call()


@pytest.fixture
def limit() -> Iterator[int]:
    """The depth at which exactly one more call is possible."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    depth = 400
    while True:
        try:
            at_depth(depth, list)
            break
        except RecursionError:
            depth -= 1
    yield depth
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("lenient")
def test_the_recursion_limit(limit: int) -> None:
    """At any remaining depth, a region needs no more frames than the program's own calls."""
    region = instrument.annotate("deep")

    @instrument.annotate
    def annotated() -> None:
        reached.append("annotated")

    def leaf() -> None:
        with region:
            reached.append("block")

    reached: list[str] = []
    annotated()
    with profile(activities=[ProfilerActivity.CPU]):
        for spare in range(40):
            for call in (leaf, annotated):
                reached.clear()
                try:
                    at_depth(limit - spare - 2, call)
                except RecursionError as error:
                    deepest = error.__traceback__
                    while deepest is not None and deepest.tb_next is not None:
                        deepest = deepest.tb_next
                    assert deepest is not None
                    assert "instrument/" not in deepest.tb_frame.f_code.co_filename, spare
                else:
                    assert reached


@pytest.mark.usefixtures("lenient")
def test_errors_at_the_recursion_limit(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no stack is left to contain an error, the program meets its own RecursionError, and no other error."""
    guard = Guard()
    fail = raising(OSError("full"))
    following = guard.around("following", list, fail, when=fail)
    annotation = instrument.annotate("deep")
    prof = instrument.profile(tmp_path)
    monkeypatch.setattr(type(annotation), "_decorate", fail)
    monkeypatch.setattr(type(prof), "_start", fail)

    contained = guard.contained("saving")

    def block() -> None:
        with contained:
            fail()

    def decorate() -> None:
        annotation(block)

    def enter() -> None:
        prof.__enter__()

    for spare in range(-20, 20):
        for call in (block, following, decorate, enter):
            with contextlib.suppress(RecursionError):
                at_depth(limit - spare - 2, call)


def test_patches_that_cannot_be_undone_are_kept() -> None:
    """The other patches are undone, and undoing the failed ones is tried again."""

    class Owner:
        first = second = third = 0

    patches: list[Patch] = []
    apply([Patch(Owner, name, lambda _: 1) for name in ("first", "second", "third")], patches)
    patches[1].undo = raising(OSError("not now"))  # type: ignore[method-assign]
    with pytest.raises(OSError, match="not now"):
        undo(patches)
    assert (Owner.first, Owner.second, Owner.third) == (0, 1, 0)
    del patches[0].undo
    undo(patches)
    assert (Owner.second, patches) == (0, [])


@pytest.mark.usefixtures("lenient")
def test_a_profile_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Log) -> None:
    """The loop runs, its steps are counted, and the log says why no window is recorded."""
    monkeypatch.setattr(Manifest, "__init__", raising(OSError("no host name")))
    with instrument.profile(tmp_path) as prof:
        prof.step()
    assert (prof.step_num, prof.windows) == (1, [])
    assert list(instrument.steps(range(3), tmp_path)) == [0, 1, 2]
    assert (
        "recording windows failed and was skipped; training continues (error=OSError('no host name'))"
        in caplog.text
    )
