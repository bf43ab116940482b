"""Failures of exporters, torch, schedules and callbacks: training continues, and the manifest has the reason."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument.base.config import settings
from instrument.base.errors import CaptureError
from instrument.base.guard import guard
from instrument.record.exporters.torch_profiler import TorchProfilerCapture, TorchProfilerExporter
from instrument.record.regions import dispatch
from instrument.record.windows.api import uncounted_profile

from ..support import programs, warm
from .training import (
    STEPS,
    TWICE,
    Recorder,
    Trained,
    expected,
    manifest,
    obstruct,
    reasons,
    recorded,
    run,
    statuses,
    traces,
    train,
)

pytestmark = pytest.mark.usefixtures("lenient")


@pytest.mark.parametrize("place", ["capture", "start", "step", "stop", "save"])
def test_an_exporter_that_fails(out: Path, place: str) -> None:
    """Each window fails with the exporter's error as its reason, and the next one is still tried."""
    recorder = Recorder(place)
    run(out, exporter=recorder)
    expected = ("failed", f"OSError: {place} failed on purpose")
    assert [expected, expected] == reasons(manifest(out))
    assert 2 == recorder.count(place) or place == "stop"  # a failed stop is retried once
    if place in ("start", "step"):
        assert recorder.count({"start": "discard", "step": "stop"}[place]) == 2
    assert guard.failures["exporter recorder"] >= 2


def test_an_exporter_that_fails_in_prepare(out: Path) -> None:
    """A failing `prepare` does no harm, as it only saves time: the windows are recorded."""
    run(out, exporter=Recorder("prepare"))
    assert [("recorded", None)] * 2 == reasons(manifest(out))


def test_an_exporter_that_fails_when_discarding(out: Path) -> None:
    """An error while a warm-up is discarded does not change the window's reason."""
    run(out, exporter=Recorder("discard"), schedule=instrument.schedule(at=12, warmup=5))
    assert [("skipped", "the loop ended before step 10, in warm-up")] == reasons(manifest(out))


