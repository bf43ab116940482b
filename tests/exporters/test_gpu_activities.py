"""Which devices torch's profiler records is found out when a window begins, from what the program uses by then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import instrument
from instrument import compat
from instrument.exporters.sessions import sessions
from instrument.exporters.torch_profiler import TorchProfilerExporter

from ..support import programs
from ..windows.training import manifest, train

CPU, CUDA = ProfilerActivity.CPU, ProfilerActivity.CUDA


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
    monkeypatch.setattr(sessions, "_first", True)
    monkeypatch.setattr(sessions, "without_gpu", False)
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
        {"activities": [CPU, {CUDA: ["GPU_MEMCPY"]}], "acc_events": True},
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


def test_names_of_activities_are_tried_where_that_leaves_nothing(pretended: Pretended) -> None:
    """Torch's C++ alone knows them, and the first recording of a process decides on the GPU."""
    wrong = {"activities": [{CPU: ["NONE"]}]}
    TorchProfilerExporter(wrong)
    assert sessions._first
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
    assert ({CPU}, "", 0) == (capture.profiler.activities, capture.lacks, pretended.asked)
    assert capture.save(tmp_path, "rank0.1")
    assert 0 == pretended.asked


@pytest.mark.parametrize("late", [False, True])
def test_the_gpu_is_recorded_where_it_is_used(used: Pretended, late: bool) -> None:
    """Also where that began in the warm-up."""
    used.used = not late
    capture = window(TorchProfilerExporter({}), warming=lambda: setattr(used, "used", True))
    assert ({CPU, CUDA}, "cuda", "") == (capture.profiler.activities, capture.profiler.use_device, capture.lacks)


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


@pytest.mark.parametrize(
    ("version", "lost"), [("2.11.0+cu130", False), ("2.13.0+cpu", True), ("2.14.0a0", True), ("3.0", True)]
)
def test_a_first_recording_without_the_gpu_leaves_it_out_for_good(
    used: Pretended, monkeypatch: pytest.MonkeyPatch, version: str, lost: bool
) -> None:
    """From torch 2.13 on; windows after it say so."""
    monkeypatch.setattr(torch, "__version__", version)
    exporter = TorchProfilerExporter({})
    used.used = False
    assert "" == window(exporter).lacks
    used.used = True
    for _ in range(2):
        assert lost == window(exporter).lacks.startswith("torch's profiler records no GPU in this process")


LABELS = """
import json, sys
import torch
from torch.profiler import ProfilerActivity as Activity, profile

torch.cuda.is_available = lambda: True
torch.autograd.profiler._supported_activities = lambda: {Activity.CPU, Activity.CUDA}
for word in sys.argv[2:]:
    prof = profile(activities=[Activity.CPU] + [Activity.CUDA] * (word == "gpu"))
    prof.prepare_trace()
    prof.profiler.use_device = None
    prof.start_trace()
    torch.ones(3).sum()
    prof.stop_trace()
    prof.export_chrome_trace(sys.argv[1])
with open(sys.argv[1]) as file:
    labels = [event.get("args", {}).get("labels") for event in json.load(file)["traceEvents"]]
print("GPU 0" in labels)
"""


def test_what_torch_makes_of_its_first_recording(tmp_path: Path) -> None:
    """Kineto has lanes for GPUs where it is set up for them, and the rule for that is the one of this torch."""
    script = programs.program(LABELS, tmp_path)

    def lanes(*recordings: str) -> bool:
        command = programs.python(script, [str(tmp_path / "trace.json"), *recordings])
        return programs.run(command, programs.environment()).stdout.split()[-1] == "True"

    excluded = lanes("gpu") and not lanes("cpu", "gpu")
    assert excluded == compat.excludes_gpu(torch.autograd.profiler.profile(use_kineto=True))


def test_a_first_recording_with_the_gpu_leaves_it_in(used: Pretended) -> None:
    """One of the CPU alone may follow, and one of the program's own may be the first."""
    sessions.watch()
    with profile(activities=[CPU, CUDA]):
        torch.ones(3).sum()
    assert not sessions._first
    window(TorchProfilerExporter({"activities": [CPU]}))
    assert "" == window(TorchProfilerExporter({})).lacks


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
    assert sessions._first
    assert sessions.capture is None
    assert not compat.profiler_running()
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
        compat.refuse_late({"activities": ["cpu"]})
    with pytest.raises(AssertionError, match="No valid profiler activities"):
        compat.refuse_late({"activities": []})
