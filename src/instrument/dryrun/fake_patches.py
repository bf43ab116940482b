"""Further replacements of torch's functions, for tensors without data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import constraints
from torch.utils._python_dispatch import _disable_current_modes

from ..syncs.operations import FROM_PAGEABLE
from .dataless_mode import DatalessMode
from .state import RunState, as_cuda
from .storages import Replacement
from .tags import Tags


def changes(fake: DatalessMode, state: RunState) -> Iterator[Replacement]:
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

    def make_apply(_: Any) -> Any:
        return lambda module, fn, recurse=True: _apply(module, fn, recurse, tags)

    def make_check(original: Any) -> Any:
        def check(constraint: Any, value: Any) -> Any:
            out = original(constraint, value)
            fake.set_known_value(out, True)
            return out

        return check

    chosen = threading.local()  # the map_location of the current torch.load

    def make_rebuild_tensor(_: Any) -> Any:
        def rebuild_tensor(storage: Any, storage_offset: int, size: Any, stride: Any) -> Any:
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

        return rebuild_tensor

    def make_load(original: Any) -> Any:
        @wraps(original)
        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            chosen.location = map_location
            try:
                return original(f, map_location, *args, **kwargs)
            finally:
                chosen.location = None

        return load

    def make_load_from_bytes(original: Any) -> Any:
        @wraps(original)  # pickles name it
        def load_from_bytes(data: bytes) -> Any:
            with _disable_current_modes():  # under FakeTensorMode, torch forgets the device
                return original(data)

        return load_from_bytes

    yield FakeTensor, "device", device
    yield FakeTensor, "tolist", lambda _: torch.Tensor.tolist  # FakeTensor's own method reads each element
    yield torch.nn.Module, "_apply", make_apply
    yield torch._utils, "_rebuild_tensor", make_rebuild_tensor
    yield torch, "load", make_load
    yield torch.storage, "_load_from_bytes", make_load_from_bytes
    for kind in vars(constraints).values():
        if isinstance(kind, type) and "check" in vars(kind):
            yield kind, "check", make_check


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