@pytest.mark.parametrize("place", ["prepare_trace", "start_trace", "stop_trace", "export_chrome_trace"])
def test_a_torch_profiler_that_fails(out: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Torch's error is contained, no profiler stays active, and the next window is recorded."""
    original = getattr(torch.profiler.profile, place)
    failed = []

    def fail(self: Any, *args: Any) -> Any:
        if not failed:
            failed.append(place)
            raise RuntimeError("profiler error on purpose")
        return original(self, *args)

    monkeypatch.setattr(torch.profiler.profile, place, fail)
    run(out)
    first, second = manifest(out)
    assert ("failed", "RuntimeError: profiler error on purpose") == (first["status"], first["reason"])
    assert ("recorded", [6, 7]) == (second["status"], second["steps"])
    assert [[6, 7]] == recorded(out)


@pytest.mark.parametrize("place", ["stop_trace", "_disable_profiler"])
def test_a_stop_that_keeps_failing(out: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Each window has torch's error as its reason, none names another profiler, and no profiler stays active."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("cannot stop on purpose")

    owner: Any = torch.profiler.profile if place == "stop_trace" else torch.autograd.profiler
    with monkeypatch.context() as patch:
        patch.setattr(owner, place, fail)
        run(out)
    assert [("failed", "RuntimeError: cannot stop on purpose")] * 2 == reasons(manifest(out))
    assert not dispatch.recording
    assert not torch.autograd._profiler_enabled()
    run(out / "again")
    assert [[2, 3], [6, 7]] == recorded(out / "again")


def test_a_recording_that_cannot_be_stopped(tmp_path: Path) -> None:
    """While torch cannot stop an earlier recording, later windows have that as their reason."""
    code = """
import torch, instrument
from instrument.base.compat import kineto
from instrument.record.exporters import sessions, torch_profiler

def fail(*_):
    raise RuntimeError("cannot stop on purpose")

stop, leave = torch.autograd.profiler._disable_profiler, kineto.leave_recording
torch.autograd.profiler._disable_profiler = fail
kineto.leave_recording = lambda: None
with instrument.profile("out", schedule="1,3,5") as prof:
    for number in range(7):
        if number == 4:
            torch.autograd.profiler._disable_profiler, kineto.leave_recording = stop, leave
        prof.step()
print([window["reason"] for window in prof.windows])
"""
    env = programs.environment({"INSTRUMENT_SUMMARY": "0"})
    done = warm.run([sys.executable, "-c", code], env, cwd=tmp_path, check=True)
    error = "cannot stop on purpose"
    stuck = f"the recording of an earlier window could not be stopped: RuntimeError({error!r})"
    assert str([f"RuntimeError: {error}", stuck, None]) == done.stdout.splitlines()[-1]


@pytest.mark.parametrize("inside", [True, False])
def test_a_step_in_the_backward_pass(out: Path, inside: bool) -> None:
    """A window waits for a step outside the backward pass, whose end undoes any start or stop within it."""
    x = torch.ones(3, requires_grad=True)
    with instrument.profile(out, schedule=instrument.schedule("1-2,5-6")) as prof:
        for number in range(8):
            y = x * 2
            if inside or number in (0, 2):
                y.register_hook(lambda grad: prof.step())
            y.sum().backward()
            if not (inside or number in (0, 2)):
                prof.step()
    if inside:
        assert [(1, "not reached"), (2, "not reached")] == statuses(manifest(out))
        assert "step() was called in the backward pass" in manifest(out)[0]["reason"]
    else:
        assert [[2], [5, 6]] == recorded(out)


def test_a_failing_window_of_torchs_schedule_does_not_end_the_others(out: Path) -> None:
    """After a window of a schedule function fails, the next one is recorded."""

    class FailsOnce(Recorder):
        def note(self, *call: Any) -> None:
            super().note(*call)
            self.failing = ()

    recorder = FailsOnce("prepare", "capture")
    recorder.failing = ("capture",)
    recorder.note = Recorder.note.__get__(recorder)  # type: ignore[method-assign]
    schedule = torch.profiler.schedule(**TWICE)

    def body(number: int) -> None:
        recorder.failing = ("capture",) if number < 3 else ()

    run(out, body, exporter=recorder, schedule=schedule)
    assert [(1, "failed"), (2, "recorded")] == statuses(manifest(out))
    assert [6, 7] == manifest(out)[1]["steps"]


def test_a_schedule_that_raises(out: Path) -> None:
    """A schedule function that raises for one step is called again for the next."""

    def schedule(step: int) -> int:
        if step == 3:
            raise KeyError("on purpose")
        return 3 if step in (5, 6) else 0

    run(out, schedule=schedule)
    assert [[5], [6]] == recorded(out)


def test_an_on_trace_ready_that_raises(out: Path) -> None:
    """The traces are saved; the manifest has the failure."""

    def ready(prof: Any) -> None:
        raise ValueError("upload failed")

    run(out, on_trace_ready=ready)
    expected = ("recorded", "on_trace_ready failed: ValueError: upload failed")
    assert [expected, expected] == reasons(manifest(out))
    assert [[2, 3], [6, 7]] == recorded(out)


@pytest.mark.parametrize(
    ("count", "schedule", "expected"),
    [
        (3, {"at": 5, "warmup": 3}, ("skipped", "the loop ended before step 3, in warm-up")),
        (3, {"at": "1-6"}, ("partial", "the loop ended before step 3")),
        (3, {"at": 50}, ("not reached", "the loop ended before step 3")),
    ],
)
def test_a_loop_that_ends_too_early(
    out: Path, count: int, schedule: dict[str, Any], expected: tuple[str, str]
) -> None:
    """The manifest has the reason, and only a window that was open leaves a trace."""
    run(out, count=count, schedule=instrument.schedule(**schedule))
    assert [expected] == reasons(manifest(out))
    assert (expected[0] == "partial") == bool(traces(out))


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ZeroDivisionError("mine\nand more"), "ZeroDivisionError: mine"),
        (SystemExit(3), "SystemExit: 3"),
        (_Unprintable(), "_Unprintable"),
    ],
)
def test_an_exception_in_the_loop(out: Path, error: BaseException, text: str) -> None:
    """The same exception object reaches the caller, the open window is saved, and the manifest names the error."""

    def body(number: int) -> None:
        if number == 3:
            raise error

    with pytest.raises(type(error)) as caught:
        run(out, body)
    assert error is caught.value
    reason = f"the loop ended in step 3: {text}"
    assert [("partial", reason), ("not reached", reason)] == reasons(manifest(out))
    assert [[2, 3]] == recorded(out)


