"""The pretended GPU: devices, streams, events, graphs, memory and random numbers."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.cuda import Event, current_stream  # before there is anything to answer
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from instrument.syncs.dryrun.cuda import PretendedCuda
from tests.dryrun.pretended import Noted, OnCpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")


# --------------------------------------------------------------------------------------------------- devices


def test_the_device_is_a_known_gpu(noted: Noted) -> None:
    """Name, capability, memory and architecture are consistent."""
    properties = torch.cuda.get_device_properties("cuda")
    assert torch.cuda.get_device_name() == properties.name == "NVIDIA A100-SXM4-80GB"
    assert torch.cuda.get_device_capability() == (properties.major, properties.minor) == (8, 0)
    assert properties.total_memory == torch.cuda.mem_get_info()[1]
    assert "sm_80" in torch.cuda.get_arch_list()
    assert "total_memory=81154MB" in repr(properties)
    assert isinstance(properties, torch.cuda._CudaDeviceProperties)
    assert torch.backends.cuda.is_built()
    assert torch.cuda.is_bf16_supported()
    assert torch.version.cuda


def test_current_device_per_thread() -> None:
    """`torch.cuda.device` restores the previous device; each thread has its own; a bad index is refused."""
    gpu = PretendedCuda(Noted(), devices=2)
    gpu.install()
    seen: list[Any] = []
    try:
        with torch.cuda.device(1):
            thread = threading.Thread(
                target=lambda: seen.append((torch.cuda.is_available(), torch.cuda.current_device()))
            )
            thread.start()
            thread.join()
            seen.append(torch.cuda.current_device())
            assert torch.cuda.current_stream().device == torch.device("cuda", 1)
        with torch.cuda.stream(torch.cuda.Stream(1)):
            assert torch.cuda.current_device() == 1
        assert [*seen, torch.cuda.current_device()] == [(True, 0), 1, 0]
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.set_device(2)
    finally:
        gpu.undo()


def test_accelerator(noted: Noted) -> None:
    """`torch.accelerator` and `torch.get_device_module` find the pretended GPU."""
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.device_count() == 1
    assert torch.accelerator.current_device_index() == 0
    assert torch.get_device_module() is torch.cuda


def test_legacy_tensor_types(noted: Noted) -> None:
    """`torch.cuda.FloatTensor` and its like make tensors of their dtype, from sizes and from data."""
    with OnCpu():
        assert torch.cuda.HalfTensor(2, 3).shape == (2, 3)
        assert torch.cuda.HalfTensor(torch.Size([4])).dtype == torch.float16
        assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
        assert torch.cuda.FloatTensor().numel() == 0
    assert not isinstance(torch.ones(1), torch.cuda.FloatTensor)


# ------------------------------------------------------------------------------------------- streams, events


def test_current_stream(noted: Noted) -> None:
    """`torch.cuda.stream`, a stream's own ``with`` and `set_stream` choose the current stream."""
    stream, default = torch.cuda.Stream(priority=-1), torch.cuda.default_stream()
    assert stream != default
    assert (stream.priority, default.cuda_stream) == (-1, 0)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == torch.accelerator.current_stream() == stream
        with torch.cuda.stream(None), default:
            assert torch.cuda.current_stream() == default
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_stream() == default
    torch.cuda.set_stream(stream)
    assert current_stream() == stream
    torch.accelerator.set_stream(default)
    assert current_stream() == default
    assert len({stream, default, current_stream()}) == 2


@given(st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=3), max_leaves=12))
def test_nested_streams_unwind(tree: list[Any]) -> None:
    """However streams are nested, the outer one is current again after each."""
    gpu = PretendedCuda(Noted())
    gpu.install()

    def visit(node: list[Any]) -> None:
        outside = torch.cuda.current_stream()
        for inner in node:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                visit(inner)
                assert torch.cuda.current_stream() == stream
            assert torch.cuda.current_stream() == outside

    try:
        visit(tree)
    finally:
        gpu.undo()


def test_classes_of_streams_and_events(noted: Noted) -> None:
    """`isinstance` holds for torch's classes, and other devices keep theirs."""
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    assert isinstance(stream, torch.cuda.Stream) and isinstance(stream, torch.Stream)
    assert isinstance(event, torch.cuda.Event) and isinstance(event, torch.Event) and isinstance(event, Event)
    assert isinstance(torch.cuda.ExternalStream(2**30), torch.cuda.ExternalStream)
    assert torch.cuda.ExternalStream(2**30).cuda_stream == 2**30
    assert torch.Stream("cuda:0").device == torch.device("cuda", 0)
    assert torch.Stream(device="cpu").device.type == "cpu"
    assert isinstance(torch.Stream(device="cpu"), torch.Stream)
    assert not isinstance(event, torch.Stream)


