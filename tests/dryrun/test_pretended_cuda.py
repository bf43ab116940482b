"""The pretended GPU answers everything that is asked of torch.cuda, and leaves nothing behind."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.cuda import Event, current_stream, synchronize  # before there is anything to answer
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states
from torch.utils.data import DataLoader

from instrument.dryrun.cuda import PretendedCuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
PLACES = [
    torch, torch._C, torch.cuda, torch.cuda.memory, torch.cuda.graphs, torch.cuda.nvtx, torch.cuda.Stream,
    torch.cuda.Event, torch.cuda.MemPool, torch.cuda.CUDAGraph, torch.cuda.graph, torch.accelerator, torch.version,
    torch.Tensor, torch.backends.cuda, torch.backends.cudnn.m, torch.cuda.tunable, torch.autograd,
    torch.autograd.profiler, torch.profiler,
]  # fmt: skip


class Noted:
    """Keeps notes of synchronizations and of what is not covered."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.gaps: list[str] = []

    def note_sync(self, op: str, cause: str) -> None:
        self.waits.append(op)

    def note_uncovered(self, reason: str) -> None:
        self.gaps.append(reason)


class OnCpu(TorchFunctionMode):
    """Makes tensors for the GPU on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(one, torch.device) else one for one in args)
        return function(*args, **kwargs)


@pytest.fixture
def noted() -> Iterator[Noted]:
    """Pretend that there is a GPU, and return its notes."""
    told = Noted()
    gpu = PretendedCuda(told)
    gpu.install()
    yield told
    gpu.undo()


def contents() -> list[dict[str, Any]]:
    skipped = "__warningregistry__"
    return [{name: value for name, value in vars(one).items() if name != skipped} for one in PLACES]


# ------------------------------------------------------------------------------------------------- restoration


def test_everything_is_put_back() -> None:
    """After any number of installations and undoings, each attribute is what it was."""
    before = contents()
    gpu = PretendedCuda(Noted())
    for _ in range(2):
        gpu.install()
        gpu.install()
        assert contents() != before
        assert torch.cuda.is_available()
        gpu.undo()
        gpu.undo()
        assert contents() == before
    assert not torch.cuda.is_available()


def test_two_are_put_back() -> None:
    """One inside the other answers while it is there, and then the outer one does again."""
    before = contents()
    outer, inner = PretendedCuda(Noted()), PretendedCuda(Noted(), devices=2)
    outer.install()
    between = contents()
    inner.install()
    assert torch.cuda.device_count() == 2
    inner.undo()
    assert contents() == between
    outer.undo()
    assert contents() == before


@pytest.mark.parametrize("which", [1, 50, -1])
def test_an_error_in_the_middle_undoes_what_was_done(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is all installed, or nothing."""
    before = contents()
    changes = PretendedCuda._changes

    def failing(self: Any) -> Iterator[Any]:
        all_of_them = list(changes(self))
        all_of_them[which] = (*all_of_them[which][:2], 1)  # not callable
        yield from all_of_them

    monkeypatch.setattr(PretendedCuda, "_changes", failing)
    gpu = PretendedCuda(Noted())
    with pytest.raises(TypeError, match="not callable"):
        gpu.install()
    assert contents() == before


def test_who_kept_a_class_has_the_real_one_afterwards() -> None:
    """`torch.Stream` imported by name while there seemed to be a GPU makes none once it is gone."""
    gpu = PretendedCuda(Noted())
    gpu.install()
    stream, generator = torch.Stream, torch.Generator
    stream("cuda")
    gpu.undo()
    assert type(generator(device="cpu")) is torch._C.Generator
    with pytest.raises(RuntimeError):
        stream("cuda")


@functools.lru_cache
def is_gpu_available() -> bool:
    return torch.cuda.is_available()


def test_an_answer_kept_for_good_is_asked_for_again() -> None:
    """Caches of functions that ask for a GPU are emptied before and after."""
    assert not is_gpu_available()
    gpu = PretendedCuda(Noted())
    gpu.install()
    assert is_gpu_available()
    gpu.undo()
    assert not is_gpu_available()


# ------------------------------------------------------------------------------------- everything has an answer