@pytest.mark.parametrize("place", ["_prepare_profiler", "_enable_profiler", "_disable_profiler"])
def test_a_keyboard_interrupt_while_torch_starts_or_stops(
    out: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No profiler stays active: the next run records, and annotations are idle in between."""
    from torch.autograd import profiler

    real = getattr(profiler, place)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        monkeypatch.undo()
        raise KeyboardInterrupt(result)

    monkeypatch.setattr(profiler, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(out)
    assert "failed" == manifest(out)[0]["status"]
    assert not dispatch.recording
    assert not torch.autograd._profiler_enabled()
    run(out / "again")
    assert [[2, 3], [6, 7]] == recorded(out / "again")


def test_stepping_in_on_trace_ready(out: Path) -> None:
    """A handler that calls step() skips steps, and neither closes the window again nor leaves one open."""
    run(out, count=8, schedule=instrument.schedule("1-2,5"), on_trace_ready=lambda prof: prof.step())
    assert [(1, "recorded"), (2, "recorded")] == statuses(manifest(out))


def test_a_logging_handler_that_raises(out: Path, lenient: None) -> None:
    """An error in the application's own logging handler does not reach the loop."""
    handler = logging.Handler()
    handler.emit = lambda record: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    logging.getLogger("instrument").addHandler(handler)
    try:
        run(out, on_trace_ready=lambda prof: 1 / 0)
    finally:
        logging.getLogger("instrument").removeHandler(handler)
    assert "recorded" == manifest(out)[0]["status"]


def test_a_keyboard_interrupt_in_on_trace_ready(out: Path) -> None:
    """The interrupt reaches the program, and the trace is saved."""

    def ready(prof: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(out, on_trace_ready=ready)
    assert [[2, 3]] == recorded(out)
    assert [(1, "recorded"), (2, "not reached")] == statuses(manifest(out))


def test_internal_errors_are_raised_under_strict_settings(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strict settings raise internal errors, also those of the process that finishes windows."""
    monkeypatch.setattr(settings, "strict", True)
    with pytest.raises(OSError, match="save failed on purpose"):
        run(out, exporter=Recorder("save"))
    with pytest.raises(CaptureError, match="Is a directory"):
        run(out, on_trace_ready=obstruct)


def test_windows_do_not_change_training(out: Path) -> None:
    """With all options enabled, losses and parameters are the same to the last bit."""
    trained: Trained
    options = {"record_shapes": True, "with_stack": True, "profile_memory": True, "with_flops": True}
    with instrument.profile(out, schedule=instrument.schedule(active=2), **options) as prof:
        trained = train(STEPS, prof.step)
    assert expected(STEPS) == trained


def test_each_capture_has_its_own_profiler() -> None:
    """The exporter creates a new profiler for each window, since a restarted one loses traces."""
    exporter = TorchProfilerExporter({})
    first = exporter.capture()
    first.start()  # with an unused GPU, the profiler is created only at the start
    first.discard()
    second = exporter.capture()
    second.start()
    second.discard()
    assert isinstance(first, TorchProfilerCapture)
    assert first.profiler is not second.profiler


def test_the_stand_in_for_a_profile_accepts_every_call() -> None:
    """The stand-in for a profile that could not be created has the same attributes, and does nothing."""
    prof = uncounted_profile()
    with prof:
        prof.add_metadata("key", "value")
        prof.step()
    assert (1, [], Path()) == (prof.step_num, prof.windows, prof.out)
