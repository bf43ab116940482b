"""The choice of activities: a window records the GPU if the program uses it by the window's start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import instrument
from instrument.base.compat import kineto, profilers
from instrument.record.exporters.sessions import sessions
from instrument.record.exporters.torch_profiler import TorchProfilerExporter

from ..support import programs, warm
from ..support.torch_versions import names_activities
from ..windows.training import manifest, train

pytestmark = pytest.mark.process

CPU, CUDA = ProfilerActivity.CPU, ProfilerActivity.CUDA
NAMED = pytest.mark.skipif(not names_activities(), reason="this torch does not accept names of single activities")


class EmulatedGpu:
    """A CUDA build of torch whose GPU is in use once ``used`` is set; ``queries`` counts queries for devices."""

    def __init__(self) -> None:
        self.used = False
        self.queries = 0

    def supported(self) -> set[ProfilerActivity]:
        self.queries += 1
        return {CPU, CUDA}

    def fail(self, *_: Any) -> None:
        raise AssertionError("the GPU was touched")


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    with profile(activities=[CPU]):  # else an emulated GPU decides what the process records
        pass
    emulated = EmulatedGpu()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: emulated.used)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: emulated.supported() is not None)
    for name in ("_lazy_init", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, emulated.fail)
    for module in (torch.autograd, torch.autograd.profiler):
        monkeypatch.setattr(module, "_supported_activities", emulated.supported)
    monkeypatch.setattr(kineto, "is_set_up_for_gpu", lambda _: True)
    return emulated


@pytest.fixture
def used_gpu(emulated_gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    """The GPU is in use, and can be synchronized."""
    emulated_gpu.used = True
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return emulated_gpu


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
def test_an_exporter_queries_no_device(emulated_gpu: EmulatedGpu, options: dict[str, Any]) -> None:
    """The options are checked without a query for devices."""
    TorchProfilerExporter(options).prepare()
    assert 0 == emulated_gpu.queries


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
def test_wrong_options_are_refused(emulated_gpu: EmulatedGpu, options: dict[str, Any]) -> None:
    """Wrong options are refused at once, without a query for devices."""
    with pytest.raises(ValueError, match=r"torch\.profiler refuses"):
        TorchProfilerExporter(options)
    assert 0 == emulated_gpu.queries


@NAMED
def test_names_of_activities_are_checked_once_the_gpu_is_used(emulated_gpu: EmulatedGpu) -> None:
    """Only torch's C++ code knows the names; to check them early would fix the process to the CPU."""
    wrong = {"activities": [{CPU: ["NONE"]}]}
    TorchProfilerExporter(wrong)
    assert sessions.owner is None
    emulated_gpu.used = True
    with pytest.raises(ValueError, match="activity type name: 'NONE'"):
        TorchProfilerExporter(wrong)


def record_window(exporter: TorchProfilerExporter, *, warming: Callable[[], object] = lambda: None) -> Any:
    """Record a window of one step, after ``warming()`` in its warm-up."""
    capture = exporter.capture()
    warming()
    capture.start()
    capture.step(1)
    torch.ones(3).sum()
    capture.stop()
    return capture


def test_only_the_cpu_is_recorded_where_no_gpu_is_used(emulated_gpu: EmulatedGpu, tmp_path: Path) -> None:
    """No device is queried, from the window's start to the written trace."""
    capture = record_window(TorchProfilerExporter({}))
    assert ({CPU}, [], 0) == (capture.profiler.activities, capture.incomplete, emulated_gpu.queries)
    assert capture.save(tmp_path, "rank0.1")
    assert 0 == emulated_gpu.queries


@pytest.mark.parametrize("late", [False, True])
def test_the_gpu_is_recorded_where_it_is_used(used_gpu: EmulatedGpu, late: bool) -> None:
    """A GPU in use is recorded, also when its use began in the warm-up."""
    used_gpu.used = not late
    capture = record_window(TorchProfilerExporter({}), warming=lambda: setattr(used_gpu, "used", True))
    assert ({CPU, CUDA}, "cuda") == (capture.profiler.activities, capture.profiler.use_device)
    assert [] == capture.incomplete


def test_each_window_checks_the_use_of_the_gpu(used_gpu: EmulatedGpu) -> None:
    """Each window of an exporter checks again whether the GPU is in use."""
    exporter = TorchProfilerExporter({"record_shapes": True})
    used_gpu.used = False
    assert {CPU} == record_window(exporter).profiler.activities
    used_gpu.used = True
    assert {CPU, CUDA} == record_window(exporter).profiler.activities
    used_gpu.used = False
    assert {CPU} == record_window(exporter).profiler.activities


@pytest.mark.parametrize("activities", [None, [CPU]])
@pytest.mark.parametrize("plan", [None, "1-2"])
def test_a_window_in_which_the_gpu_is_first_used_is_partial(
    used_gpu: EmulatedGpu, tmp_path: Path, capfd: pytest.CaptureFixture[str], activities: Any, plan: str | None
) -> None:
    """The manifest and the summary have the reason, unless the program requested the CPU only."""
    used_gpu.used = False
    options = {} if activities is None else {"activities": activities}
    with instrument.profile(tmp_path, schedule=plan, **options) as prof:
        train(4, prof.step, lambda number: setattr(used_gpu, "used", number >= 1))
    (entry,) = manifest(tmp_path)
    reason = (
        "the GPU was first used inside the window, which is recorded without it; let the window begin after the"
        " first step, or call torch.cuda.init()"
    )
    in_summary = f"Recorded in part: {reason}." in " ".join(capfd.readouterr().err.split())
    if activities is None:
        assert (entry["status"], entry["reason"], in_summary) == ("partial", reason, True)
    else:
        assert (entry["status"], entry["reason"], in_summary) == ("recorded", None, False)