GIVEN: dict[str, Any] = {
    "fraction": 0.5, "size": 64, "debug_mode": "warn", "enabled": True, "stream": None, "message": "m", "msg": "m",
    "data_ptr": 2**30, "stream_ptr": 2**30, "code": 2, "filename": "results.csv",
}  # fmt: skip
NOT_CALLED = {
    "CUDAPluggableAllocator": "loads a library of the user's",
    "change_current_allocator": "takes an object that loads one; told in a test below",
    "SDPAParams": "takes tensors; called in a test below",
    "can_use_flash_attention": "takes SDPAParams; called in a test below",
    "can_use_efficient_attention": "takes SDPAParams; called in a test below",
    "can_use_cudnn_attention": "takes SDPAParams; called in a test below",
    "graph": "takes a graph; called in a test below",
    "use_mem_pool": "takes a pool; called in a test below",
    "set_stream": "takes a stream; called in a test below",
    "StreamContext": "takes a stream; called in a test below",
    "MemPoolContext": "takes a pool; called in a test below",
    "init": "of torch.cuda.profiler, refused by all but old versions of CUDA",
    "set_rng_state": "takes a state; called in a test below",
    "set_rng_state_all": "takes states; called in a test below",
}
NOT_EMULATED = {
    "memory_usage", "device_memory_used", "list_gpu_processes", "host_memory_stats",
    "host_memory_stats_as_nested_dict", "reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats",
}  # fmt: skip
STORAGES = re.compile(r"\w+Storage")  # warn of their end, and nobody makes one of a device


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    modules = [
        torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.nvtx, torch.cuda.profiler, torch.accelerator,
        torch.backends.cuda, torch.cuda.graphs, getattr(torch.accelerator, "memory", torch.cuda),
    ]  # fmt: skip
    for module in modules:
        for name in getattr(module, "__all__", []):
            function = getattr(module, name, None)
            skipped = name in NOT_CALLED or name in NOT_EMULATED or STORAGES.fullmatch(name)
            if callable(function) and not skipped:
                yield f"{module.__name__}.{name}", function


@pytest.mark.parametrize("name", sorted(dict(public())))
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_public_function_answers(name: str, noted: Noted) -> None:
    """No function of torch.cuda, torch.accelerator or torch.backends.cuda raises."""
    module, _, attribute = name.rpartition(".")
    function = getattr(sys.modules[module], attribute)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of C
        parameters = ()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one.name for one in parameters if one.default is one.empty and one.kind in plain]
    with OnCpu():
        answer = function(*[GIVEN.get(one, torch.ones(1) if one == "obj" else 0) for one in needed])
    if hasattr(answer, "__enter__"):
        with answer:
            assert torch.cuda.is_available()
    assert noted.gaps == (["make_graphed_callables captures nothing: the callables run as they are"] * (
        attribute == "make_graphed_callables"
    ))  # fmt: skip


def not_emulated() -> Iterator[str]:
    yield from (f"torch.cuda.{name}" for name in NOT_EMULATED if hasattr(torch.cuda, name))
    yield from (f"torch.cuda.tunable.{name}" for name in torch.cuda.tunable.__all__)


@pytest.mark.parametrize("name", sorted(not_emulated()))
def test_a_function_that_is_not_emulated_raises(name: str, noted: Noted) -> None:
    """The error and the report name the function and the page that lists what is emulated."""
    module, _, attribute = name.rpartition(".")
    with pytest.raises(RuntimeError, match=rf"{re.escape(name)} is not emulated, see docs/dry-run\.md"):
        getattr(sys.modules[module], attribute)()
    assert noted.gaps == [f"{name} is not emulated, see docs/dry-run.md"]


@pytest.mark.parametrize("use", ["cache.size", "cache[0].max_size", "cache.clear()", "cache.max_size = 3"])
def test_the_plan_cache_is_not_emulated(use: str, noted: Noted) -> None:
    """Each use of `torch.backends.cuda.cufft_plan_cache` raises."""
    with pytest.raises(RuntimeError, match=r"torch\.backends\.cuda\.cufft_plan_cache is not emulated"):
        exec(use, {"cache": torch.backends.cuda.cufft_plan_cache})
    assert len(noted.gaps) == 1


