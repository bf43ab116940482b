"""The pretended GPU: `torch.cuda` and `torch.accelerator` answer as if there were one, or say what is unsupported.

Each call is a finding that names the function and `docs/dry-run.md`. A call whose result the program needs raises
the same sentence; any other call is skipped.

The private functions of ``torch._C`` are replaced, not the public functions above them: names that were imported
beforehand work as well, and each version of torch keeps its own behavior. Functions that a build for the CPU
lacks are added.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType
from typing import Any

import torch

from ...base.imports import loaded_modules
from ...base.patch import Patch, apply, undo
from . import libraries
from .devices import DefaultGenerator, Event, Generator, Gpus, Graph, Properties, Stream, make_graphed_callables
from .replacement import Replacement, calling
from .state import RunState

_CachedFunction = type(functools.lru_cache(lambda: None))
_PREDICATES = ("is_", "_is_", "has_", "_has_", "can_", "supports_")
_GPU_WORDS = ("cuda", "gpu", "accelerator", "nccl")


# By module: which namespace was searched, how many names it had, and those of its predicates.
_searched: dict[str, tuple[int, int, list[str]]] = {}


def _clear_availability_caches() -> None:
    """Clear the caches of functions such as ``is_..._available()`` that query a GPU.

    The next call computes the answer anew. The answers are booleans, so no other object keeps a reference to one.
    To search 3,000 modules takes 12 ms, so a module is searched again only when its namespace has grown or shrunk.
    """
    for module, _, names in loaded_modules():
        namespace, size, predicates = _searched.get(module, (0, 0, []))
        if (namespace, size) != (id(names), len(names)):
            predicates = [name for name, held in list(names.items()) if _queries_gpu(held)]
            _searched[module] = id(names), len(names), predicates
        for name in predicates:
            function: Any = names.get(name)
            if _queries_gpu(function):  # else it was replaced
                function.cache_clear()


def _queries_gpu(value: Any) -> bool:
    if type(value) is not _CachedFunction:
        return False
    code = getattr(getattr(value, "__wrapped__", None), "__code__", None)
    if code is None or not code.co_name.startswith(_PREDICATES):
        return False
    used = (code.co_name, *code.co_names)
    return any(word in name for name in used for word in _GPU_WORDS)


DTYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "CharTensor": torch.int8,
    "ShortTensor": torch.int16, "IntTensor": torch.int32, "LongTensor": torch.int64, "BoolTensor": torch.bool,
}  # fmt: skip


class _Type(type):
    """A class such as `torch.cuda.FloatTensor`, a call of which makes a tensor on the GPU."""

    dtype: Any

    def __call__(cls, *args: Any, **options: Any) -> Any:
        device = options.get("device") or "cuda"
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            if isinstance(args[0], torch.Tensor):
                return args[0].to(device, cls.dtype)
            return torch.tensor(args[0], dtype=cls.dtype, device=device)
        size = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return torch.empty(size, dtype=cls.dtype, device=device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype


PAGE = "docs/dry-run.md"
_TUNABLE = "_cuda_tunableop_"
_WITHOUT_RESULT = re.compile(r"\w*enable|set_\w+|write_file_on_exit")  # without a result
_HOST = "torch.cuda.host_memory_stats"
# Functions of torch._C, each with the public function that calls it
_SKIPPED_FUNCTIONS = {
    "_cuda_record_untuned_enable": "torch.cuda.tunable.record_untuned_enable",
    "_cuda_resetAccumulatedHostMemoryStats": "torch.cuda.reset_accumulated_host_memory_stats",
    "_cuda_resetPeakHostMemoryStats": "torch.cuda.reset_peak_host_memory_stats",
    **{
        f"_nccl_{name}": f"torch.cuda.nccl.{name}"
        for name in ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "init_rank")
    },
}
_RAISING_FUNCTIONS = {
    "_cuda_record_untuned_is_enabled": "torch.cuda.tunable.record_untuned_is_enabled",
    "_cuda_hostMemoryStats": _HOST,
    "_cuda_jiterator_compile_and_launch_kernel": "torch.cuda.jiterator",
    "_cuda_getCheckpointState": "a checkpoint of a CUDA memory pool",
    "_cuda_setCheckpointPoolState": "a checkpoint of a CUDA memory pool",
    "_construct_CUDA_Tensor_From_Storage_And_Metadata": "a checkpoint of a CUDA memory pool",
}
# Functions of torch._C that begin so call the driver, also those that a later version of torch adds
_DRIVER_PREFIXES = ("_cuda_", "_accelerator_", "_nccl_")
_GREEN = ("__init__", "create", "max_workqueue_concurrency")
# Functions that would query a driver
_RAISING_PUBLIC = ("list_gpu_processes", "memory_usage", "device_memory_used")


def _unsupported(log: RunState, api: str, *, needed: bool = True) -> Callable[..., None]:
    """Return the replacement of a function that is not emulated.

    Args:
        log: records a call.
        api: the name of the function that the user called.
        needed: whether the program cannot go on without the result.
    """
    sentence = f"a dry run does not support {api}: see {PAGE}"

    def call(*_: Any, **__: Any) -> None:
        log.record_not_covered(sentence)
        if needed:
            raise RuntimeError(sentence)

    return call


def _unsupported_private(log: RunState) -> dict[str, Any]:
    """Return the replacements of functions of ``torch._C``, by name."""
    skipped = {name: _unsupported(log, api, needed=False) for name, api in _SKIPPED_FUNCTIONS.items()}
    tunable = {name.removeprefix(_TUNABLE) for name in vars(torch._C) if name.startswith(_TUNABLE)}
    for api in tunable.union(torch.cuda.tunable.__all__):  # a build for the CPU lacks the functions of torch._C
        needed = _WITHOUT_RESULT.fullmatch(api) is None
        skipped[_TUNABLE + api] = _unsupported(log, f"torch.cuda.tunable.{api}", needed=needed)
    return skipped | {name: _unsupported(log, api) for name, api in _RAISING_FUNCTIONS.items()}


def _unsupported_driver(log: RunState) -> dict[str, Any]:
    """Return replacements of all functions of ``torch._C`` that call the driver, for those without another one."""
    return {
        name: _unsupported(log, f"torch._C.{name}")
        for name, held in vars(torch._C).items()
        if name.startswith(_DRIVER_PREFIXES) and isinstance(held, BuiltinFunctionType)
    }


def _unsupported_public(log: RunState) -> dict[Any, dict[str, Any]]:
    """Return the replacements of public functions, by the module or class that holds them."""

    def compile_kernel(source: str, name: str, *_: Any, **__: Any) -> Callable[..., None]:
        return _unsupported(log, f"the CUDA kernel {name} of torch.cuda._compile_kernel", needed=False)

    readings = {name: _unsupported(log, f"torch.cuda.{name}") for name in _RAISING_PUBLIC}
    green = _unsupported(log, "torch.cuda.GreenContext")
    plan_cache: Any = torch.backends.cuda.cuFFTPlanCacheManager
    return {
        torch.cuda: {**readings, "_compile_kernel": compile_kernel},
        torch.cuda.memory: readings,
        getattr(torch.cuda, "GreenContext", None): dict.fromkeys(_GREEN, green),
        plan_cache: {"__getitem__": _unsupported(log, "torch.backends.cuda.cufft_plan_cache")},
        torch: {"_cufft_clear_plan_cache": _unsupported(log, "torch.backends.cuda.cufft_plan_cache")},
    }


CUDA_VERSION = "12.8"
# These modules imported functions of ``torch._C`` by name
_IMPORTING_MODULES = (
    "torch.cuda", "torch.cuda.graphs", "torch.cuda.memory", "torch._dynamo.device_interface",
    "torch._inductor.cudagraph_trees",
)  # fmt: skip


class PretendedCuda:
    """Installs the pretended GPU in the whole process, and removes it again.

    Args:
        log: records synchronizations, and calls that cannot be carried out.
        devices: the number of pretended GPUs.

    Attributes:
        patches: what it replaced.
    """

    def __init__(self, log: RunState, devices: int = 1) -> None:
        self._gpus = Gpus(log, devices)
        self._memory = libraries.MemoryFigures(getattr(log, "allocator", lambda: None))
        self._cudart = libraries.Cudart(self._memory)
        self._generators = tuple(DefaultGenerator(index) for index in range(devices))
        self.patches: list[Patch] = []

    def install(self) -> None:
        """Install all of it, or nothing if a part fails; further calls do nothing."""
        if self.patches:
            return
        try:
            apply((Patch(*change) for change in self._changes()), self.patches)
        except BaseException:
            self.undo()
            raise
        _clear_availability_caches()

    def undo(self) -> None:
        """Restore all replaced attributes; further calls do nothing."""
        if not self.patches:
            return
        undo(self.patches)
        _clear_availability_caches()

    def replacements(self) -> dict[str, Any]:
        """Return the replacements of names of ``torch._C``."""
        return {
            **self._gpus.replacements(), **libraries.replacements(),
            **libraries.memory_replacements(self._gpus.log, self._gpus.count, self._memory),
            **_unsupported_private(self._gpus.log),
            "_has_cuda": True, "_cudart": self._cudart,
            "_accelerator_getDefaultGenerator": self._generators.__getitem__,
        }  # fmt: skip

    def _changes(self) -> Iterator[Replacement]:
        replacements = _unsupported_driver(self._gpus.log) | self.replacements()
        yield from _constants(torch._C, replacements)
        for taker in (sys.modules[name] for name in _IMPORTING_MODULES if name in sys.modules):
            used = [name for name in replacements if name in vars(taker)]
            yield from _constants(taker, {name: replacements[name] for name in used})
        for replaced in (libraries.public_functions(), _unsupported_public(self._gpus.log)):
            for owner, made in replaced.items():
                names = [name for name in made if owner is not None and hasattr(owner, name)]
                yield from _constants(owner, {name: made[name] for name in names})
        yield from self._state()
        yield from self._classes()

    def _state(self) -> Iterator[Replacement]:
        """Replace the state that `torch.cuda` and similar modules keep in variables."""
        count = self._gpus.count
        values = {
            "_initialized": True, "_cached_device_count": count, "_cudart": self._cudart,
            "_exchange_device": self._gpus.exchange, "_maybe_exchange_device": self._gpus.exchange,
            "_CudaDeviceProperties": Properties, "_get_device_properties": Properties,
            "default_generators": self._generators,
            **{
                name: _Type(name, (), {"dtype": dtype, "is_cuda": True, "__module__": "torch.cuda"})
                for name, dtype in DTYPES.items()
            },
        }  # fmt: skip
        yield from _constants(torch.cuda, values)
        if not hasattr(torch._C, "_nvtx"):
            yield torch.cuda.nvtx, "_nvtx", _constant(libraries.Nvtx())
        if torch.version.cuda is None:
            yield torch.version, "cuda", _constant(CUDA_VERSION)
        if hasattr(torch.accelerator, "get_device_capability"):
            yield torch.accelerator, "get_device_capability", _constant(self._gpus.capability)
        graphed = make_graphed_callables(self._gpus.log)
        yield torch.cuda, "make_graphed_callables", _constant(graphed)
        yield torch.cuda.graphs, "make_graphed_callables", _constant(graphed)

    def _classes(self) -> Iterator[Replacement]:
        """Make the classes of `torch.cuda`, and their counterparts in ``torch``, return pretended objects."""
        cuda, gpus = torch.cuda, self._gpus
        yield cuda.Stream, "__new__", _static(gpus.stream)
        yield cuda.Event, "__new__", _static(gpus.event)
        yield cuda.Event, "from_ipc_handle", _static(lambda device, handle: gpus.event(cuda.Event))
        yield cuda.CUDAGraph, "__new__", _static(lambda kind, *_, **__: Graph(gpus, kind))
        yield (
            cuda.MemPool,
            "__new__",
            _static(lambda kind, allocator=None, *_, **__: libraries.Pool(kind, allocator)),
        )
        if hasattr(cuda.memory, "MemPoolContext"):  # torch 2.6
            yield cuda.memory.MemPoolContext, "__new__", _static(lambda kind, pool: pool)
        if hasattr(torch.accelerator, "Graph"):
            made = _static(lambda kind, keep_graph=False, *, pool=None, **_: Graph(gpus, kind, pool))
            yield torch.accelerator.Graph, "__new__", made
        capturing = Stream(gpus, cuda.Stream, 1, 0)
        yield cuda.graph, "default_capture_stream", _constant(capturing)
        yield torch.Tensor, "record_stream", calling(_record_stream)
        yield torch, "Stream", lambda real: self._pretended_class(real, gpus.generic_stream, Stream)
        yield torch, "Event", lambda real: self._pretended_class(real, gpus.generic_event, Event)
        yield torch, "Generator", lambda real: self._pretended_class(real, gpus.generator, Generator)

    def _pretended_class(self, real: Any, make: Callable[..., Any], kind: type) -> Any:
        """Return a class that passes for ``real``, and returns an object of ``make`` unless that is None."""
        meta: Any = type(real)
        patches = self.patches  # empty after `undo`: a class that the program kept then makes real objects

        class Kind(meta):  # type: ignore[misc]
            def __call__(self, *args: Any, **options: Any) -> Any:
                if self is not pretended:
                    return super().__call__(*args, **options)
                made = make(*args, **options) if patches else None
                return real(*args, **options) if made is None else made

            def __instancecheck__(self, instance: Any) -> bool:
                if self is not pretended:
                    return bool(super().__instancecheck__(instance))
                return isinstance(instance, real) or type.__instancecheck__(kind, instance)

            def __subclasscheck__(self, subclass: Any) -> bool:
                if self is not pretended:
                    return bool(super().__subclasscheck__(subclass))
                return issubclass(subclass, real)

        pretended: Any = Kind(real.__name__, (real,), {"__module__": real.__module__, "__doc__": real.__doc__})
        return pretended


def _constants(owner: Any, values: dict[str, Any]) -> Iterator[Replacement]:
    return ((owner, name, _constant(value)) for name, value in values.items())


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _record_stream(original: Callable[..., Any], tensor: Any, stream: Any) -> Any:
    return None if type(stream) is Stream else original(tensor, stream)


def _static(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda _: staticmethod(function)
