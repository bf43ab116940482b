"""The torch.profiler exporter saves one trace per window, which TensorBoard's plugin loads unchanged."""

from __future__ import annotations

import errno
import gzip
import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode

import instrument
from instrument.base.compat import kineto
from instrument.base.config import settings
from instrument.base.errors import CaptureError
from instrument.record.exporters.exporter import choose
from instrument.record.exporters.raw_trace import compress
from instrument.record.exporters.torch_profiler import TorchProfilerCapture, TorchProfilerExporter

from ..support import programs
from ..windows.training import recorded, steps, train


def list_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def record(exporter: TorchProfilerExporter, folder: Path, stem: str = "rank0.1") -> TorchProfilerCapture:
    """Record a window of two steps; it is stopped but not saved."""
    capture = exporter.capture()
    capture.start()
    for number in (4, 5):
        capture.step(number)
        torch.ones(3).sum()
    capture.step(None)
    capture.stop()
    return capture


def test_a_capture_saves_one_gzipped_trace(tmp_path: Path) -> None:
    """`save` writes the trace; `compress` writes the gzipped copy next to it."""
    capture = record(TorchProfilerExporter({}), tmp_path)
    (raw,) = capture.save(tmp_path / "w", "rank0.1")
    assert ["rank0.1.pt.trace.json"] == list_names(tmp_path / "w")
    assert tmp_path / "w" / "rank0.1.pt.trace.json.gz" == compress(raw)
    assert ["rank0.1.pt.trace.json", "rank0.1.pt.trace.json.gz"] == sorted(list_names(tmp_path / "w"))
    assert [4, 5] == steps(tmp_path / "w" / "rank0.1.pt.trace.json.gz")


def test_a_disk_that_fills_up_during_compression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The uncompressed trace stays under a name that viewers accept, and no partial file is left."""
    (raw,) = record(TorchProfilerExporter({}), tmp_path).save(tmp_path, "rank0.1")

    class FullDiskFile(gzip.GzipFile):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gzip, "GzipFile", FullDiskFile)
    with pytest.raises(OSError, match="No space left"):
        compress(raw)
    assert ["rank0.1.pt.trace.json"] == list_names(tmp_path)
    assert [4, 5] == steps(tmp_path / "rank0.1.pt.trace.json")


def test_a_capture_is_refused_while_another_profiler_records(tmp_path: Path) -> None:
    """Another profiler that starts before or during the warm-up keeps all of its events."""
    exporter = TorchProfilerExporter({})
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as other:
        with pytest.raises(CaptureError, match="another torch profiler is active"):
            exporter.capture()
        torch.ones(3).sum()
    assert "aten::sum" in {event.name for event in other.events()}
    capture = exporter.capture()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as other:
        with pytest.raises(CaptureError, match="another torch profiler began during warm-up"):
            capture.start()
        capture.discard()
        torch.ones(3).sum()
    assert "aten::sum" in {event.name for event in other.events()}
    assert record(exporter, tmp_path).save(tmp_path, "after")


def test_a_discarded_capture_leaves_no_profiler_active(tmp_path: Path) -> None:
    """A discarded warm-up does not disturb the next capture or a user's profiler."""
    exporter = TorchProfilerExporter({})
    exporter.capture().discard()
    assert not torch.autograd._profiler_enabled()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as own:
        torch.ones(3).sum()
    assert "aten::sum" in {event.name for event in own.events()}
    assert record(exporter, tmp_path).save(tmp_path, "after")