def test_every_private_function_that_torch_calls_is_there(noted: Noted) -> None:
    """What torch's Python calls of the functions that only a build for CUDA has is answered."""
    folder = Path(torch.__file__).parent
    called: set[str] = set()
    for part in ("cuda", "accelerator", "backends", "nn", "optim", "utils", "amp", "autograd"):
        for path in set((folder / part).rglob("*.py")) - {folder / "cuda/tunable.py"}:  # not emulated
            called |= set(
                re.findall(r"_C\.(_(?:cuda|accelerator|nccl|broadcast|scatter|gather)_?\w*)", path.read_text())
            )
    called = {name for name in called if "ostMemoryStats" not in name}
    assert len(called) > 80
    assert sorted(name for name in called if not callable(getattr(torch._C, name, None))) == []
    real = {name for name, value in vars(torch._C).items() if isinstance(value, BuiltinFunctionType)}
    assert sorted(name for name in real if name.startswith(("_cuda_", "_accelerator_", "_nccl_"))) == []


def test_what_cannot_be_carried_out_is_told(noted: Noted) -> None:
    """A kernel of the user's, or an allocator, ends in a note."""
    with pytest.raises(RuntimeError, match=r"not covered by a dry run: kernels of torch\.cuda\.jit"):
        torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")(torch.ones(1))
    torch._C._cuda_changeCurrentAllocator(object())
    torch.cuda.CUDAGraph().replay()
    torch.cuda.Event(interprocess=True).ipc_handle()
    torch.cuda.nccl.all_reduce([torch.ones(1)])
    assert noted.gaps == [
        "kernels of torch.cuda.jiterator cannot run",
        "an allocator of your own is not used: tensors are in the memory of the CPU",
        "a replay of a CUDA graph does not repeat what was captured",
        "an event cannot be shared with another process",
        "torch.cuda.nccl.all_reduce does nothing",
    ]
    assert noted.waits == []


# ---------------------------------------------------------------------------------------------- what waits


@pytest.mark.parametrize(
    ("call", "waits"),
    [
        (lambda: torch.cuda.synchronize(), ["synchronize"]),
        (lambda: torch.cuda.synchronize("cuda:0"), ["synchronize"]),
        (lambda: synchronize(), ["synchronize"]),
        (lambda: torch.accelerator.synchronize(), ["synchronize"]),
        (lambda: torch.cuda.Event().synchronize(), ["synchronize"]),
        (lambda: Event().synchronize(), ["synchronize"]),
        (lambda: torch.Event().synchronize(), ["synchronize"]),
        (lambda: torch.cuda.Stream().synchronize(), ["synchronize"]),
        (lambda: torch.Stream().synchronize(), ["synchronize"]),
        (lambda: current_stream().synchronize(), ["synchronize"]),
        (lambda: torch.cuda.empty_cache(), ["empty_cache"]),
        (lambda: torch.cuda.memory.empty_cache(), ["empty_cache"]),
        (lambda: torch.cuda.ipc_collect(), []),
        (lambda: torch.cuda.Event().query(), []),
        (lambda: torch.cuda.Event().wait(), []),
        (lambda: torch.cuda.Stream().wait_stream(torch.cuda.current_stream()), []),
        (lambda: torch.cuda.memory_stats(), []),
        (lambda: torch.cuda.mem_get_info(), []),
        (lambda: torch.cuda.reset_peak_memory_stats(), []),
        (lambda: torch.cuda.set_per_process_memory_fraction(0.5), []),
        (lambda: torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(64)), []),
        (lambda: torch.cuda.manual_seed_all(0), []),
        (lambda: torch.cuda.get_rng_state(), []),
    ],
)
def test_only_what_waits_is_a_wait(call: Callable[[], Any], waits: list[str], noted: Noted) -> None:
    """Each call that makes the CPU wait is noted once, also through names imported beforehand."""
    call()
    assert noted.waits == waits


# ---------------------------------------------------------------------------------------------------- devices


def test_the_device_is_a_known_gpu(noted: Noted) -> None:
    """Name, capability, memory and architecture fit one another."""
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


def test_devices_are_of_a_thread() -> None:
    """`torch.cuda.device` restores the one before; another thread has its own; one too many is refused."""
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


