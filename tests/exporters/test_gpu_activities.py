"""Which devices torch's profiler records is found out when a window begins, from what the program uses by then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import instrument
from instrument.compat import kineto, profilers
from instrument.exporters.sessions import sessions
from instrument.exporters.torch_profiler import TorchProfilerExporter

from ..support import programs
from ..support.torch_versions import names_activities
from ..windows.training import manifest, train

CPU, CUDA = ProfilerActivity.CPU, ProfilerActivity.CUDA
NAMED = pytest.mark.skipif(not names_activities(), reason="this torch takes no names of single activities")


class Pretended:
    """A CUDA build of torch, whose GPU is in use once ``used`` is set; ``asked`` counts looks for devices."""

    def __init__(self) -> None:
        self.used = False
        self.asked = 0

    def supported(self) -> set[ProfilerActivity]:
        self.asked += 1
        return {CPU, CUDA}

    def fail(self, *_: Any) -> None:
        raise AssertionError("the GPU was touched")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    with profile(activities=[CPU]):  # else a pretended GPU decides what the process records
        pass
    made = Pretended()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: made.used)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: made.supported() is not None)
    for name in ("_lazy_init", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, made.fail)
    for module in (torch.autograd, torch.autograd.profiler):
        monkeypatch.setattr(module, "_supported_activities", made.supported)
    monkeypatch.setattr(sessions, "_records_gpu", True)
    return made


@pytest.fixture
def used(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """The GPU is in use, and can be synchronized."""
    pretended.used = True
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return pretended


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"record_shapes": True, "with_stack": True},
        {"activities": [CPU]},
        {"activities": [CPU, CUDA]},
        {"activities": [CUDA]},
        {"activities": iter([CPU, CUDA])},
        pytest.param({"activities": [CPU, {CUDA: ["GPU_MEMCPY"]}], "acc_events": True}, marks=NAMED),
    ],
)
def test_an_exporter_asks_for_no_device(pretended: Pretended, options: dict[str, Any]) -> None:
    """Its options are checked without."""
    TorchProfilerExporter(options).prepare()
    assert 0 == pretended.asked


@pytest.mark.parametrize(
    "options",
    [
        {"activities": []},
        {"activities": ["cpu"]},
        {"activities": [CPU, "cuda"]},
        {"activities": [CPU, CPU, 3]},
        {"activities": 3},
        {"post_processing_timeout_s": -1},
    ],
)
def test_wrong_options_are_refused_all_the_same(pretended: Pretended, options: dict[str, Any]) -> None:
    """At once, and without a look for devices."""
    with pytest.raises(ValueError, match=r"torch\.profiler refuses"):
        TorchProfilerExporter(options)
    assert 0 == pretended.asked


@NAMED
def test_names_of_activities_are_tried_where_that_leaves_nothing(pretended: Pretended) -> None:
    """Torch's C++ alone knows them, and the first recording of a process decides on the GPU."""
    wrong = {"activities": [{CPU: ["NONE"]}]}
    TorchProfilerExporter(wrong)
    assert sessions.owner is None
    pretended.used = True
    with pytest.raises(ValueError, match="activity type name: 'NONE'"):
        TorchProfilerExporter(wrong)


def window(exporter: TorchProfilerExporter, *, warming: Callable[[], object] = lambda: None) -> Any:
    """One window of one step, after ``warming()`` in its warm-up."""
    capture = exporter.capture()
    warming()
    capture.start()
    capture.step(1)
    torch.ones(3).sum()
    capture.stop()
    return capture


def test_the_cpu_alone_is_recorded_where_no_gpu_is_used(pretended: Pretended, tmp_path: Path) -> None:
    """No device is asked for, until the trace is written."""
    capture = window(TorchProfilerExporter({}))
    assert ({CPU}, [], 0) == (capture.profiler.activities, capture.incomplete, pretended.asked)
    assert capture.save(tmp_path, "rank0.1")
    assert 0 == pretended.asked