def test_streams_and_events_work_together(noted: Noted) -> None:
    """A side stream copies a tensor, and the main stream uses it after an event."""
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        tensor = torch.ones(2)
        done.record()
    torch.cuda.current_stream().wait_event(done)
    torch.cuda.current_stream().wait_stream(side)
    tensor.record_stream(torch.cuda.current_stream())
    assert side.record_event().query() and side.query() and done.query()
    assert noted.waits == []


def test_elapsed_time_is_positive_or_refused(noted: Noted) -> None:
    """Both events must have been recorded with timing, as on a real GPU."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(end)
    end.record(torch.cuda.current_stream())
    assert start.elapsed_time(end) > 0
    plain = torch.cuda.Event()
    plain.record()
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        start.elapsed_time(plain)
    assert noted.waits == []


# -------------------------------------------------------------------------------------------- graphs, memory


def test_captured_code_runs_once(noted: Noted) -> None:
    """The captured body runs eagerly; torch synchronizes before it, and a replay is noted."""
    graph, ran = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        ran.append(torch.cuda.is_current_stream_capturing())
    graph.replay()
    assert ran == [True]
    assert not torch.cuda.is_current_stream_capturing()
    assert isinstance(graph, torch.cuda.CUDAGraph)
    assert noted.waits == ["synchronize", "empty_cache"]
    assert noted.gaps == ["a replay of a CUDA graph does not repeat the captured work"]
    assert graph.pool() != torch.cuda.graph_pool_handle()


def test_graphed_callables_run_eagerly(noted: Noted) -> None:
    """Graphed callables are returned unchanged, and run eagerly."""
    layer = nn.Linear(2, 2)
    assert torch.cuda.make_graphed_callables(layer, (torch.ones(1, 2),)) is layer
    assert noted.waits == ["make_graphed_callables"]


def test_memory_figures_are_consistent(noted: Noted) -> None:
    """No figure is zero where users divide by it, and no more memory is used than exists."""
    allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    reserved, (free, total) = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()
    assert 0 < allocated <= peak <= reserved <= total - free < total
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == allocated
    assert all(
        stats[f"{name}.all.{figure}"]
        == stats[f"{name}.small_pool.{figure}"] + stats[f"{name}.large_pool.{figure}"]
        for name in ("allocated_bytes", "reserved_bytes", "active", "segment")
        for figure in ("current", "peak", "allocated", "freed")
    )
    assert "1024 MiB" in torch.cuda.memory_summary()


def test_memory_is_recorded_and_dumped(noted: Noted, tmp_path: Path) -> None:
    """Files that a memory profile writes have their sections."""
    torch.cuda.memory._record_memory_history()
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    torch.cuda.memory._record_memory_history(enabled=None)
    assert pickle.loads((tmp_path / "snapshot.pickle").read_bytes())["segments"] == []
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        assert isinstance(pool, torch.cuda.MemPool)


# ---------------------------------------------------------------------------------------------------- random


def test_random_states(noted: Noted) -> None:
    """The GPU's generator is the CPU's, as all random numbers come from it here."""
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.rand(3).equal(first)
    torch.cuda.manual_seed_all(7)
    assert (torch.initial_seed(), torch.cuda.initial_seed()) == (7, 7)
    torch.cuda.set_rng_state_all([torch.tensor([9, *[0] * 15], dtype=torch.uint8)])  # as a real GPU's
    assert torch.initial_seed() == 9


@pytest.mark.parametrize("devices", [[0], ["cuda:0"], None])
def test_fork_rng_restores(devices: list[Any] | None, noted: Noted) -> None:
    """`torch.random.fork_rng` restores the generator."""
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        torch.cuda.manual_seed(1)
        torch.rand(5)
    assert torch.rand(2).equal(expected)


def test_generators_on_the_gpu(noted: Noted) -> None:
    """Functions of torch accept a generator on the GPU; clones have its state; the default is on the CPU."""
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert isinstance(generator, torch.Generator)
    assert generator.device == torch.device("cuda", 0)
    copies = [copy.deepcopy(generator), pickle.loads(pickle.dumps(generator)), generator.clone_state()]
    drawn = torch.randn(2, generator=generator)
    assert all(torch.randn(2, generator=one).equal(drawn) and one.device == generator.device for one in copies)
    assert type(torch.Generator()) is torch._C.Generator
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.cuda.default_generators[0].device == torch.device("cuda", 0)


def test_checkpoints_repeat_dropout(noted: Noted) -> None:
    """Checkpointing saves and restores the states of the GPU's generator."""

    class Tagged(torch.Tensor):
        device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]

        def get_device(self) -> int:
            return 0

    devices, states = get_device_states(torch.ones(1).as_subclass(Tagged))
    assert list(devices) == [0]
    first = torch.rand(1)
    set_device_states(devices, states)
    assert torch.rand(1).equal(first)
    inputs = torch.randn(64, requires_grad=True)
    output = checkpoint(nn.functional.dropout, inputs, use_reentrant=False, preserve_rng_state=True)
    output.sum().backward()
    assert inputs.grad is not None
    assert (inputs.grad != 0).equal(output != 0)
