"""Tags on the tensors that pretend to be on the GPU, or in pinned memory.

The tag is an attribute of the storage, so that views, detached tensors and `.data` share it. A look-up takes
80 ns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PINNED = "pinned"
_TENSOR = torch.Tensor
_storage = torch.Tensor.untyped_storage


_RUN_NUMBERS = count()
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class Tags:
    """The tags of one run; tags of an earlier run are ignored.

    Attributes:
        any_on_device: whether any tensor was on a pretended device.
    """

    def __init__(self) -> None:
        self._key = f"_instrument_{next(_RUN_NUMBERS)}"
        self.any_on_device = False

    def get(self, tensor: Any) -> Any:
        """Return the device that ``tensor`` pretends to be on, `PINNED`, or None for plain memory."""
        try:
            return getattr(_storage(_tensor_with_memory(tensor)), self._key, None)
        except (NotImplementedError, RuntimeError):
            return getattr(_tag_holder(tensor), self._key, None)

    def device(self, tensor: Any) -> Any:
        """Return the device that ``tensor`` pretends to be on, or None."""
        tag = self.get(tensor)
        return None if tag is PINNED else tag

    def is_on_host(self, tensor: Any) -> bool:
        """Return whether ``tensor`` is in plain or pinned memory."""
        return self.device(tensor) is None and in_memory(tensor)

    def put(self, value: Any, tag: Any) -> None:
        """Tag every tensor in ``value`` that has memory, also in lists, tuples and dictionaries.

        None removes tags.
        """
        for tensor in tensors(value):
            if tag is not None and not in_memory(tensor):
                continue
            self.any_on_device = self.any_on_device or tag not in (None, PINNED)
            if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
                self.put([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]], tag)
                continue
            try:
                setattr(_storage(tensor), self._key, tag)
            except (NotImplementedError, RuntimeError):
                setattr(_tag_holder(tensor), self._key, tag)

    def storage_tag(self, storage: Any) -> Any:
        """Return the device that a storage pretends to be on, `PINNED`, or None for plain memory."""
        return getattr(getattr(storage, "_untyped_storage", storage), self._key, None)

    def storage_device(self, storage: Any) -> Any:
        """Return the device that a storage pretends to be on, or None."""
        tag = self.storage_tag(storage)
        return None if tag is PINNED else tag

    def put_storage(self, storage: Any, tag: Any) -> None:
        """Tag a storage of bytes."""
        self.any_on_device = True
        setattr(getattr(storage, "_untyped_storage", storage), self._key, tag)

    def first_device(self, values: Iterable[Any]) -> Any:
        """Return the device of the first tensor among ``values`` that pretends to be on one, or None."""
        for value in values:
            if isinstance(value, _TENSOR):
                found = self.device(value)
                if found is not None:
                    return found
            elif isinstance(value, (list, tuple)):
                found = self.first_device(value)
                if found is not None:
                    return found
        return None


def in_memory(tensor: Any) -> bool:
    """Return whether ``tensor`` is on the CPU or a pretended GPU, as opposed to devices such as "meta"."""
    return tensor.device.type in ("cpu", "cuda")


def tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in ``value``."""
    if isinstance(value, _TENSOR):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def _tensor_with_memory(tensor: Any) -> Any:
    """Return a tensor with memory: ``tensor``, or its first component."""
    while type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


def _tag_holder(tensor: Any) -> Any:
    """Return the tag holder of a tensor without a storage: itself if sparse, or the one that torch.func wraps."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    try:
        return _storage(tensor)
    except (NotImplementedError, RuntimeError):
        return tensor