def test_a_trace_that_torch_could_not_write(tmp_path: Path) -> None:
    """Torch does not raise; the library's error has the folder and the system's error."""
    resource = pytest.importorskip("resource")
    capture = record(TorchProfilerExporter({}), tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(OSError, match=r"\[Errno 27\] torch could not write the trace to .*/w: File too large"):
            capture.save(tmp_path / "w", "rank0.1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [] == list_names(tmp_path / "w")


def test_export_before_and_after_compression(tmp_path: Path) -> None:
    """`export` copies the raw or the gzipped trace, and compresses by the name of the target."""
    capture = record(TorchProfilerExporter({}), tmp_path)
    with pytest.raises(CaptureError, match="could not be saved"):
        capture.export(str(tmp_path / "early.json"))
    (raw,) = capture.save(tmp_path, "rank0.1")
    capture.export(str(tmp_path / "plain.json"))
    compress(raw)
    raw.unlink()
    capture.export(str(tmp_path / "late.json.gz"))
    assert [4, 5] == steps(tmp_path / "plain.json") == steps(tmp_path / "late.json.gz")


@pytest.mark.parametrize("variable", ["CUDA_INJECTION64_PATH", "NV_TPS_LAUNCH_TOKEN", "ROCP_TOOL_LIBRARIES"])
def test_beside_a_gpu_tool_only_the_cpu_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    """Beside another user of the GPU's tracing interface only the CPU is recorded, with one log line."""
    monkeypatch.setenv(variable, "/opt/tool/libtool.so")
    monkeypatch.setattr(TorchProfilerExporter, "_warned", set())
    options = {"record_shapes": True, "activities": [ProfilerActivity.CPU, ProfilerActivity.CUDA]}
    for _ in range(2):
        made = record(TorchProfilerExporter(options), tmp_path).profiler
        assert (True, {ProfilerActivity.CPU}) == (made.record_shapes, made.activities)
    assert 1 == caplog.text.count("torch.profiler records the CPU only")


def test_the_exporter_is_chosen_by_name_or_tool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`auto` chooses torch.profiler, and Nsight Systems in a process under nsys."""
    for variable in ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"):
        monkeypatch.delenv(variable, raising=False)
    assert "torch_profiler" == choose("auto", {}).name == choose("torch_profiler", {}).name
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    assert "nsight_systems" == choose("auto", {}).name == choose("nsight_systems", {}).name


WINDOW = """
import os, sys, torch
from instrument.record.exporters.torch_profiler import TorchProfilerExporter

exporter = TorchProfilerExporter({})
exporter.prepare()
capture = exporter.capture()
capture.start()
capture.stop()
patched = "hasattr" in vars(torch.profiler.profiler)
graphs = getattr(capture.profiler, "has_cudagraphs", None)  # torch 2.6 keeps it in DISABLE_CUPTI_LAZY_REINIT
print(os.environ.get("DISABLE_CUPTI_LAZY_REINIT") == "1" if graphs is None else graphs, end=" ")
print("torch._inductor" in sys.modules, patched)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("imports", "variables", "found"),
    [
        ("", {}, "False False False"),
        ("import torch._inductor.config as config; config.triton.cudagraphs = True", {}, "True True False"),
        ("", {"TORCHINDUCTOR_CUDAGRAPHS": "1"}, "True True False"),
    ],
)
def test_a_window_imports_no_compiler(tmp_path: Path, imports: str, variables: dict[str, str], found: str) -> None:
    """A window imports torch._inductor, which takes a second or two, only where its CUDA graphs may be on."""
    script = programs.program(f"{imports}\n{WINDOW}", tmp_path)
    done = programs.run([sys.executable, script], programs.environment(variables))
    assert found == done.stdout.strip()


def test_open_ranges_are_searched_only_after_another_profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window searches all objects for open ranges only if another profiler recorded before it."""
    searches = []
    monkeypatch.setattr(kineto, "record_functions", lambda: searches.append(1) or [])
    exporter = TorchProfilerExporter({})
    record(exporter, tmp_path)
    searches.clear()
    record(exporter, tmp_path)
    exporter.capture().discard()
    record(exporter, tmp_path)
    assert not searches
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]):
        torch.ones(3).sum()
    record(exporter, tmp_path)
    record(exporter, tmp_path)
    assert 1 == len(searches)


def load_for_tensorboard(folder: Path) -> dict[str, Any]:
    """Load a folder with the loader of torch_tb_profiler, without its subprocesses."""
    from torch_tb_profiler import consts
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.run_generator import RunGenerator

    found = {}
    for path in sorted(folder.iterdir()):
        match = consts.WORKER_PATTERN.match(path.name)
        assert match, path
        data = RunProfileData.parse(match[1], match[2], str(path), str(folder))
        found[match[1]] = (data, RunGenerator(match[1], match[2], data).generate_run_profile())
    return found


@pytest.mark.filterwarnings("ignore")  # from the plugin
def test_tensorboards_plugin_loads_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin finds the worker by the name of the file, the steps with their durations, and the operators."""
    pytest.importorskip("torch_tb_profiler", exc_type=ImportError)
    monkeypatch.setattr(settings, "summary", False)
    with instrument.profile(tmp_path, schedule=instrument.schedule("1-2")) as prof:
        train(4, prof.step)
    found = load_for_tensorboard(tmp_path / "window-0001")
    assert ["rank0"] == list(found)
    data, profile = found["rank0"]
    assert ["1", "2"] == data.steps_names
    assert 2 == len(data.steps_costs)
    assert all(max(step.costs) > 0 for step in data.steps_costs)
    assert "Overview" in [view.display_name for view in profile.views]
    assert "aten::addmm" in json.dumps(profile.operation_table_by_name)


TENSORBOARD = """
    import json, sys
    from torch_tb_profiler import io
    from torch_tb_profiler.profiler.loader import RunLoader

    if __name__ == "__main__":
        cache = io.Cache()
        run = RunLoader("run", sys.argv[1], cache).load()
        views = [sorted(view.display_name for view in profile.views) for profile in run.profiles.values()]
        print(json.dumps([run.workers, views]))
"""


def test_tensorboards_run_loader_lists_the_ranks_as_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard loads the folder of a window as a run with a worker for each rank."""
    pytest.importorskip("torch_tb_profiler", exc_type=ImportError)
    monkeypatch.setattr(settings, "summary", False)
    out = tmp_path / "out"
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with instrument.profile(out, schedule=instrument.schedule("1-2")) as prof:
            train(4, prof.step)
    script = programs.program(TENSORBOARD, tmp_path)
    environment = programs.environment({"TORCH_PROFILER_START_METHOD": "fork"})
    done = programs.run(programs.python(script, [str(out / "window-0001")]), environment)
    workers, views = json.loads(done.stdout.splitlines()[-1])
    assert ["rank0", "rank1"] == sorted(workers)
    assert all("Overview" in names for names in views)


class FunctionCalls(TorchFunctionMode):
    """Counts calls of torch functions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(function)] += 1
        return function(*args, **(kwargs or {}))


