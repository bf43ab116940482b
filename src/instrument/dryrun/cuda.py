"""The pretended GPU: `torch.cuda` and `torch.accelerator` answer as if there were one.

The private functions of ``torch._C`` are replaced, not the public functions above them: names that were imported
beforehand work as well, and each version of torch keeps its own behavior. Functions that a build for the CPU
lacks are added.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..patch import Patch, apply, undo
from . import availability_caches, legacy_types, libraries, unsupported
from .devices import Devices, Properties
from .generators import DefaultGenerator, Generator
from .graphs import Graph, make_graphed_callables
from .memory import Memory, Pool
from .state import SyncLog
from .streams import Event, Stream, Streams

CUDA_VERSION = "12.8"
_MakeReplacement = Callable[[Any], Any]
_Replacement = tuple[Any, str, _MakeReplacement]
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
    """

    def __init__(self, log: SyncLog, devices: int = 1) -> None:
        self._log = log
        self._devices = Devices(devices)
        self._streams = Streams(log, self._devices)
        self._memory = Memory(self._streams)
        self._cudart = libraries.Cudart(self._memory)
        self._generators = tuple(DefaultGenerator(index) for index in range(devices))
        self._patches: list[Patch] = []

    def install(self) -> None:
        """Install all of it, or nothing if a part fails; further calls do nothing."""
        if self._patches:
            return
        try:
            apply((Patch(*change) for change in self._changes()), self._patches)
        except BaseException:
            self.undo()
            raise
        availability_caches.clear()

    def undo(self) -> None:
        """Restore all replaced attributes; further calls do nothing."""
        if not self._patches:
            return
        undo(self._patches)
        availability_caches.clear()

    def replacements(self) -> dict[str, Any]:
        """Return the replacements of names of ``torch._C``."""
        return {
            **self._devices.replacements(), **self._streams.replacements(), **self._memory.replacements(),
            **libraries.replacements(), **unsupported.private_functions(self._log),
            "_has_cuda": True, "_cudart": self._cudart,
            "_accelerator_getDefaultGenerator": self._generators.__getitem__,
        }  # fmt: skip

    def _changes(self) -> Iterator[_Replacement]:
        replacements = unsupported.driver_functions(self._log) | self.replacements()
        for name, answer in replacements.items():
            yield torch._C, name, _constant(answer)
        for taker in (sys.modules[name] for name in _IMPORTING_MODULES if name in sys.modules):
            yield from (
                (taker, name, _constant(replacements[name])) for name in replacements if name in vars(taker)
            )
        for replaced in (libraries.public_functions(), unsupported.public_functions(self._log)):
            for owner, functions in replaced.items():
                yield from (
                    (owner, name, _constant(made))
                    for name, made in functions.items()
                    if owner is not None and hasattr(owner, name)
                )
        yield from self._state()
        yield from self._classes()

    def _state(self) -> Iterator[_Replacement]:
        """Replace the state that `torch.cuda` and similar modules keep in variables."""
        count = self._devices.count
        values = {
            "_initialized": True, "_cached_device_count": count, "_cudart": self._cudart,
            "_exchange_device": self._devices.exchange, "_maybe_exchange_device": self._devices.exchange,
            "_CudaDeviceProperties": Properties, "_get_device_properties": Properties,
            "default_generators": self._generators,
            **legacy_types.types(),
        }  # fmt: skip
        for name, value in values.items():
            yield torch.cuda, name, _constant(value)
        if not hasattr(torch._C, "_nvtx"):
            yield torch.cuda.nvtx, "_nvtx", _constant(libraries.Nvtx())
        if torch.version.cuda is None:
            yield torch.version, "cuda", _constant(CUDA_VERSION)
        if hasattr(torch.accelerator, "get_device_capability"):
            yield torch.accelerator, "get_device_capability", _constant(self._devices.capability)
        graphed = make_graphed_callables(self._log)
        yield torch.cuda, "make_graphed_callables", _constant(graphed)
        yield torch.cuda.graphs, "make_graphed_callables", _constant(graphed)

    def _classes(self) -> Iterator[_Replacement]:
        """Make the classes of `torch.cuda`, and their counterparts in ``torch``, return pretended objects."""
        cuda, streams = torch.cuda, self._streams
        yield cuda.Stream, "__new__", _static(streams.new)
        yield cuda.Event, "__new__", _static(streams.event)
        yield cuda.Event, "from_ipc_handle", _static(lambda device, handle: streams.event(cuda.Event))
        yield cuda.CUDAGraph, "__new__", _static(lambda kind, *_, **__: Graph(streams, kind))
        yield cuda.MemPool, "__new__", _static(lambda kind, allocator=None, *_, **__: Pool(kind, allocator))
        if hasattr(cuda.memory, "MemPoolContext"):  # torch 2.6
            yield cuda.memory.MemPoolContext, "__new__", _static(lambda kind, pool: pool)
        if hasattr(torch.accelerator, "Graph"):
            made = _static(lambda kind, keep_graph=False, *, pool=None, **_: Graph(streams, kind, pool))
            yield torch.accelerator.Graph, "__new__", made
        capturing = Stream(streams, cuda.Stream, 1, 0)
        yield cuda.graph, "default_capture_stream", _constant(capturing)
        yield torch.Tensor, "record_stream", _record_stream
        yield torch, "Stream", lambda real: self._stand_in(real, streams.generic, Stream)
        yield torch, "Event", lambda real: self._stand_in(real, streams.generic_event, Event)
        yield torch, "Generator", lambda real: self._stand_in(real, _generator(self._devices), Generator)

    def _stand_in(self, real: Any, pretended: Callable[..., Any], kind: type) -> Any:
        """Return a class that passes for ``real``, and returns an object of ``pretended`` unless that is None."""
        meta: Any = type(real)
        patches = self._patches  # empty after `undo`: a class that the program kept then makes real objects

        class Kind(meta):  # type: ignore[misc]
            def __call__(self, *args: Any, **options: Any) -> Any:
                if self is not stand_in:
                    return super().__call__(*args, **options)
                made = pretended(*args, **options) if patches else None
                return real(*args, **options) if made is None else made

            def __instancecheck__(self, instance: Any) -> bool:
                if self is not stand_in:
                    return bool(super().__instancecheck__(instance))
                return isinstance(instance, real) or type.__instancecheck__(kind, instance)

            def __subclasscheck__(self, subclass: Any) -> bool:
                if self is not stand_in:
                    return bool(super().__subclasscheck__(subclass))
                return issubclass(subclass, real)

        stand_in: Any = Kind(real.__name__, (real,), {"__module__": real.__module__, "__doc__": real.__doc__})
        return stand_in


def _constant(value: Any) -> _MakeReplacement:
    return lambda _: value


def _static(function: Callable[..., Any]) -> _MakeReplacement:
    return lambda _: staticmethod(function)


def _record_stream(real: Callable[..., Any]) -> Callable[..., Any]:
    def record_stream(tensor: Any, stream: Any) -> Any:
        return None if type(stream) is Stream else real(tensor, stream)

    return record_stream


def _generator(devices: Devices) -> Callable[..., Generator | None]:
    def generator(device: Any = "cpu") -> Generator | None:
        return Generator(devices.index(device)) if devices.is_gpu(device) else None

    return generator
