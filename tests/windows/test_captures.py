"""CUDA graph captures: no window opens or closes while a stream captures; the next step after it does that."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument.record import cuda_graphs
from instrument.record.exporters.sessions import sessions
from instrument.record.exporters.torch_profiler import TorchProfilerCapture
from instrument.record.planning.schedule import Schedule
from instrument.record.windows.profile import Profile

from ..support.cuda_graphs import Device, Training, emulate
from .training import Recorder, manifest, recorded, statuses

REASON = "step() was called while a CUDA graph was captured"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return emulate(monkeypatch)


def call_during_capture(capture: Callable[[Callable[[], None]], None], during: Callable[[], object]) -> None:
    """Call ``during`` on this thread while another thread captures."""
    begun, finished = threading.Event(), threading.Event()

    def inside() -> None:
        begun.set()
        finished.wait(60)

    thread = threading.Thread(target=capture, args=(inside,))
    thread.start()
    begun.wait(60)
    try:
        during()
    finally:
        finished.set()
        thread.join()


def train_three_steps(training: Training, out: Path, schedule: Schedule) -> Profile:
    """Start a profile and train three steps."""
    prof = instrument.profile(out, schedule=schedule)
    prof.start()
    for _ in range(3):
        training.step()
        prof.step()
    return prof


class CaptureSensitiveRecorder(Recorder):
    """An exporter that reports a violation when it starts or stops during a capture."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def note(self, *call: Any) -> None:
        super().note(*call)
        if call[0] in ("capture", "start", "stop", "discard"):
            self._device.forbids(call[0])


@pytest.mark.parametrize("warmups", [3, 4])
@pytest.mark.parametrize("at", ["3-5", "4-6", "50-52"])
def test_a_loop_that_steps_by_hand(out: Path, device: Device, warmups: int, at: str) -> None:
    """The capture belongs to the step that the first replay ends."""
    with instrument.profile(out, schedule=instrument.schedule(at=at, warmup=1)) as prof:
        Training(warmups).run(100, prof.step)
    first, last = map(int, at.split("-"))
    assert recorded(out) == [list(range(first, last + 1))]
    assert statuses(manifest(out)) == [(1, "recorded")]
    assert device.violations == []


@pytest.mark.parametrize("tool", ["torch", "another"])
@pytest.mark.parametrize(
    ("at", "status", "steps"),
    [
        ("1-3", "recorded", [1, 3]),  # ends in the capture
        ("2-5", "recorded", [2, 5]),  # continues in it
        ("4-6", "partial", [5, 6]),  # begins in it
        ("4", "skipped", None),  # lies in it
        ("50-52", "recorded", [50, 52]),
    ],
)
def test_steps_during_the_capture(
    out: Path, device: Device, at: str, status: str, steps: list[int] | None, tool: str
) -> None:
    """A window that is due during a capture opens, or ends, at the next step after it."""
    arguments: dict[str, Any] = {} if tool == "torch" else {"exporter": CaptureSensitiveRecorder(device)}
    with instrument.profile(out, schedule=instrument.schedule(at), **arguments) as prof:
        Training(3).run(100, prof.step, prof.step)
    assert prof.step_num == 104
    (entry,) = manifest(out)
    assert (entry["status"], entry["steps"]) == (status, steps)
    assert (entry["reason"] is None) == (status == "recorded")
    assert REASON in (entry["reason"] or REASON)
    assert device.violations == []
    if tool == "torch" and steps is not None:
        assert recorded(out) == [list(range(steps[0], steps[1] + 1))]


def test_several_windows_in_a_capture(out: Path, device: Device) -> None:
    """Each window that is due during a capture has a line in the manifest."""
    with instrument.profile(out, schedule=instrument.schedule("4,6,8-10,12")) as prof:
        Training(3, updates=6).run(10, prof.step, prof.step)
    assert sorted(statuses(manifest(out))) == [(1, "skipped"), (2, "skipped"), (3, "partial"), (4, "recorded")]
    assert recorded(out) == [[10], [12]]
    assert device.violations == []


def test_another_thread_captures(out: Path, device: Device) -> None:
    """A window opens and closes at the first step after the other thread's capture."""
    training, other = Training(), Training()

    def step() -> None:
        training.step()
        prof.step()

    with instrument.profile(out, schedule=instrument.schedule("1-3,6-7")) as prof:
        call_during_capture(other.capture, step)
        step()
        step()
        call_during_capture(other.capture, step)
        for _ in range(6):
            step()
    assert recorded(out) == [[2, 3], [6, 7]]
    assert statuses(manifest(out)) == [(1, "partial"), (2, "recorded")]
    assert device.violations == []


def test_a_loop_that_ends_in_a_capture(out: Path, device: Device) -> None:
    """The window is saved when the capture ends."""
    training = Training()
    prof = train_three_steps(training, out, instrument.schedule("1-5"))
    training.capture(prof.stop)
    assert [(entry["status"], entry["steps"]) for entry in manifest(out)] == [("partial", [1, 2])]
    assert device.violations == []