class OperatorCalls(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [FunctionCalls, OperatorCalls])
def test_modes_of_the_program_see_only_its_own_calls(
    tmp_path: Path, mode: type[FunctionCalls | OperatorCalls]
) -> None:
    """A `TorchFunctionMode` or `TorchDispatchMode` around a loop sees the same calls with a window as without."""
    counts = []
    train(range(1))  # the first optimizer imports modules of torch that call functions
    for plan in ("100", "2-3"):
        kept: list[Any] = []  # keeps ranges alive beyond their window

        def body(number: int, kept: list[Any] = kept) -> None:
            with torch.profiler.record_function(f"part {number}") as context:
                kept.append(context)

        with mode() as counting:
            train(instrument.steps(range(5), tmp_path / plan, at=plan), body=body)
        counts.append(counting.calls)
    assert counts[0] == counts[1]
    assert recorded(tmp_path / "2-3") == [[2, 3]]


def test_torchs_warning_about_cycles_is_suppressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch up to 2.11 warns that a new profiler clears events; as an error, the warning would fail a window."""
    from torch.profiler import profiler

    if not hasattr(profiler, "_WARNINGS_SHOWN"):
        pytest.skip("this version of torch does not give the warning once only")
    prepare, shown = profiler.profile.prepare_trace, set[str]()  # other tests may have seen the warning
    monkeypatch.setattr(profiler, "_WARNINGS_SHOWN", shown)

    def prepare_as_before(self: Any) -> None:
        profiler._warn_once("Warning: Profiler clears events at the end of each cycle.")
        assert shown is not profiler._WARNINGS_SHOWN
        prepare(self)

    monkeypatch.setattr(profiler.profile, "prepare_trace", prepare_as_before)
    with warnings.catch_warnings(record=True) as seen, instrument.profile(tmp_path, schedule="0") as prof:
        warnings.simplefilter("always")
        prof.step()
    assert ["recorded"] == [window["status"] for window in prof.windows]
    assert [] == [warning.message for warning in seen if "cycle" in str(warning.message)]
    assert shown is profiler._WARNINGS_SHOWN
    with pytest.warns(UserWarning, match="cycle"):
        profiler._warn_once("Warning: Profiler clears events at the end of each cycle.")


def test_kineto_prints_nothing_about_a_window(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kineto's lines on the start and the stop of a window stay away, unless the program chose Kineto's log."""
    record(TorchProfilerExporter({}), tmp_path)
    assert capfd.readouterr().err == ""

    def plain() -> str:
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]):
            torch.ones(3).sum()
        return capfd.readouterr().err

    own = plain()  # of the program's own recordings, Kineto prints what it did
    assert ("profiler_stop" in own) == (kineto.least_severity() is not None)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "4")
    record(TorchProfilerExporter({}), tmp_path)
    assert capfd.readouterr().err.count("profiler_") == own.count("profiler_")
