"""A recording that was left without its stop does not make a later one fail, a window or the program's own.

Torch 2.11 and before refuse every later profiler of the process then; newer versions are made to do so here.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity

from instrument.exporters.sessions import sessions
from instrument.exporters.torch_profiler import TorchProfilerExporter
from instrument.guard import guard

from ..support import counted_gpu, programs

pytestmark = pytest.mark.usefixtures("lenient")
REFUSAL = "Can't disable Kineto profiler when it's not running"


class Kineto:
    """Refuses to prepare while a session is on that was left, as torch 2.11 does; counts what ends one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = False
        self.refusal = REFUSAL
        self.refused = self.ended = 0
        functions: Any = torch._C._autograd
        self._prepare, self._enable = profiler._prepare_profiler, functions._enable_profiler
        monkeypatch.setattr(profiler, "_prepare_profiler", self._preparing)
        monkeypatch.setattr(functions, "_enable_profiler", self._enabling)

    def leave(self) -> None:
        """Prepare a session for nobody."""
        made = profiler.profile(use_cpu=True)
        self._prepare(made.config(), made.kineto_activities)
        self.left = True

    def end(self) -> None:
        """Leave nothing to the next test."""
        if self.left:
            self.refusal = REFUSAL
            sessions.left()  # torch's profilers whose errors pytest keeps are there still
            recorded()

    def _preparing(self, *arguments: Any, **options: Any) -> None:
        if self.left:
            self.refused += 1
            raise RuntimeError(self.refusal)
        self._prepare(*arguments, **options)

    def _enabling(self, *arguments: Any) -> None:
        self.ended += 1
        self._enable(*arguments)
        self.left = False


@pytest.fixture
def kineto(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kineto]:
    """Each test begins where torch's profilers are followed and recorded once."""
    TorchProfilerExporter({}).prepare()
    assert "aten::prod" in recorded()
    with monkeypatch.context() as patch:
        made = Kineto(patch)
        yield made
        made.end()


def recorded() -> set[str]:
    """Record with a profiler of the program's own; return the names of what it saw."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as prof:
        torch.ones(3).prod()
    return {event.name for event in prof.events()}


def test_the_programs_profiler_after_a_session_that_was_left(kineto: Kineto) -> None:
    """It records as if nothing had been, and is on nowhere afterwards."""
    kineto.leave()
    assert "aten::prod" in recorded()
    assert (1, 1) == (kineto.refused, kineto.ended)
    assert not torch.autograd._profiler_enabled()


def test_nothing_is_enabled_where_recordings_end_well(kineto: Kineto) -> None:
    """Torch alone prepares, enables and disables."""
    for _ in range(3):
        capture = TorchProfilerExporter({}).capture()
        capture.start()
        capture.stop()
        recorded()
    assert (0, 0) == (kineto.refused, kineto.ended)


def test_another_error_of_torchs_passes(kineto: Kineto) -> None:
    """Only that one says that a session is on: to enable a profiler without any crashes torch."""
    kineto.leave()
    kineto.refusal = "no such activity"
    with pytest.raises(RuntimeError, match="no such activity"):
        recorded()
    assert 0 == kineto.ended


def test_a_session_of_another_profiler_is_not_ended(kineto: Kineto) -> None:
    """One that prepared on another thread goes on; torch's refusal reaches the one that comes second."""
    first: list[profiler.profile] = []

    def begin() -> None:
        first.append(profiler.profile(use_cpu=True))
        first[0]._prepare_trace()
        kineto.left = True

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match=REFUSAL):
        recorded()
    assert 0 == kineto.ended
    first[0]._start_trace()
    first[0].__exit__(None, None, None)
    kineto.left = False