NO_GPU = "torch's profiler records no GPU in this process"


@pytest.mark.parametrize("cpu_only", [False, True])
def test_each_trace_shows_whether_the_gpu_is_recorded(
    used_gpu: EmulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_only: bool
) -> None:
    """Each trace that should have the GPU is looked at, and the reason names the likely cause."""
    monkeypatch.setattr(sessions, "saw_cpu_only", cpu_only)
    recorded = iter([True, False])
    monkeypatch.setattr(kineto, "is_set_up_for_gpu", lambda _: next(recorded))
    captures = [record_window(TorchProfilerExporter(options)) for options in ({"activities": [CPU]}, {}, {})]
    for number, capture in enumerate(captures):
        capture.save(tmp_path, f"rank0.{number}")
    assert [[], []] == [capture.incomplete for capture in captures[:2]]
    (reason,) = captures[2].incomplete
    assert reason.startswith(NO_GPU)
    assert ("the interface of the GPU's profiler is refused" in reason) == (not cpu_only)


def test_a_window_that_is_incomplete_for_two_reasons(
    used_gpu: EmulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest has both reasons."""
    monkeypatch.setattr(kineto, "is_set_up_for_gpu", lambda _: False)

    def interfere(number: int) -> None:
        if number == 1:
            with profile(activities=[CPU]):
                pass

    with instrument.profile(tmp_path, schedule="1-2") as prof:
        train(4, prof.step, interfere)
    (entry,) = manifest(tmp_path)
    other, gpu = entry["reason"].split("; ", 1)
    assert ("partial", True) == (entry["status"], gpu.startswith(NO_GPU))
    assert "another torch profiler began inside the window, which ended its recording" == other


EMULATE_GPU = """
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
for word in own:  # the program's recordings, before its first use of instrument
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


def reason_and_kernels(script: str, folder: Path, *words: str) -> tuple[str | None, int]:
    """Run the script; return the reason of its window and its number of kernels."""
    command = programs.python(programs.program(script, folder), [str(folder / "out"), *words])
    done = warm.run(command, programs.environment({"INSTRUMENT_SUMMARY": "0"}), check=True)
    reason, kernels = json.loads(done.stdout.splitlines()[-1])
    return reason, kernels


@OWN
def test_the_first_recording_of_a_process_decides(tmp_path: Path, own: list[str]) -> None:
    """The first recording decides, even one of the program that ended before the library tracks profilers."""
    if own[:1] != ["cpu"] and torch.__version__ < "2.13" and not torch.cuda.is_available():
        # Kineto's C++ code queries the driver, which EMULATE_GPU cannot replace; the GPU test below covers it.
        pytest.skip("up to torch 2.12 a GPU cannot be emulated")
    reason, _ = reason_and_kernels(EMULATE_GPU + RECORDINGS, tmp_path, "busy", *own)
    if own[:1] == ["cpu"]:
        assert reason is not None
        assert reason.startswith(NO_GPU)
        assert "the program's own" in reason
    else:
        assert reason is None


@pytest.mark.gpu
@pytest.mark.parametrize("work", ["busy", "idle"])
@OWN
def test_a_window_has_its_kernels_or_a_reason(tmp_path: Path, own: list[str], work: str) -> None:
    """A window in which the GPU does nothing is complete."""
    reason, kernels = reason_and_kernels('device = "cuda"\n' + RECORDINGS, tmp_path, work, *own)
    missing = own[:1] == ["cpu"] and torch.__version__ >= "2.13"
    assert missing == (reason or "").startswith(NO_GPU)
    assert (reason is None) == (not missing)
    assert (kernels > 0) == (work == "busy" and not missing)


def test_a_profiler_in_its_own_warm_up_is_not_disturbed(emulated_gpu: EmulatedGpu) -> None:
    """A window that prepares late is refused when another profiler has prepared in the meantime."""
    capture = TorchProfilerExporter({}).capture()
    other = profile(activities=[CPU])
    other.prepare_trace()
    with pytest.raises(instrument.base.errors.CaptureError, match="another torch profiler is active"):
        capture.start()
    capture.discard()
    other.start_trace()
    torch.ones(3).sum()
    other.stop_trace()
    assert "aten::sum" in {event.name for event in other.events()}


def test_discarding_an_unprepared_window_leaves_no_state(emulated_gpu: EmulatedGpu) -> None:
    """No profiler is running or tracked after an unprepared window is discarded."""
    TorchProfilerExporter({}).capture().discard()
    assert sessions.owner is None
    assert sessions.capture is None
    assert not profilers.running()
    record_window(TorchProfilerExporter({}))


def test_events_accumulate_over_windows_that_prepare_late(emulated_gpu: EmulatedGpu) -> None:
    """With ``acc_events`` the second window has the events of both."""
    exporter = TorchProfilerExporter({"acc_events": True})
    events_of_one = len(record_window(exporter).profiler.events())
    exporter.capture().discard()
    assert len(record_window(exporter).profiler.events()) >= 2 * events_of_one


def test_versions_of_torch_without_names_of_activities(
    emulated_gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are not activities are refused, also by torch versions that accept them."""
    accepting = profile(activities=[CPU])
    accepting.activities = {"cpu"}
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: accepting)
    with pytest.raises(TypeError, match="Expected ProfilerActivity"):
        profilers.check_options({"activities": ["cpu"]})
    with pytest.raises(AssertionError, match="No valid profiler activities"):
        profilers.check_options({"activities": []})
