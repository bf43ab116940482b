"""A torch session that is never stopped does not make later recordings fail, of windows or of the program.

Torch 2.11 and older then refuse every later profiler of the process; the tests make newer versions do so too.
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

from instrument.base.guard import guard
from instrument.record.exporters.sessions import sessions
from instrument.record.exporters.torch_profiler import TorchProfilerExporter

from ..support import counted_gpu, programs, warm

pytestmark = pytest.mark.usefixtures("lenient")
REFUSAL = "Can't disable Kineto profiler when it's not running"


class RefusingKineto:
    """Refuses to prepare while an unstopped session is active, as torch 2.11 does; counts its refusals."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = False
        self.refusal = REFUSAL
        self.refused = self.ended = 0
        functions: Any = torch._C._autograd
        self._prepare, self._enable = profiler._prepare_profiler, functions._enable_profiler
        monkeypatch.setattr(profiler, "_prepare_profiler", self._preparing)
        monkeypatch.setattr(functions, "_enable_profiler", self._enabling)

    def leave(self) -> None:
        """Prepare a session that no profiler stops."""
        unused = profiler.profile(use_cpu=True)
        self._prepare(unused.config(), unused.kineto_activities)
        self.left = True

    def end(self) -> None:
        """End the session, so that the next test starts without one."""
        if self.left:
            self.refusal = REFUSAL
            sessions.on_ended()  # pytest keeps errors that hold torch's profilers alive
            record_ops()

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
def kineto(monkeypatch: pytest.MonkeyPatch) -> Iterator[RefusingKineto]:
    """Torch's profiler with the refusal of torch 2.11, once the library tracks it and it has recorded once."""
    TorchProfilerExporter({}).prepare()
    assert "aten::prod" in record_ops()
    with monkeypatch.context() as patch:
        refusing = RefusingKineto(patch)
        yield refusing
        refusing.end()


def record_ops() -> set[str]:
    """Record with the program's own profiler; return the names of its events."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as prof:
        torch.ones(3).prod()
    return {event.name for event in prof.events()}


def test_the_programs_profiler_after_an_unstopped_session(kineto: RefusingKineto) -> None:
    """The program's profiler records as usual, and is inactive afterwards."""
    kineto.leave()
    assert "aten::prod" in record_ops()
    assert (1, 1) == (kineto.refused, kineto.ended)
    assert not torch.autograd._profiler_enabled()


def test_complete_recordings_need_no_extra_calls(kineto: RefusingKineto) -> None:
    """After recordings that were stopped, the library makes no enabling call of its own."""
    for _ in range(3):
        capture = TorchProfilerExporter({}).capture()
        capture.start()
        capture.stop()
        record_ops()
    assert (0, 0) == (kineto.refused, kineto.ended)


def test_any_other_error_of_torch_passes(kineto: RefusingKineto) -> None:
    """Only the known refusal means that a session is active; to enable a profiler without one crashes torch."""
    kineto.leave()
    kineto.refusal = "no such activity"
    with pytest.raises(RuntimeError, match="no such activity"):
        record_ops()
    assert 0 == kineto.ended


def test_a_session_of_another_profiler_is_not_ended(kineto: RefusingKineto) -> None:
    """A profiler that prepared on another thread continues; the second one gets torch's refusal."""
    first: list[profiler.profile] = []

    def begin() -> None:
        first.append(profiler.profile(use_cpu=True))
        first[0]._prepare_trace()
        kineto.left = True

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match=REFUSAL):
        record_ops()
    assert 0 == kineto.ended
    first[0]._start_trace()
    first[0].__exit__(None, None, None)
    kineto.left = False


def test_an_error_in_ending_a_session_leaves_torchs_error(
    kineto: RefusingKineto, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program gets the same error as without this library."""
    kineto.leave()
    failures = guard.failures.copy()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("enabling failed on purpose")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=REFUSAL):
        patch.setattr(torch._C._autograd, "_enable_profiler", fail)
        record_ops()
    assert guard.failures == failures


def test_a_start_that_fails_beside_another_threads_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler that the program started on another thread in between is still known to be active."""
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


UNSTOPPED = """
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
    with instrument.profile(sys.argv[1], schedule=instrument.schedule("1", warmup=0)) as prof:
        for _ in range(3):
            prof.step()
except KeyboardInterrupt:
    pass
setattr(profiler, place, real)
before, noted = prof.windows, getattr(profiler, "_is_profiler_enabled", False)
with profile(activities={activities}) as other:
    torch.ones(3{device}).prod()
with instrument.profile(sys.argv[1] + "-again", schedule=instrument.schedule("1", warmup=0)) as prof:
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
def test_recordings_after_an_unstopped_window(tmp_path: Path, place: str, kind: str) -> None:
    """Wherever torch failed or was interrupted, the GPU is untouched, and the program and a window can record."""
    site = counted_gpu.install(tmp_path)
    paths = os.pathsep.join([str(site), str(programs.ROOT / "src")])
    env = programs.environment({"PYTHONPATH": paths, "INSTRUMENT_SUMMARY": "0"})
    script = programs.program(UNSTOPPED.format(**CPU), tmp_path)
    done = warm.run(programs.python(script, [str(tmp_path / "out"), place, kind]), env, check=True)
    assert [["failed", "recorded"], False, True, 0] == json.loads(done.stdout.splitlines()[-1])
    assert [] == counted_gpu.noted(site)


@pytest.mark.gpu
@pytest.mark.parametrize(("place", "kind"), PLACES)
def test_recordings_of_a_gpu_after_an_unstopped_window(tmp_path: Path, place: str, kind: str) -> None:
    """The program's own profiler records its kernels, and so does the next window."""
    script = programs.program(UNSTOPPED.format(**GPU), tmp_path)
    command = programs.python(script, [str(tmp_path / "out"), place, kind])
    done = programs.run(command, programs.environment({"INSTRUMENT_SUMMARY": "0"}))
    statuses, noted, seen, kernels = json.loads(done.stdout.splitlines()[-1])
    assert (["failed", "recorded"], False, True) == (statuses, noted, seen)
    assert kernels > 0
