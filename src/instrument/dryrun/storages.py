"""Replaces code of torch that reads a device in C++ or from a storage, or saves it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.utils.dlpack

from ..syncs.operations import FROM_GPU, FROM_PAGEABLE
from .rules import moved
from .state import State, as_cuda
from .tags import PINNED

Made = tuple[Any, str, Callable[[Any], Any]]  # owner, name, and the function that makes the replacement
# Modules of torch that read a storage in place, which is in the CPU's memory
_REAL = ("torch.serialization", "torch.multiprocessing.reductions")


def changes(state: State) -> Iterator[Made]:
    """Yield the replacements of code that reads or saves the device of a tensor."""
    tags = state.tags

    def grouped(original: Any) -> Any:
        def group(*args: Any, **kwargs: Any) -> dict[Any, Any]:
            groups = {}
            for (device, dtype), held in original(*args, **kwargs).items():
                groups[tags.first(held[0][0]) or device, dtype] = held
            return groups

        return group

    def located(original: Any) -> Any:
        def location_tag(storage: Any) -> Any:
            device = tags.of_storage(storage)
            if device is None:
                return original(storage)
            state.record_sync("save", FROM_GPU, "D2H", storage.nbytes())
            return str(device)

        return location_tag

    def restored(original: Any) -> Any:
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
            found = None if asking in _REAL else tags.of_storage(storage)
            return original.__get__(storage) if found is None else found

        return property(get)

    def created(original: Any) -> Any:
        def new(kind: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
            target = as_cuda(device)
            real = device if target is None else "cpu" if state.fake is None else "meta"
            out = original(kind, *args, device=real, **kwargs)
            if target is not None:
                tags.put_storage(out, target)
            return out

        return staticmethod(new)

    def filled(original: Any) -> Any:
        """Record a synchronizing copy without data, for which no operator runs that would record it."""

        def copy_(storage: Any, source: Any, non_blocking: Any = None) -> Any:
            if state.fake is None:
                return original(storage, source, non_blocking)
            up = tags.of_storage(storage) is not None
            if up != (tags.of_storage(source) is not None):
                pinned = tags.storage_tag(source if up else storage) is PINNED
                moved(state, "copy_", up, pinned, bool(non_blocking), source.nbytes())
            return storage

        return copy_

    def named(original: Any) -> Any:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with state.named(original.__name__):
                return original(*args, **kwargs)

        return call

    def created_unseen(original: Any) -> Any:

        @wraps(original)
        def create(*args: Any, **kwargs: Any) -> Any:
            return state.thread.functions.placed(original, args, kwargs)

        return create

    def exchanged(original: Any) -> Any:
        def from_dlpack(source: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(source, torch.Tensor) and tags.device(source) is not None:
                return source.detach()
            return original(source, *args, **kwargs)

        return from_dlpack

    yield torch.UntypedStorage, "__new__", created
    yield torch.UntypedStorage, "device", device
    yield torch.UntypedStorage, "copy_", filled
    for name in ("to", "cuda", "cpu"):
        yield torch.UntypedStorage, name, named
    yield torch, "range", created_unseen
    bindings: Any = torch._C
    yield bindings._nested, "nested_tensor", created_unseen
    yield torch, "from_dlpack", exchanged
    yield torch.utils.dlpack, "from_dlpack", exchanged
    yield torch._C, "_group_tensors_by_device_and_dtype", grouped
    yield torch.serialization, "location_tag", located
    yield torch.serialization, "default_restore_location", restored