@pytest.mark.parametrize("late", [False, True])
def test_the_gpu_is_recorded_where_it_is_used(used: Pretended, late: bool) -> None:
    """Also where that began in the warm-up."""
    used.used = not late
    capture = window(TorchProfilerExporter({}), warming=lambda: setattr(used, "used", True))
    assert ({CPU, CUDA}, "cuda") == (capture.profiler.activities, capture.profiler.use_device)
    assert [] == capture.incomplete


def test_one_exporter_follows_the_program(used: Pretended) -> None:
    """Each window asks anew."""
    exporter = TorchProfilerExporter({"record_shapes": True})
    used.used = False
    assert {CPU} == window(exporter).profiler.activities
    used.used = True
    assert {CPU, CUDA} == window(exporter).profiler.activities
    used.used = False
    assert {CPU} == window(exporter).profiler.activities


@pytest.mark.parametrize("activities", [None, [CPU]])
@pytest.mark.parametrize("plan", [None, "1-2"])
def test_a_window_that_the_gpu_comes_into_is_partial(
    used: Pretended, tmp_path: Path, capfd: pytest.CaptureFixture[str], activities: Any, plan: str | None
) -> None:
    """The manifest and the summary say what it lacks, unless the program asked for the CPU alone."""
    used.used = False
    options = {} if activities is None else {"activities": activities}
    with instrument.profile(tmp_path, schedule=plan, **options) as prof:
        train(4, prof.step, lambda number: setattr(used, "used", number >= 1))
    (entry,) = manifest(tmp_path)
    reason = (
        "the GPU was first used inside the window, which is recorded without it; have the first step before it, or"
        " call torch.cuda.init()"
    )
    said = f"Recorded in part: {reason}." in " ".join(capfd.readouterr().err.split())
    if activities is None:
        assert (entry["status"], entry["reason"], said) == ("partial", reason, True)
    else:
        assert (entry["status"], entry["reason"], said) == ("recorded", None, False)


LOST = "torch's profiler records no GPU in this process"


@pytest.mark.parametrize("set_up", [False, True])
def test_whether_the_gpu_is_recorded_is_seen_in_the_first_trace(
    used: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_up: bool
) -> None:
    """It is the same for all windows of a process; one of the CPU alone lacks nothing."""
    monkeypatch.setattr(sessions, "_records_gpu", None)
    looked: list[Path] = []

    def look(trace: Path) -> bool:
        looked.append(trace)
        return set_up

    monkeypatch.setattr(kineto, "is_set_up_for_gpu", look)
    captures = [window(TorchProfilerExporter(options)) for options in ({"activities": [CPU]}, {}, {})]
    for number, capture in enumerate(captures):
        capture.save(tmp_path, f"rank0.{number}")
    assert [captures[1].raw] == looked
    assert [True, set_up, set_up] == [[] == capture.incomplete for capture in captures]
    assert set_up or captures[2].incomplete[0].startswith(LOST)


