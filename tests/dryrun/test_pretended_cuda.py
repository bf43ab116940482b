"""The pretended GPU: installation, return values, synchronizations and libraries."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import Event, current_stream, synchronize  # before there is anything to answer
from torch.utils.data import DataLoader

from instrument.base.patch import Patch, apply
from instrument.syncs.dryrun import cuda
from instrument.syncs.dryrun.cuda import PretendedCuda
from tests.dryrun.pretended import Noted, OnCpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")


PLACES = [
    torch, torch._C, torch.cuda, torch.cuda.memory, torch.cuda.graphs, torch.cuda.nvtx, torch.cuda.Stream,
    torch.cuda.Event, torch.cuda.MemPool, torch.cuda.CUDAGraph, torch.cuda.graph, torch.accelerator, torch.version,
    torch.Tensor, torch.backends.cuda, torch.backends.cudnn.m,
    torch.backends.cuda.cuFFTPlanCacheManager,
    torch.autograd, torch.autograd.profiler, torch.profiler,
]  # fmt: skip


def contents() -> list[dict[str, Any]]:
    skipped = "__warningregistry__"
    return [{name: value for name, value in vars(one).items() if name != skipped} for one in PLACES]


# ----------------------------------------------------------------------------------------------- restoration


def test_everything_is_restored() -> None:
    """After any number of installations and removals, each attribute has its first value."""
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


def test_nested_installations() -> None:
    """Of two nested pretended GPUs the inner one answers until it is removed, and then the outer one."""
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
def test_failed_installation(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error during the installation undoes all of it."""
    before = contents()

    def failing(patches: Iterable[Patch], held: list[Patch]) -> None:
        all_of_them = list(patches)
        all_of_them[which] = Patch(torch.cuda, "device_count", 1)  # type: ignore[arg-type]  # not callable
        apply(all_of_them, held)

    monkeypatch.setattr(cuda, "apply", failing)
    gpu = PretendedCuda(Noted())
    with pytest.raises(TypeError, match="not callable"):
        gpu.install()
    assert contents() == before


def test_imported_classes_are_real_afterwards() -> None:
    """A `torch.Stream` imported by name during the run makes no stream after it."""
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


def test_caches_are_emptied() -> None:
    """Caches of functions that look for a GPU are emptied before and after."""
    assert not is_gpu_available()
    gpu = PretendedCuda(Noted())
    gpu.install()
    assert is_gpu_available()
    gpu.undo()
    assert not is_gpu_available()