def test_the_accelerator_is_it(noted: Noted) -> None:
    """`torch.accelerator` and `torch.get_device_module` know of it."""
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.device_count() == 1
    assert torch.accelerator.current_device_index() == 0
    assert torch.get_device_module() is torch.cuda


def test_the_old_types_make_tensors(noted: Noted) -> None:
    """`torch.cuda.FloatTensor` and its like have their dtype, of sizes as of data."""
    with OnCpu():
        assert torch.cuda.HalfTensor(2, 3).shape == (2, 3)
        assert torch.cuda.HalfTensor(torch.Size([4])).dtype == torch.float16
        assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
        assert torch.cuda.FloatTensor().numel() == 0
    assert not isinstance(torch.ones(1), torch.cuda.FloatTensor)


# --------------------------------------------------------------------------------------------- streams, events


def test_the_current_stream_is_the_one_that_was_chosen(noted: Noted) -> None:
    """Within `torch.cuda.stream`, a stream's own ``with``, and after `set_stream`."""
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
    """However streams are nested, the one outside is current again after each."""
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


def test_streams_and_events_are_of_their_classes(noted: Noted) -> None:
    """`isinstance` holds for torch's classes, and other devices keep their own."""
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
    """The usual dance of a side stream that copies, and a tensor it uses."""
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
    """As with a real one, both must be recorded, and with timing."""
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


# ---------------------------------------------------------------------------------------------- graphs, memory


def test_what_is_captured_runs_once(noted: Noted) -> None:
    """The body runs as it is; before it torch waits, and a replay is told of."""
    graph, ran = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        ran.append(torch.cuda.is_current_stream_capturing())
    graph.replay()
    assert ran == [True]
    assert not torch.cuda.is_current_stream_capturing()
    assert isinstance(graph, torch.cuda.CUDAGraph)
    assert noted.waits == ["synchronize", "empty_cache"]
    assert noted.gaps == ["a replay of a CUDA graph does not repeat what was captured"]
    assert graph.pool() != torch.cuda.graph_pool_handle()


def test_graphed_callables_are_what_they_were(noted: Noted) -> None:
    """They run as they are."""
    layer = nn.Linear(2, 2)
    assert torch.cuda.make_graphed_callables(layer, (torch.ones(1, 2),)) is layer
    assert noted.waits == ["make_graphed_callables"]


def test_memory_figures_fit_one_another(noted: Noted) -> None:
    """Nothing divides by zero, and no more is used than there is."""
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
    """The files that a memory profile writes have their parts."""
    torch.cuda.memory._record_memory_history()
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    torch.cuda.memory._record_memory_history(enabled=None)
    assert pickle.loads((tmp_path / "snapshot.pickle").read_bytes())["segments"] == []
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        assert isinstance(pool, torch.cuda.MemPool)


# ------------------------------------------------------------------------------------------------------ random


def test_random_states_repeat_what_was_drawn(noted: Noted) -> None:
    """The GPU's generator is the CPU's, from which all that runs here draws."""
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
    """After `torch.random.fork_rng`, what comes is what would have come."""
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        torch.cuda.manual_seed(1)
        torch.rand(5)
    assert torch.rand(2).equal(expected)


def test_a_generator_says_it_is_on_the_gpu(noted: Noted) -> None:
    """Functions of torch take it; copies are in the same state; without a device it is the CPU's."""
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
    """Checkpointing keeps and restores the states of the GPU's generator."""

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


