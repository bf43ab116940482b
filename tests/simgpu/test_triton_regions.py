"""Triton's kernels have regions while something records, and Proton shows regions while a session is active."""

from __future__ import annotations

import json
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from instrument import annotate
from instrument.record.regions import dispatch
from tests import simgpu
from tests.simgpu.programs import output

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
jit = pytest.importorskip("triton.runtime.jit")
compiler = pytest.importorskip("triton.compiler.compiler")

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]


@triton.jit
def scale_kernel(source, target, count, SIZE: tl.constexpr):
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(target + places, tl.load(source + places, places < count) * 2, places < count)


def launch(tensor: torch.Tensor, into: torch.Tensor | None = None) -> None:
    scale_kernel[(4,)](tensor, torch.empty_like(tensor) if into is None else into, tensor.numel(), SIZE=1024)


@pytest.fixture
def tensor() -> torch.Tensor:
    """Return a tensor of the GPU, for which the kernel is compiled."""
    made = torch.ones(4096, device="cuda")
    launch(made)
    return made


def events(body: Callable[[], object], folder: Path) -> list[dict[str, Any]]:
    """Return the events of a recording of ``body``."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recording:
        body()
        torch.cuda.synchronize()
    path = folder / "trace.json"
    recording.export_chrome_trace(str(path))
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


def named(found: list[dict[str, Any]], name: str, category: str = "user_annotation") -> list[dict[str, Any]]:
    return [event for event in found if event["cat"] == category and event["name"] == name]


def methods() -> tuple[object, object]:
    return jit.JITFunction.run, compiler.CompiledKernel.__getitem__


def test_a_launch_is_in_a_region_named_as_its_kernel(tensor: torch.Tensor, tmp_path: Path) -> None:
    """Also that of a kernel compiled by hand; the region has the launch, and its thread."""
    compiled = scale_kernel.warmup(tensor, tensor, 4096, SIZE=1024, grid=(4,))

    def body() -> None:
        with annotate("step"):
            launch(tensor)
            compiled[(4, 1, 1)](tensor, tensor, 4096, 1024)

    found = events(body, tmp_path)

    regions = named(found, "scale_kernel")
    launches = [event for event in found if event["name"].startswith("cuLaunchKernel")]
    assert (len(regions), len(launches)) == (2, 2)
    (step,) = named(found, "step")
    for region, call in zip(regions, launches, strict=True):
        assert region["tid"] == call["tid"]
        assert step["ts"] <= region["ts"] <= call["ts"] < region["ts"] + region["dur"] <= step["ts"] + step["dur"]
    assert len(named(found, "scale_kernel", "gpu_user_annotation")) == 2


def test_triton_is_untouched_while_nothing_records(tensor: torch.Tensor, tmp_path: Path) -> None:
    """The methods are replaced in a recording alone, and the hooks that make Inductor slower, never."""
    before, during = methods(), []
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook

    def body() -> None:
        during.append(methods())
        assert not any(hook.calls for hook in hooks)

    events(body, tmp_path)

    assert methods() == before
    assert all(new is not old for new, old in zip(during[0], before, strict=True))


def test_a_program_that_only_asks_for_the_open_regions_is_not_patched(tensor: torch.Tensor) -> None:
    from instrument.record.regions.emitters import RegionPath

    before, path = methods(), RegionPath()
    dispatch.active.add(path)
    try:
        assert methods() == before
    finally:
        dispatch.active.remove(path)


@triton.jit
def copy_kernel(function, target, kernel, original, SIZE: tl.constexpr):
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(target + places, tl.load(function + places, places < kernel), places < original)


def test_a_kernel_may_name_its_parameters_as_it_likes(tensor: torch.Tensor, tmp_path: Path) -> None:
    """Also as the parameters of the functions that open the region are named."""

    def body() -> None:
        copy_kernel[(4,)](function=tensor, target=torch.empty_like(tensor), kernel=4096, original=4096, SIZE=1024)

    assert len(named(events(body, tmp_path), "copy_kernel")) == 1


def test_a_launch_that_fails_ends_its_region(tensor: torch.Tensor, tmp_path: Path) -> None:
    """The program gets Triton's error with the traceback that it has without a recording."""

    def failing() -> list[str]:
        with pytest.raises(Exception, match="cannot be accessed from Triton") as caught:
            launch(tensor.cpu(), tensor)
        return [frame.name for frame in caught.traceback]

    names: list[list[str]] = [failing()]

    def body() -> None:
        names.append(failing())
        with annotate("after"):
            launch(tensor)

    found = events(body, tmp_path)

    assert names[0] == names[1]
    failed, worked = named(found, "scale_kernel")
    (after,) = named(found, "after")
    assert failed["ts"] + failed["dur"] <= after["ts"] <= worked["ts"]