def test_caches_of_a_module_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a module has gained since the last search is emptied, and so is what has replaced it."""

    def has_gpu() -> bool:
        return torch.cuda.is_available()

    gpu = PretendedCuda(Noted())
    gpu.install()
    gpu.undo()
    for _ in range(2):
        cached = functools.lru_cache(has_gpu)
        monkeypatch.setattr(sys.modules[__name__], "gained", cached, raising=False)
        assert not cached()
        gpu.install()
        assert cached()
        gpu.undo()
        assert not cached()


# ---------------------------------------------------------------------------------- everything has an answer


GIVEN: dict[str, Any] = {
    "fraction": 0.5, "size": 64, "debug_mode": "warn", "enabled": True, "stream": None, "message": "m", "msg": "m",
    "data_ptr": 2**30, "stream_ptr": 2**30, "code": 2, "filename": "results.csv",
}  # fmt: skip


NOT_CALLED = {
    "CUDAPluggableAllocator": "loads a library of the user's",
    "change_current_allocator": "takes an object that loads one; told in a test below",
    "tune_gemm_in_file": "reads a file of the user's",
    "mgpu_tune_gemm_in_file": "reads files of the user's",
    "SDPAParams": "takes tensors; called in a test below",
    "can_use_flash_attention": "takes SDPAParams; called in a test below",
    "can_use_efficient_attention": "takes SDPAParams; called in a test below",
    "can_use_cudnn_attention": "takes SDPAParams; called in a test below",
    "graph": "takes a graph; called in a test below",
    "use_mem_pool": "takes a pool; called in a test below",
    "set_stream": "takes a stream; called in a test below",
    "StreamContext": "takes a stream; called in a test below",
    "MemPoolContext": "takes a pool; called in a test below",
    "cuFFTPlanCacheManager": "not emulated; used in a test below",
    "init": "of torch.cuda.profiler, refused by all but old versions of CUDA",
    "set_rng_state": "takes a state; called in a test below",
    "set_rng_state_all": "takes states; called in a test below",
}


WALLED = re.compile(
    r"torch\.cuda\.GreenContext|torch\.cuda\.tunable\.\w+|torch\.cuda\.(?:memory\.)?(?:\w*host_memory_stats\w*|list_gpu_processes|memory_usage|"
    r"device_memory_used)"
)  # the API that a dry run does not emulate


STORAGES = re.compile(r"\w+Storage")  # warn of their end, and nobody makes one of a device


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    modules = [
        torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.nvtx, torch.cuda.profiler, torch.cuda.tunable,
        torch.accelerator, torch.backends.cuda, torch.cuda.graphs,
        getattr(torch.accelerator, "memory", torch.cuda),
    ]  # fmt: skip
    for module in modules:
        for name in getattr(module, "__all__", []):
            function = getattr(module, name, None)
            if callable(function) and name not in NOT_CALLED and not STORAGES.fullmatch(name):
                yield f"{module.__name__}.{name}", function


@pytest.mark.parametrize("name", sorted(dict(public())))
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_public_function_answers(name: str, noted: Noted) -> None:
    """Public functions around torch.cuda return, or say that a dry run does not support them."""
    module, _, attribute = name.rpartition(".")
    function = getattr(sys.modules[module], attribute)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of C
        parameters = ()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one.name for one in parameters if one.default is one.empty and one.kind in plain]
    given = [GIVEN.get(one, torch.ones(1) if one == "obj" else 0) for one in needed]
    if WALLED.fullmatch(name):
        with suppress(RuntimeError):
            result = function(*given)
            if isinstance(result, AbstractContextManager):
                result.__enter__()
        api, page = r"torch\.cuda\.(tunable\.)?\w+", r"docs/dry-run\.md"
        assert len(noted.gaps) == 1
        assert re.fullmatch(f"a dry run does not support {api}: see {page}", noted.gaps[0])
        return
    with OnCpu():
        answer = function(*given)
    if hasattr(answer, "__enter__"):
        with answer:
            assert torch.cuda.is_available()
    assert noted.gaps == (["make_graphed_callables captures nothing: the callables run as they are"] * (
        attribute == "make_graphed_callables"
    ))  # fmt: skip


def test_private_functions_that_torch_calls(noted: Noted) -> None:
    """Functions of a CUDA build that torch's Python calls exist."""
    folder = Path(torch.__file__).parent
    called: set[str] = set()
    for part in ("cuda", "accelerator", "backends", "nn", "optim", "utils", "amp", "autograd"):
        for path in (folder / part).rglob("*.py"):
            called |= set(
                re.findall(r"_C\.(_(?:cuda|accelerator|nccl|broadcast|scatter|gather)_?\w*)", path.read_text())
            )
    assert len(called) > 80
    assert sorted(name for name in called if not callable(getattr(torch._C, name, None))) == []


SETTINGS = re.compile(
    r"_(get|set)_(backcompat_broadcast_warn|cublas|cudnn|rocm)\w*|_(get|set)_sdp_use_cudnn|_get_cudnn_sdp_enabled|"
    r"_is_cudnn_attention_decode_disabled|_jit_\w+|(get|set)_autocast_gpu_dtype|_rocm_is_backward_pass"
)  # read or set a variable of torch
HARMLESS = {
    "_activate_gpu_trace": "stores a callback",
    "_ensureCUDADeviceGuardSet": "prepares FakeTensorMode for machines without a GPU",
}