# ----------------------------------------------------------------------------------- libraries, and what asks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_neither_warns_nor_steps_aside(dtype: torch.dtype, noted: Noted) -> None:
    """Autocast and the scaler of gradients are enabled, through a whole step."""
    assert torch.amp.is_autocast_available("cuda")
    with OnCpu():
        layer = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", dtype=dtype):
            assert torch.is_autocast_enabled("cuda")
            loss = layer(torch.randn(2, 4)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.is_enabled()
    assert scaler.get_scale() == 65536


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_pins(workers: int, noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """With workers, the thread that pins sees the GPU."""
    pinned: list[str] = []

    def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        pinned.append(threading.current_thread().name)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    loader = DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True, num_workers=workers)  # type: ignore[arg-type]
    assert len(list(loader)) == len(pinned) == 2


def test_the_profiler_profiles(noted: Noted) -> None:
    """A profile of CPU and GPU has the CPU's part, and torch waits when it stops."""
    kinds = torch.profiler.ProfilerActivity
    assert kinds.CUDA in torch.profiler.supported_activities()
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        torch.ones(2).add(1)
    assert "aten::add" in {event.key for event in profile.key_averages()}
    assert noted.waits == ["synchronize"]


def test_nvtx_and_the_runtime_succeed(noted: Noted) -> None:
    """Ranges nest, and functions of CUDA's runtime return no error."""
    depths = [torch.cuda.nvtx.range_push("a"), torch.cuda.nvtx.range_push("b")]
    depths += [torch.cuda.nvtx.range_pop(), torch.cuda.nvtx.range_pop()]
    assert depths == ([-2] * 4 if hasattr(torch._C, "_nvtx") else [0, 1, 1, 0])  # -2: no tool listens
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaProfilerStart())
    assert int(runtime.cudaHostRegister(0, 64, 1)) == 0
    assert runtime.cudaMemGetInfo(0) == torch.cuda.mem_get_info()
    with torch.cuda.profiler.profile():
        assert isinstance(torch.cuda.CudaError(2), RuntimeError)


def test_settings_are_kept(noted: Noted) -> None:
    """What is set is what is told, and none of it changes the real thing."""
    before = torch._C._get_linalg_preferred_backend
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_per_process_memory_fraction(0.25)
    torch.backends.cuda.preferred_linalg_library("cusolver")
    assert torch.cuda.get_sync_debug_mode() == 2
    assert torch.backends.cuda.preferred_linalg_library() == torch._C._LinalgBackend.Cusolver
    assert torch._C._get_linalg_preferred_backend is before


def test_cudnn_is_there_and_takes_nothing(noted: Noted) -> None:
    """RNNs run: their weights are not handed to cuDNN."""
    assert torch.backends.cudnn.is_available()
    assert torch.backends.cudnn.version() == 90100
    assert not torch.backends.cudnn.is_acceptable(torch.ones(1))
    assert nn.LSTM(2, 3, num_layers=2)(torch.ones(4, 2))[0].shape == (4, 3)
    with torch.backends.cudnn.flags(enabled=False):
        assert not torch.backends.cudnn.enabled


def test_attention_kernels_are_asked_for(noted: Noted) -> None:
    """Each question gets an answer."""
    query = torch.ones(1, 1, 4, 4)
    parameters = torch.backends.cuda.SDPAParams(query, query, query, None, 0.0, False, False)
    for name in ("flash", "efficient", "cudnn"):
        assert isinstance(getattr(torch.backends.cuda, f"can_use_{name}_attention")(parameters), bool)


def test_one_gpu_communicates_with_itself(noted: Noted) -> None:
    """What `nn.DataParallel` does with one device works."""
    from torch.nn.parallel import comm

    with OnCpu():
        assert [part.tolist() for part in comm.scatter(torch.arange(4.0), [0])] == [[0, 1, 2, 3]]
        assert [part.tolist() for part in comm.broadcast(torch.ones(2), [0])] == [[1, 1]]
        assert [part.tolist() for part in comm.broadcast_coalesced([torch.ones(2)], [0])[0]] == [[1, 1]]
        assert comm.gather([torch.ones(1), torch.zeros(1)], destination=0).tolist() == [1, 0]
    assert torch.cuda.nccl.version() == (2, 21, 5)


def test_other_libraries_find_a_gpu(noted: Noted) -> None:
    """Transformers says that it is there."""
    utils = pytest.importorskip("transformers.utils")
    assert utils.is_torch_cuda_available()
    assert utils.is_torch_bf16_gpu_available()


def test_nothing_warns(noted: Noted) -> None:
    """A script that prints what it runs on gets no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.cuda.init()
        shown = f"{torch.cuda.get_device_name(0)} {torch.cuda.utilization()}% {torch.cuda.temperature()} C"
    assert shown == "NVIDIA A100-SXM4-80GB 90% 60 C"
