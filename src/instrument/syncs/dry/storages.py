"""Where torch asks C++, or a storage, for the device of a tensor, or writes it down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.dlpack

from .state import State, as_cuda

Made = tuple[Any, str, Callable[[Any], Any]]  # owner, name, and what makes the replacement


def changes(state: State) -> Iterator[Made]:
    """Where torch's own code asks C++ for the device of a tensor, or writes it down."""
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
            state.wait("save", "copies from the GPU", "D2H", storage.nbytes())
            return str(device)

        return location_tag

    def restored(original: Any) -> Any:
        def default_restore_location(storage: Any, location: Any) -> Any:
            device = as_cuda(location)
            if device is None:
                return original(storage, location)
            state.wait("load", "copies to the GPU from memory that is not pinned", "H2D", storage.nbytes())
            tags.put_storage(storage, device)
            return storage

        return default_restore_location

    def cloned(storage: Any) -> Any:
        state.here.quiet += 1
        try:
            return storage.clone()
        finally:
            state.here.quiet -= 1

    def downloaded(original: Any) -> Any:
        def cpu(storage: Any) -> Any:
            if tags.of_storage(storage) is None:
                return original(storage)
            state.wait("cpu", "copies from the GPU", "D2H", storage.nbytes())
            return cloned(storage)

        return cpu

    def uploaded(original: Any) -> Any:
        def cuda(storage: Any, *args: Any, **kwargs: Any) -> Any:
            if tags.of_storage(storage) is not None:
                return storage
            state.wait("cuda", "copies to the GPU from memory that is not pinned", "H2D", storage.nbytes())
            out = cloned(storage)
            tags.put_storage(out, as_cuda("cuda"))
            return out

        return cuda

    def exchanged(original: Any) -> Any:
        def from_dlpack(source: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(source, torch.Tensor) and tags.device(source) is not None:
                return source.detach()
            return original(source, *args, **kwargs)

        return from_dlpack

    yield torch.UntypedStorage, "cpu", downloaded
    yield torch.UntypedStorage, "cuda", uploaded
    yield torch, "from_dlpack", exchanged
    yield torch.utils.dlpack, "from_dlpack", exchanged
    yield torch._C, "_group_tensors_by_device_and_dtype", grouped
    yield torch.serialization, "location_tag", located
    yield torch.serialization, "default_restore_location", restored