def test_a_window_that_is_incomplete_for_two_reasons(
    used: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in the manifest."""
    monkeypatch.setattr(sessions, "_records_gpu", False)

    def interfere(number: int) -> None:
        if number == 1:
            with profile(activities=[CPU]):
                pass

    with instrument.profile(tmp_path, schedule="1-2") as prof:
        train(4, prof.step, interfere)
    (entry,) = manifest(tmp_path)
    other, gpu = entry["reason"].split("; ", 1)
    assert ("partial", True) == (entry["status"], gpu.startswith(LOST))
    assert "another torch profiler began inside the window, which ended its recording" == other


PRETEND = """
import torch
import torch.profiler
from torch.profiler import ProfilerActivity as Activity

torch.version.cuda = "13.0"
for name in ("is_initialized", "is_available"):
    setattr(torch.cuda, name, lambda: True)
torch.cuda.synchronize = lambda *_: None
torch.cuda.is_current_stream_capturing = lambda: False
torch.autograd.profiler._supported_activities = lambda: {Activity.CPU, Activity.CUDA}
torch.autograd._supported_activities = torch.autograd.profiler._supported_activities
device = "cpu"
"""
RECORDINGS = """
import json, sys
import torch
from torch.profiler import ProfilerActivity as Activity, profile
import instrument

torch.ones(1, device=device)
out, work, *own = sys.argv[1:]
for word in own:  # the program's, before anything of instrument's is used
    with profile(activities=[Activity.CPU] + [Activity.CUDA] * (word == "both")):
        torch.ones(3, device=device).sum()
with instrument.profile(out, schedule="0") as prof:
    torch.ones(3, device=device if work == "busy" else "cpu").sum()
    prof.step()
window, = prof.windows
trace = instrument.read_trace(f"{out}/{window['files'][0]['path']}")
print(json.dumps([window["reason"], len(trace.kernels)]))
"""
OWN = pytest.mark.parametrize("own", [[], ["both"], ["cpu"], ["cpu", "both"], ["both", "cpu"]], ids="-".join)


def after_own_recordings(script: str, folder: Path, *words: str) -> tuple[str | None, int]:
    """Why a window lacks the GPU, and how many kernels it has."""
    command = programs.python(programs.program(script, folder), [str(folder / "out"), *words])
    done = programs.run(command, programs.environment({"INSTRUMENT_SUMMARY": "0"}))
    reason, kernels = json.loads(done.stdout.splitlines()[-1])
    return reason, kernels


@OWN
def test_the_first_recording_of_a_process_decides(tmp_path: Path, own: list[str]) -> None:
    """It may be the program's own, and over before the library follows torch's profilers."""
    if own[:1] != ["cpu"] and torch.__version__ < "2.13" and not torch.cuda.is_available():
        # Kineto's C++ asks the driver there, which PRETEND cannot replace; the test on a GPU below covers it.
        pytest.skip("up to torch 2.12 a machine without a GPU cannot pretend to have one")
    reason, _ = after_own_recordings(PRETEND + RECORDINGS, tmp_path, "busy", *own)
    if own[:1] == ["cpu"]:
        assert reason is not None
        assert reason.startswith(LOST)
        assert "the program's own" in reason
    else:
        assert reason is None


@pytest.mark.gpu
@pytest.mark.parametrize("work", ["busy", "idle"])
@OWN
def test_kernels_are_there_or_the_reason_why_not(tmp_path: Path, own: list[str], work: str) -> None:
    """A window in which the GPU does nothing is complete."""
    reason, kernels = after_own_recordings('device = "cuda"\n' + RECORDINGS, tmp_path, work, *own)
    lost = own[:1] == ["cpu"] and torch.__version__ >= "2.13"
    assert lost == (reason or "").startswith(LOST)
    assert (reason is None) == (not lost)
    assert (kernels > 0) == (work == "busy" and not lost)


def test_a_profiler_in_its_own_warm_up_is_left_alone(pretended: Pretended) -> None:
    """A window that prepares late is refused where another profiler prepared in the meantime."""
    capture = TorchProfilerExporter({}).capture()
    other = profile(activities=[CPU])
    other.prepare_trace()
    with pytest.raises(instrument.errors.CaptureError, match="another torch profiler is active"):
        capture.start()
    capture.discard()
    other.start_trace()
    torch.ones(3).sum()
    other.stop_trace()
    assert "aten::sum" in {event.name for event in other.events()}


def test_a_discarded_window_that_was_never_prepared_leaves_nothing(pretended: Pretended) -> None:
    """Torch's profiler was not touched."""
    TorchProfilerExporter({}).capture().discard()
    assert sessions.owner is None
    assert sessions.capture is None
    assert not profilers.running()
    window(TorchProfilerExporter({}))


def test_events_accumulate_over_windows_that_prepare_late(pretended: Pretended) -> None:
    """With ``acc_events`` the second holds those of both."""
    exporter = TorchProfilerExporter({"acc_events": True})
    one = len(window(exporter).profiler.events())
    exporter.capture().discard()
    assert len(window(exporter).profiler.events()) >= 2 * one


def test_versions_of_torch_without_names_of_activities(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not an activity is refused, also where torch itself would take it."""
    made = profile(activities=[CPU])
    made.activities = {"cpu"}
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: made)
    with pytest.raises(TypeError, match="Expected ProfilerActivity"):
        profilers.refuse_late({"activities": ["cpu"]})
    with pytest.raises(AssertionError, match="No valid profiler activities"):
        profilers.refuse_late({"activities": []})