def test_kernels_of_inductor_have_no_region_of_ours(tensor: torch.Tensor, tmp_path: Path) -> None:
    """They are shown by torch itself, also a kernel of the program; a recording compiles nothing again."""

    @torch.compile
    def compiled(source: torch.Tensor) -> torch.Tensor:
        target = torch.empty_like(source)
        launch(source, target)
        return torch.sin(target) + 1

    torch._dynamo.utils.counters.clear()
    first = events(lambda: compiled(tensor), tmp_path)
    compiled(tensor)
    again = events(lambda: compiled(tensor), tmp_path)

    for found in (first, again):
        assert not named(found, "scale_kernel")
    shown = [event["name"] for event in again if event["cat"] == "cpu_op" and "_kernel" in event["name"]]
    assert shown == ["scale_kernel_0"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_launches_of_several_threads_and_of_a_captured_graph(tensor: torch.Tensor, tmp_path: Path) -> None:
    graph, into = torch.cuda.CUDAGraph(), torch.empty_like(tensor)

    def body() -> None:
        with torch.cuda.graph(graph):
            launch(tensor, into)
        graph.replay()
        threads = [threading.Thread(target=launch, args=(tensor,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with annotate("last"):
            pass

    found = events(body, tmp_path)

    (region,) = named(found, "scale_kernel")  # torch records the thread of the profiler alone
    (last,) = named(found, "last")
    assert region["ts"] + region["dur"] <= last["ts"]
    assert len(named(found, "scale_kernel", "kernel")) == 5


def test_triton_that_is_imported_in_a_recording(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(
        "import triton\nimport triton.language as tl\n\n\n"
        "@triton.jit\ndef late_kernel(target, SIZE: tl.constexpr):\n"
        "    tl.store(target + tl.arange(0, SIZE), 1.0)\n"
    )
    program = """
        import sys
        import torch
        from torch.profiler import ProfilerActivity, profile
        from instrument import annotate

        sys.path.insert(0, sys.argv[1])
        target = torch.empty(1024, device="cuda")
        assert "triton" not in sys.modules
        with profile(activities=[ProfilerActivity.CPU]) as recording, annotate("step"):
            from kernels import late_kernel
            late_kernel[(1,)](target, SIZE=1024)
        print(sorted(event.key for event in recording.key_averages() if event.key in ("step", "late_kernel")))
    """
    assert output(program, str(tmp_path)) == "['late_kernel', 'step']\n"


PROTON = """
    import asyncio, json, os, sys, threading
    import torch
    import triton.profiler as proton

    def paths(node, above=()):
        path = (*above, node["frame"]["name"])
        if node["metrics"].get("count"):
            yield "/".join(path[1:]), node["metrics"]["count"]
        for child in node["children"]:
            yield from paths(child, path)

    def finished():
        proton.finalize()
        return dict(paths(json.load(open(sys.argv[1] + ".hatchet"))[0]))

    tensor = torch.ones(4096, device="cuda")
"""
LIBRARY = """
    from instrument import annotate, configure
    from instrument.record.regions import dispatch
    from tests.simgpu.test_triton_regions import launch

    launch(tensor)
"""


def proton_output(folder: Path, *parts: str) -> Any:
    """Run a program with Proton, which loads CUPTI from a folder; return the JSON that it prints."""
    libraries = folder / "cupti"
    libraries.mkdir()
    lines = Path("/proc/self/maps").read_text().splitlines()
    (mapped,) = {line.split()[-1] for line in lines if "simgpu_lib/libcupti" in line}
    (libraries / "libcupti.so").symlink_to(mapped)
    before = f"import os\nos.environ['TRITON_CUPTI_LIB_PATH'] = {str(libraries)!r}\n"
    program = "".join(textwrap.dedent(part) for part in (PROTON, *parts))
    return json.loads(output(before + program, str(folder / "it")).splitlines()[-1])


def test_regions_are_scopes_of_proton_while_a_session_is_active(tmp_path: Path) -> None:
    """Scopes are balanced after errors, and nest with the program's own; a launch is no scope of its own."""
    script = """
    assert not dispatch.recording
    session = proton.start(sys.argv[1], hook="triton")
    with annotate("step"):
        launch(tensor)
        try:
            with annotate("forward"):
                launch(tensor)
                raise ValueError
        except ValueError:
            pass
        with proton.scope("theirs"), annotate("inner"):
            launch(tensor)
    launch(tensor)
    thread = threading.Thread(target=annotate("thread")(launch), args=(tensor,))
    thread.start()
    thread.join()
    with annotate("across"):
        launch(tensor)
        proton.deactivate(session)
        assert not dispatch.recording
        launch(tensor)
        proton.activate(session)
    with annotate("again"):
        launch(tensor)
    with annotate("open at the end"):
        found = finished()
    assert not dispatch.recording
    print(json.dumps(found))
    """
    assert proton_output(tmp_path, LIBRARY, script) == {
        "step/scale_kernel": 1,
        "step/forward/scale_kernel": 1,
        "step/theirs/inner/scale_kernel": 1,
        "scale_kernel": 1,
        "thread/scale_kernel": 1,
        "across/scale_kernel": 1,
        "again/scale_kernel": 1,
    }


def test_regions_that_overlap_and_sessions_that_do(tmp_path: Path) -> None:
    """Proton raises if an outer scope ends first: the inner ones are opened again."""
    script = """
    session = proton.start(sys.argv[1])
    first, second = asyncio.Event(), asyncio.Event()

    async def task(name, begin, end):
        with annotate(name):
            await begin.wait()
            launch(tensor)
            end.set()
            await asyncio.sleep(0.01 if name == "a" else 0.1)
            launch(tensor)

    async def both():
        first.set()
        await asyncio.gather(task("a", first, second), task("b", second, first))

    asyncio.run(both())
    other = proton.start(sys.argv[1] + "-other")
    with annotate("in both"):
        launch(tensor)
    proton.finalize(other)
    with annotate("in one"):
        launch(tensor)

    @annotate("ended by a thread")
    def batches():
        launch(tensor)
        yield

    generator = batches()
    next(generator)
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join()
    with annotate("later"):
        launch(tensor)
    configure(emitters="torch")
    proton.deactivate()
    proton.activate()
    with annotate("not chosen"):
        launch(tensor)
    print(json.dumps(finished()))
    """
    assert proton_output(tmp_path, LIBRARY, script) == {
        "a/scale_kernel": 1,
        "a/b/scale_kernel": 2,
        "b/scale_kernel": 1,
        "in both/scale_kernel": 1,
        "in one/scale_kernel": 1,
        "ended by a thread/scale_kernel": 1,
        "later/scale_kernel": 1,
        "scale_kernel": 1,
    }


def test_a_session_that_cannot_start(tmp_path: Path) -> None:
    """Nothing listens afterwards."""
    script = """
    try:
        proton.start(sys.argv[1], backend="nonsense")
    except Exception as error:
        print(json.dumps([type(error).__name__, dispatch.recording]))
    """
    assert proton_output(tmp_path, LIBRARY, script) == ["ValueError", False]


def test_a_session_that_is_older_than_the_library(tmp_path: Path) -> None:
    """It is followed, as where ``proton script.py`` starts it."""
    older = """
    proton.start(sys.argv[1])
    assert "instrument" not in sys.modules
    """
    script = """
    with annotate("step"):
        launch(tensor)
    print(json.dumps([finished(), dispatch.recording]))
    """
    found = {"scale_kernel": 1, "step/scale_kernel": 1}
    assert proton_output(tmp_path, older, LIBRARY, script) == [found, False]