def test_private_functions_of_this_version() -> None:
    """Each function of this torch that may call the driver has an answer of its own: a new one fails here."""
    about_gpus = re.compile(r"cuda|accelerator|nccl|cudnn|gpu|cublas|cufft|cusparse|nvrtc|nvml|rocm|hip|broadcast")
    real = {name for name, found in vars(torch._C).items() if isinstance(found, BuiltinFunctionType)}
    suspects = {name for name in real if about_gpus.search(name.lower()) and not SETTINGS.fullmatch(name)}
    assert sorted(suspects - PretendedCuda(Noted()).replacements().keys() - HARMLESS.keys()) == []


def test_private_functions_of_later_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of the driver that is not known here is refused by its name, and never called."""
    name = "_cuda_function_of_a_later_version"
    monkeypatch.setattr(torch._C, name, len, raising=False)
    notes = Noted()
    gpu = PretendedCuda(notes)
    gpu.install()
    try:
        with pytest.raises(RuntimeError) as caught:
            getattr(torch._C, name)("driver")
    finally:
        gpu.undo()
    assert str(caught.value) == f"a dry run does not support torch._C.{name}: see docs/dry-run.md"
    assert notes.gaps == [str(caught.value)]
    assert getattr(torch._C, name) is len


def test_what_cannot_run_is_noted(noted: Noted) -> None:
    """A kernel or an allocator of the user leaves a note."""
    with pytest.raises(RuntimeError, match=r"a dry run does not support torch\.cuda\.jiterator: see"):
        torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")(torch.ones(1))
    torch._C._cuda_changeCurrentAllocator(object())
    torch.cuda.CUDAGraph().replay()
    torch.cuda.Event(interprocess=True).ipc_handle()
    torch.cuda.nccl.all_reduce([torch.ones(1)])
    assert noted.gaps == [
        "a dry run does not support torch.cuda.jiterator: see docs/dry-run.md",
        "the program's own allocator is not used: tensors are in the CPU's memory",
        "a replay of a CUDA graph does not repeat the captured work",
        "an event cannot be shared with another process",
        "a dry run does not support torch.cuda.nccl.all_reduce: see docs/dry-run.md",
    ]
    assert noted.waits == []


def test_settings_that_are_not_emulated_are_skipped(noted: Noted) -> None:
    """Setters of TunableOp are skipped, and getters raise the sentence that is recorded."""
    sentence = "a dry run does not support torch.cuda.tunable.{}: see docs/dry-run.md"
    torch.cuda.tunable.enable()
    torch.cuda.tunable.set_filename("tuned.csv")
    with pytest.raises(RuntimeError) as caught:
        torch.cuda.tunable.is_enabled()
    assert str(caught.value) == sentence.format("is_enabled")
    assert noted.gaps == [sentence.format(name) for name in ("enable", "set_filename", "is_enabled")]


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.backends.cuda.cufft_plan_cache.size,
        lambda: torch.backends.cuda.cufft_plan_cache[0].max_size,
        lambda: setattr(torch.backends.cuda.cufft_plan_cache, "max_size", 10),
        lambda: torch.backends.cuda.cufft_plan_cache.clear(),
    ],
    ids=["size", "of a device", "set", "clear"],
)
def test_the_plan_cache_of_cufft_is_not_emulated(call: Callable[[], object], noted: Noted) -> None:
    """Each use of cuFFT's plan cache raises the sentence that is noted."""
    sentence = "a dry run does not support torch.backends.cuda.cufft_plan_cache: see docs/dry-run.md"
    with pytest.raises(RuntimeError) as caught:
        call()
    assert (str(caught.value), noted.gaps) == (sentence, [sentence])


# ------------------------------------------------------------------------------------------------ what waits


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
def test_synchronizing_calls(call: Callable[[], Any], waits: list[str], noted: Noted) -> None:
    """Each synchronizing call is noted once, also through names imported earlier."""
    call()
    assert noted.waits == waits