def test_an_error_in_ending_it_leaves_torchs_own(kineto: Kineto, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches the program is what it would see without this library."""
    kineto.leave()
    failures = guard.failures.copy()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("enabling failed on purpose")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=REFUSAL):
        patch.setattr(torch._C._autograd, "_enable_profiler", fail)
        recorded()
    assert guard.failures == failures


def test_a_start_that_fails_beside_another_threads_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler of the program that began on another thread in between is still known to be on."""
    done = threading.Event()
    capture = TorchProfilerExporter({}).capture()

    def record() -> None:
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]):
            recording.set()
            done.wait(60)

    def fail(_: profiler.profile) -> None:
        monkeypatch.undo()
        thread.start()
        assert recording.wait(60)
        raise ZeroDivisionError("starting failed on purpose")

    recording = threading.Event()
    thread = threading.Thread(target=record)
    monkeypatch.setattr(profiler.profile, "_start_trace", fail)
    try:
        with pytest.raises(ZeroDivisionError):
            capture.start()
        assert profiler._is_profiler_enabled
    finally:
        done.set()
        thread.join()
    assert not profiler._is_profiler_enabled


LEFT = """
import json, sys
import torch, instrument
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

{first}
place, kind, real = sys.argv[2], sys.argv[3], getattr(profiler, sys.argv[2])

def fail(*arguments, **options):
    if kind == "after":
        setattr(profiler, place, real)
        real(*arguments, **options)
    raise (KeyboardInterrupt if kind == "after" else RuntimeError)("on purpose")

setattr(profiler, place, fail)
try:
    with instrument.profile(sys.argv[1], schedule="1") as prof:
        for _ in range(3):
            prof.step()
except KeyboardInterrupt:
    pass
setattr(profiler, place, real)
before, noted = prof.windows, getattr(profiler, "_is_profiler_enabled", False)
with profile(activities={activities}) as other:
    torch.ones(3{device}).prod()
with instrument.profile(sys.argv[1] + "-again", schedule="1") as prof:
    for _ in range(3):
        torch.ones(3{device}).prod()
        prof.step()
kernels = [event.name for event in other.events() if event.device_type != torch.autograd.DeviceType.CPU]
names = [event.name for event in other.events()]
statuses = [entry["status"] for entry in before + prof.windows]
print(json.dumps([statuses, noted, "aten::prod" in names, len(kernels)]))
"""
CPU = {"first": "", "activities": "[ProfilerActivity.CPU]", "device": ""}
GPU = {
    "first": "torch.ones(3, device='cuda').prod(); torch.cuda.synchronize()",
    "activities": "[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
    "device": ", device='cuda'",
}
PLACES = [(place, kind) for place in ("_prepare_profiler", "_enable_profiler", "_disable_profiler")
          for kind in ("instead", "after")]  # fmt: skip


@pytest.mark.parametrize(("place", "kind"), PLACES)
def test_recordings_after_a_window_that_was_left(tmp_path: Path, place: str, kind: str) -> None:
    """Wherever torch failed or was interrupted, no GPU is asked for, and the program and a window can record."""
    site = counted_gpu.install(tmp_path)
    paths = os.pathsep.join([str(site), str(programs.ROOT / "src")])
    env = programs.environment({"PYTHONPATH": paths, "INSTRUMENT_SUMMARY": "0"})
    script = programs.program(LEFT.format(**CPU), tmp_path)
    done = programs.run(programs.python(script, [str(tmp_path / "out"), place, kind]), env)
    assert [["failed", "recorded"], False, True, 0] == json.loads(done.stdout.splitlines()[-1])
    assert [] == counted_gpu.noted(site)


@pytest.mark.gpu
@pytest.mark.parametrize(("place", "kind"), PLACES)
def test_recordings_of_a_gpu_after_a_window_that_was_left(tmp_path: Path, place: str, kind: str) -> None:
    """The program's own profiler records its kernels, and the next window is there."""
    script = programs.program(LEFT.format(**GPU), tmp_path)
    command = programs.python(script, [str(tmp_path / "out"), place, kind])
    done = programs.run(command, programs.environment({"INSTRUMENT_SUMMARY": "0"}))
    statuses, noted, seen, kernels = json.loads(done.stdout.splitlines()[-1])
    assert (["failed", "recorded"], False, True) == (statuses, noted, seen)
    assert kernels > 0
