"""Replaces code of torch that reads the device of a tensor or storage in C++, saves it, or needs its data."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.utils.dlpack
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import constraints
from torch.utils._python_dispatch import _disable_current_modes

from ...explain.waits.operations import FROM_GPU, FROM_PAGEABLE
from .dataless import DatalessMode
from .rules import record_transfer
from .state import PINNED, RunState, Tags, as_cuda

Replacement = tuple[Any, str, Callable[[Any], Any]]  # owner, name, and the function that makes the replacement
# Modules of torch that read a storage in place, which is in the CPU's memory
_REAL = ("torch.serialization", "torch.multiprocessing.reductions")


def calling(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return the maker of a replacement of ``original`` that calls ``function(original, *arguments)``."""

    def make(original: Any) -> Any:
        @wraps(original)  # pickles name it
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return call

    return make


def storage_changes(state: RunState) -> Iterator[Replacement]:
    """Yield the replacements of code that reads or saves the device of a tensor."""
    tags = state.tags

    def group(original: Any, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        groups = {}
        for (device, dtype), held in original(*args, **kwargs).items():
            groups[tags.first_device(held[0][0]) or device, dtype] = held
        return groups

    def location_tag(original: Any, storage: Any) -> Any:
        device = tags.storage_device(storage)
        if device is None:
            return original(storage)
        state.record_sync("save", FROM_GPU, "D2H", storage.nbytes())
        return str(device)

    def restore_location(original: Any, storage: Any, location: Any) -> Any:
        device = as_cuda(location)
        if device is None:
            return original(storage, location)
        state.record_sync("load", FROM_PAGEABLE, "H2D", storage.nbytes())
        tags.put_storage(storage, device)
        return storage

    def device(original: Any) -> property:
        def get(storage: Any) -> Any:
            asking = sys._getframe(1).f_globals.get("__name__")
            found = None if asking in _REAL else tags.storage_device(storage)
            return original.__get__(storage) if found is None else found

        return property(get)

    def make_new(original: Any) -> Any:
        def new(kind: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
            target = as_cuda(device)
            real = device if target is None else "cpu" if state.fake is None else "meta"
            out = original(kind, *args, device=real, **kwargs)
            if target is not None:
                tags.put_storage(out, target)
            return out

        return staticmethod(new)

    def copy_(original: Any, storage: Any, source: Any, non_blocking: Any = None) -> Any:
        """Record a synchronizing copy without data, for which no operator runs that would record it."""
        if state.fake is None:
            return original(storage, source, non_blocking)
        up = tags.storage_device(storage) is not None
        if up != (tags.storage_device(source) is not None):
            pinned = tags.storage_tag(source if up else storage) is PINNED
            record_transfer(state, "copy_", up, pinned, bool(non_blocking), source.nbytes())
        return storage

    def named(original: Any, *args: Any, **kwargs: Any) -> Any:
        with state.named_call(original.__name__):
            return original(*args, **kwargs)

    def create(original: Any, *args: Any, **kwargs: Any) -> Any:
        return state.thread.functions.run_and_tag(original, args, kwargs)

    def from_dlpack(original: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(source, torch.Tensor) and tags.device(source) is not None:
            return source.detach()
        return original(source, *args, **kwargs)

    yield torch.UntypedStorage, "__new__", make_new
    yield torch.UntypedStorage, "device", device
    yield torch.UntypedStorage, "copy_", calling(copy_)
    for name in ("to", "cuda", "cpu"):
        yield torch.UntypedStorage, name, calling(named)
    yield torch, "range", calling(create)
    bindings: Any = torch._C
    yield bindings._nested, "nested_tensor", calling(create)
    yield torch, "from_dlpack", calling(from_dlpack)
    yield torch.utils.dlpack, "from_dlpack", calling(from_dlpack)
    yield torch._C, "_group_tensors_by_device_and_dtype", calling(group)
    yield torch.serialization, "location_tag", calling(location_tag)
    yield torch.serialization, "default_restore_location", calling(restore_location)


def dataless_changes(fake: DatalessMode, state: RunState) -> Iterator[Replacement]:
    """Return the replacements with which tensors without data answer as if they had data, outside operators."""
    mode, tags = fake.mode, state.tags

    def device(original: Any) -> property:
        def get(tensor: Any) -> Any:
            if not state.thread.depth and not mode.in_kernel_invocation:
                found = tags.device(tensor)
                if found is not None:
                    return found
            return original.fget(tensor)

        return property(get, original.fset)

    def apply(_: Any, module: Any, fn: Any, recurse: bool = True) -> Any:
        return _apply(module, fn, recurse, tags)

    def check(original: Any, constraint: Any, value: Any) -> Any:
        out = original(constraint, value)
        fake.set_known_value(out, True)
        return out

    chosen = threading.local()  # the map_location of the current torch.load

    def rebuild_tensor(_: Any, storage: Any, storage_offset: int, size: Any, stride: Any) -> Any:
        data = getattr(storage, "_untyped_storage", storage)
        saved = getattr(data, "_fake_device", None)  # where torch.load would have put it
        where = getattr(chosen, "location", None)
        where = where.get(str(saved), saved) if isinstance(where, dict) else where
        put = where(data, str(saved)) if callable(where) else None  # without data, torch.load does not call it
        where = None if callable(where) else where
        chosen_device = saved if where is None else where
        device = as_cuda(chosen_device) if put is None else tags.storage_device(put)
        restored = tags.storage_device(data) is not None  # by torch 2.6, which calls restore_location itself
        if device is not None and put is None and not restored:
            state.record_sync("load", FROM_PAGEABLE, "H2D", data.nbytes())
        real = "meta" if str(chosen_device) == "meta" else "cpu"
        out = torch.empty_strided(size, stride, dtype=storage.dtype, device=real)
        tags.put(out, device if where is not None else device or tags.storage_device(data))
        return out

    def load(original: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        chosen.location = map_location
        try:
            return original(f, map_location, *args, **kwargs)
        finally:
            chosen.location = None

    def load_from_bytes(original: Any, data: bytes) -> Any:
        with _disable_current_modes():  # under FakeTensorMode, torch forgets the device
            return original(data)

    yield FakeTensor, "device", device
    yield FakeTensor, "tolist", lambda _: torch.Tensor.tolist  # FakeTensor's own method reads each element
    yield torch.nn.Module, "_apply", calling(apply)
    yield torch._utils, "_rebuild_tensor", calling(rebuild_tensor)
    yield torch, "load", calling(load)
    yield torch.storage, "_load_from_bytes", calling(load_from_bytes)
    for kind in vars(constraints).values():
        if isinstance(kind, type) and "check" in vars(kind):
            yield kind, "check", calling(check)


def _apply(module: Any, fn: Callable[[Any], Any], recurse: bool, tags: Tags) -> Any:
    """Replace `Module._apply`, whose exchange of tensors fails for tensors of FakeTensorMode."""
    if recurse:
        for child in module.children():
            _apply(child, fn, recurse, tags)
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if tensor is None:
                continue
            with torch.no_grad():
                out = fn(tensor)
            if isinstance(tensor, FakeTensor) and _kind_of(out) == _kind_of(tensor):
                tags.put(tensor, tags.get(out))
            else:
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                held[name] = torch.nn.Parameter(out, tensor.requires_grad) if is_parameter else out
    return module


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, getattr(tensor, "fake_device", None)