# ---------------------------------------------------------------------------------- libraries, and what asks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_stays_enabled(dtype: torch.dtype, noted: Noted) -> None:
    """Autocast and the gradient scaler stay enabled through a whole step, without a warning."""
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
    """The pinning thread of a DataLoader with workers sees the GPU."""
    pinned: list[str] = []

    def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        pinned.append(threading.current_thread().name)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    loader = DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True, num_workers=workers)  # type: ignore[arg-type]
    assert len(list(loader)) == len(pinned) == 2


def test_the_profiler_profiles(noted: Noted) -> None:
    """A profile of CPU and GPU has the CPU's events, and torch synchronizes when it stops."""
    kinds = torch.profiler.ProfilerActivity
    assert kinds.CUDA in torch.profiler.supported_activities()
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        torch.ones(2).add(1)
    assert "aten::add" in {event.key for event in profile.key_averages()}
    assert noted.waits == ["synchronize"]


def test_nvtx_and_the_runtime_succeed(noted: Noted) -> None:
    """Ranges nest, and functions of the CUDA runtime return no error."""
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
    """Settings read back as set, and the real ones do not change."""
    before = torch._C._get_linalg_preferred_backend
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_per_process_memory_fraction(0.25)
    torch.backends.cuda.preferred_linalg_library("cusolver")
    assert torch.cuda.get_sync_debug_mode() == 2
    assert torch.backends.cuda.preferred_linalg_library() == torch._C._LinalgBackend.Cusolver
    assert torch._C._get_linalg_preferred_backend is before


def test_cudnn_gets_no_weights(noted: Noted) -> None:
    """RNNs run without handing their weights to cuDNN."""
    assert torch.backends.cudnn.is_available()
    assert torch.backends.cudnn.version() == 90100
    assert not torch.backends.cudnn.is_acceptable(torch.ones(1))
    assert nn.LSTM(2, 3, num_layers=2)(torch.ones(4, 2))[0].shape == (4, 3)
    with torch.backends.cudnn.flags(enabled=False):
        assert not torch.backends.cudnn.enabled


def test_attention_kernels(noted: Noted) -> None:
    """Each question about attention kernels gets an answer."""
    query = torch.ones(1, 1, 4, 4)
    parameters = torch.backends.cuda.SDPAParams(query, query, query, None, 0.0, False, False)
    for name in ("flash", "efficient", "cudnn"):
        assert isinstance(getattr(torch.backends.cuda, f"can_use_{name}_attention")(parameters), bool)


def test_one_gpu_communicates_with_itself(noted: Noted) -> None:
    """Communication functions work with one device, as `nn.DataParallel` uses them."""
    from torch.nn.parallel import comm

    with OnCpu():
        assert [part.tolist() for part in comm.scatter(torch.arange(4.0), [0])] == [[0, 1, 2, 3]]
        assert [part.tolist() for part in comm.broadcast(torch.ones(2), [0])] == [[1, 1]]
        assert [part.tolist() for part in comm.broadcast_coalesced([torch.ones(2)], [0])[0]] == [[1, 1]]
        assert comm.gather([torch.ones(1), torch.zeros(1)], destination=0).tolist() == [1, 0]
    assert torch.cuda.nccl.version() == (2, 21, 5)


def test_other_libraries_find_a_gpu(noted: Noted) -> None:
    """Transformers finds the GPU."""
    utils = pytest.importorskip("transformers.utils")
    assert utils.is_torch_cuda_available()
    assert utils.is_torch_bf16_gpu_available()


def test_nothing_warns(noted: Noted) -> None:
    """A script that prints its device gets no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.cuda.init()
        shown = f"{torch.cuda.get_device_name(0)} {torch.cuda.utilization()}% {torch.cuda.temperature()} C"
    assert shown == "NVIDIA A100-SXM4-80GB 90% 60 C"
