"""Replaces code of torch that reads a device in C++ or from a storage, or saves it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.utils.dlpack

from ..syncs.operations import FROM_GPU, FROM_PAGEABLE
from .rules import record_transfer
from .state import RunState, as_cuda
from .tags import PINNED

Replacement = tuple[Any, str, Callable[[Any], Any]]  # owner, name, and the function that makes the replacement
# Modules of torch that read a storage in place, which is in the CPU's memory
_REAL = ("torch.serialization", "torch.multiprocessing.reductions")


def changes(state: RunState) -> Iterator[Replacement]:
    """Yield the replacements of code that reads or saves the device of a tensor."""
    tags = state.tags

    def make_group(original: Any) -> Any:
        def group(*args: Any, **kwargs: Any) -> dict[Any, Any]:
            groups = {}
            for (device, dtype), held in original(*args, **kwargs).items():
                groups[tags.first_device(held[0][0]) or device, dtype] = held
            return groups

        return group

    def make_location_tag(original: Any) -> Any:
        def location_tag(storage: Any) -> Any:
            device = tags.storage_device(storage)
            if device is None:
                return original(storage)
            state.record_sync("save", FROM_GPU, "D2H", storage.nbytes())
            return str(device)

        return location_tag

    def make_restore_location(original: Any) -> Any:
        def default_restore_location(storage: Any, location: Any) -> Any:
            device = as_cuda(location)
            if device is None:
                return original(storage, location)
            state.record_sync("load", FROM_PAGEABLE, "H2D", storage.nbytes())
            tags.put_storage(storage, device)
            return storage

        return default_restore_location

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

    def make_copy(original: Any) -> Any:
        """Record a synchronizing copy without data, for which no operator runs that would record it."""

        def copy_(storage: Any, source: Any, non_blocking: Any = None) -> Any:
            if state.fake is None:
                return original(storage, source, non_blocking)
            up = tags.storage_device(storage) is not None
            if up != (tags.storage_device(source) is not None):
                pinned = tags.storage_tag(source if up else storage) is PINNED
                record_transfer(state, "copy_", up, pinned, bool(non_blocking), source.nbytes())
            return storage

        return copy_

    def make_named(original: Any) -> Any:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with state.named_call(original.__name__):
                return original(*args, **kwargs)

        return call

    def make_create(original: Any) -> Any:

        @wraps(original)
        def create(*args: Any, **kwargs: Any) -> Any:
            return state.thread.functions.run_and_tag(original, args, kwargs)

        return create

    def make_from_dlpack(original: Any) -> Any:
        def from_dlpack(source: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(source, torch.Tensor) and tags.device(source) is not None:
                return source.detach()
            return original(source, *args, **kwargs)

        return from_dlpack

    yield torch.UntypedStorage, "__new__", make_new
    yield torch.UntypedStorage, "device", device
    yield torch.UntypedStorage, "copy_", make_copy
    for name in ("to", "cuda", "cpu"):
        yield torch.UntypedStorage, name, make_named
    yield torch, "range", make_create
    bindings: Any = torch._C
    yield bindings._nested, "nested_tensor", make_create
    yield torch, "from_dlpack", make_from_dlpack
    yield torch.utils.dlpack, "from_dlpack", make_from_dlpack
    yield torch._C, "_group_tensors_by_device_and_dtype", make_group
    yield torch.serialization, "location_tag", make_location_tag
    yield torch.serialization, "default_restore_location", make_restore_location