def test_a_loop_that_ends_while_another_thread_captures(out: Path, device: Device) -> None:
    """`stop` waits for the end of the other thread's capture."""
    training, waiting = Training(), threading.Event()

    class ObservedEvent(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waiting.set()
            return super().wait(timeout)

    prof = train_three_steps(training, out, instrument.schedule("1-5"))
    begun = threading.Event()

    def inside() -> None:
        begun.set()
        waiting.wait(60)

    thread = threading.Thread(target=Training().capture, args=(inside,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("instrument.record.cuda_graphs.Event", ObservedEvent)
        thread.start()
        begun.wait(60)
        prof.stop()
    thread.join()
    assert waiting.is_set()
    assert [(entry["status"], entry["steps"]) for entry in manifest(out)] == [("partial", [1, 2])]
    assert device.violations == []


def test_an_abandoned_capture_whose_graph_is_deleted(out: Path, device: Device) -> None:
    """A capture that never ends, and whose graph is deleted, does not keep windows from opening."""
    training = Training()
    with instrument.profile(out, schedule=instrument.schedule("1-2")) as prof:
        training.graph.capture_begin()
        device.capturing.clear()
        del training.graph
        for _ in range(4):
            training.step()
            prof.step()
    assert recorded(out) == [[1, 2]]


def test_another_current_stream_in_a_capture(out: Path, device: Device) -> None:
    """A capture continues while its thread has another current stream, and no window opens or closes."""
    training = Training()
    prof = train_three_steps(training, out, instrument.schedule("1-50"))
    with torch.cuda.graph(training.graph):
        prof.stop()
        with torch.cuda.stream(torch.cuda.Stream()):
            prof.step()
        assert device.violations == []
        assert [] == list(out.glob("[!.]*"))
    (entry,) = manifest(out)
    assert entry["status"] == "partial"
    assert device.violations == []


def test_a_stream_whose_state_cannot_be_read(out: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture of unknown state counts as active: the window ends after it, and no error is raised."""
    training = Training()
    prof = train_three_steps(training, out, instrument.schedule("1-50"))
    with torch.cuda.graph(training.graph), monkeypatch.context() as without:
        without.delattr(torch.cuda, "stream")
        prof.stop()
        prof.step()
        assert [] == list(out.glob("[!.]*"))
    assert [(entry["status"], entry["steps"]) for entry in manifest(out)] == [("partial", [1, 3])]
    assert device.violations == []


@pytest.mark.parametrize("after", ["step", "stop", "exit"])
@pytest.mark.parametrize("phase", ["warm-up", "recorded"])
def test_a_loop_that_ends_in_an_abandoned_capture(
    out: Path, device: Device, monkeypatch: pytest.MonkeyPatch, phase: str, after: str
) -> None:
    """The graph is kept, but its capture has ended: the next call of the profile ends the window."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", lambda call: at_exit.append(call))
    training = Training()
    at, active, warmup = (50, 1, 50) if phase == "warm-up" else (1, 50, 1)
    prof = train_three_steps(training, out, instrument.schedule(at=at, active=active, warmup=warmup))
    training.graph.capture_begin()
    prof.stop()
    assert [] == list(out.glob("[!.]*"))
    device.capturing.clear()
    {"step": prof.step, "stop": prof.stop, "exit": at_exit[0]}[after]()
    (entry,) = manifest(out)
    assert entry["status"] == ("partial" if phase == "recorded" else "skipped")
    assert "a CUDA graph was captured" not in entry["reason"]
    assert device.violations == []
    assert not torch.autograd._profiler_enabled()
    training.capture()
    assert len(manifest(out)) == 1


def test_an_abandoned_capture_whose_graph_is_kept(out: Path, device: Device) -> None:
    """A capture that never ends, and whose graph is kept, does not keep windows from opening."""
    training = Training()
    with instrument.profile(out, schedule=instrument.schedule("1-2")) as prof:
        training.graph.capture_begin()
        device.capturing.clear()
        for _ in range(4):
            training.step()
            prof.step()
    assert recorded(out) == [[1, 2]]
    assert statuses(manifest(out)) == [(1, "recorded")]


def test_a_loop_that_ends_beside_a_very_long_capture(
    out: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a limited wait, the window ends without a synchronization, which would break the capture."""
    monkeypatch.setattr(cuda_graphs, "_CAPTURE_WAIT_S", 0)
    training = Training()
    prof = train_three_steps(training, out, instrument.schedule("1-5"))
    capture = sessions.capture
    assert isinstance(capture, TorchProfilerCapture)
    capture.profiler.profiler.use_device = "cuda"
    call_during_capture(Training().capture, prof.stop)
    assert [(entry["status"], entry["steps"]) for entry in manifest(out)] == [("partial", [1, 2])]
    assert "a CUDA graph was captured when the window ended" in manifest(out)[0]["reason"]
    assert device.violations == ["stop_trace"]
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("at", ["3-5", "4-6"])
def test_a_loop_over_items(out: Path, device: Device, at: str) -> None:
    """An item that captures and replays counts as one step."""
    training = Training()
    for number in instrument.steps(range(60), out, at=at):
        if number < 3:
            training.step()
            continue
        if number == 3:
            training.capture()
        training.graph.replay()
    first, last = map(int, at.split("-"))
    assert recorded(out) == [list(range(first, last + 1))]
    assert device.violations == []


def test_patches_are_undone(out: Path, device: Device) -> None:
    """`torch.cuda.CUDAGraph` is restored once no window is open or planned."""
    before = {name: vars(torch.cuda.CUDAGraph)[name] for name in ("capture_begin", "capture_end", "replay")}
    with instrument.profile(out, schedule=instrument.schedule("1")) as prof:
        Training().run(5, prof.step)
    assert before == {name: vars(torch.cuda.CUDAGraph)[name] for name in before}
