"""Tensors without data: runs models too large for this machine, and answers what only the data would tell.

Reads of values are answered plausibly, and the same way in each run: what was filled with a number reads as that
number, checks for NaN and infinity find none, other data is random.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import count
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributions import constraints
from torch.utils._pytree import tree_map_only

from ...patch import Patch
from .state import State, as_cuda
from .tags import Tags, tensors

_FILLS = {"full": 1, "fill_": 1, "zeros": 0.0, "zero_": 0.0, "ones": 1.0, "scalar_tensor": 0, "zeros_like": 0.0}
_NONE = ("isnan", "isinf", "isposinf", "isneginf")
_PAIRS = ("logical_or", "bitwise_or", "logical_and", "bitwise_and")
_KEEPS = (
    "_is_any_true",
    "any",
    "all",
    "_is_all_true",
    "view",
    "detach",
    "clone",
    "_to_copy",
    "expand",
    "alias",
    "squeeze",
    "unsqueeze",
    "select",
    "slice",
    "reshape",
    "max",
    "min",
    "amax",
    "amin",
    "mean",
)
_LEAVES = ("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_")  # finds nothing


class Fake:
    """FakeTensorMode, with answers.

    Attributes:
        mode: what to enter below the other modes.
    """

    def __init__(self) -> None:
        self.mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        self._random = torch.Generator()
        self._seeds = count()

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one operator."""
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense":
            return self._value(args[0])
        known = _known(name, args)
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = tree_map_only(torch.Tensor, self.mode.from_tensor, self.answer(func, *args, **kwargs))
        if func._schema.is_mutable and name not in _LEAVES:
            for tensor in tensors(list(args[:1])):
                _note(tensor, known)
        elif known is not None and isinstance(out, torch.Tensor):
            _note(out, known)
        return out

    def attempt(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``func``; where it is C++ that reads the data itself, give it some."""
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "data is not allocated yet" not in str(error):
                raise
            return tree_map_only(torch.Tensor, self.mode.from_tensor, self.answer(func, *args, **kwargs))

    def _value(self, tensor: torch.Tensor) -> Any:
        value = _notes(tensor).get("value")
        if value is None:
            return self.answer(torch.Tensor.item, tensor)
        return value if isinstance(value, complex) else _kind(tensor)(value)

    def answer(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what ``func`` returns for tensors with data."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return func(
                *tree_map_only(torch.Tensor, self._real, args), **tree_map_only(torch.Tensor, self._real, kwargs)
            )

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with data, of the shape and type of ``tensor``; the same one each time."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        if tensor.constant is not None:
            return tensor.constant
        notes = _notes(tensor)
        if "value" in notes:
            return torch.full(tuple(tensor.shape), notes["value"], dtype=tensor.dtype)
        data = torch.rand(
            tuple(tensor.shape), generator=self._random.manual_seed(notes.setdefault("seed", next(self._seeds)))
        )
        if tensor.dtype is torch.bool:
            return data > 0.5
        if tensor.is_floating_point() or tensor.is_complex():
            return data.to(tensor.dtype)
        return torch.ones(tuple(tensor.shape), dtype=tensor.dtype)  # a length, a class, an index that is there

    def know(self, tensor: Any, value: Any) -> None:
        """Have all elements of ``tensor`` read as ``value``."""
        _note(tensor, value)

    def copied(self, tensor: Any, memo: dict[int, Any]) -> Any:
        """Return what `copy.deepcopy` does; torch's own would copy memory that a tensor without data has not."""
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        out = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            out = torch.nn.Parameter(out, tensor.requires_grad)
        elif tensor.requires_grad:
            out.requires_grad_()
        _notes(out).update(_notes(tensor))
        if tensor.grad is not None:
            out.grad = tensor.grad.detach().clone()
        memo[id(tensor)] = out
        return out

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with data of the shape of ``tensor`` that has one element in memory."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return torch.zeros((), dtype=tensor.dtype).expand(tuple(tensor.shape))

    def patches(self, state: State) -> list[Callable[[], Patch]]:
        """Return what makes fake tensors say that they are on the GPU, outside of operators."""
        mode, tags = self.mode, state.tags

        def device(original: Any) -> property:
            def get(tensor: Any) -> Any:
                if not state.here.depth and not mode.in_kernel_invocation:
                    found = tags.device(tensor)
                    if found is not None:
                        return found
                return original.fget(tensor)

            return property(get, original.fset)

        def applied(_: Any) -> Any:
            return lambda module, fn, recurse=True: _apply(module, fn, recurse, tags)

        def satisfied(original: Any) -> Any:
            def check(constraint: Any, value: Any) -> Any:
                out = original(constraint, value)
                self.know(out, True)
                return out

            return check

        chosen = threading.local()  # the map_location of the load that runs

        def rebuilt(_: Any) -> Any:
            def rebuild_tensor(storage: Any, storage_offset: int, size: Any, stride: Any) -> Any:
                data = getattr(storage, "_untyped_storage", storage)
                saved = getattr(data, "_fake_device", None)  # where torch.load would have put it
                where = getattr(chosen, "location", None)
                where = where.get(str(saved), saved) if isinstance(where, dict) else where
                device = as_cuda(
                    saved if where is None else where if isinstance(where, (str, torch.device)) else None
                )
                if device is not None:
                    state.wait("load", "copies to the GPU from memory that is not pinned", "H2D", data.nbytes())
                out = torch.empty_strided(size, stride, dtype=storage.dtype)
                tags.put(out, device if where is not None else device or tags.of_storage(data))
                return out

            return rebuild_tensor

        def loaded(original: Any) -> Any:
            @wraps(original)
            def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
                chosen.location = map_location
                try:
                    return original(f, map_location, *args, **kwargs)
                finally:
                    chosen.location = None

            return load

        kinds = [kind for kind in vars(constraints).values() if isinstance(kind, type) and "check" in vars(kind)]
        return [
            lambda: Patch(FakeTensor, "device", device),
            lambda: Patch(FakeTensor, "tolist", lambda _: torch.Tensor.tolist),  # its own reads each element
            lambda: Patch(torch.nn.Module, "_apply", applied),
            lambda: Patch(torch._utils, "_rebuild_tensor", rebuilt),
            lambda: Patch(torch, "load", loaded),
            *[lambda kind=kind: Patch(kind, "check", satisfied) for kind in kinds],
        ]


def _apply(module: Any, fn: Callable[[Any], Any], recurse: bool, tags: Tags) -> Any:
    """Do what `Module._apply` does, which exchanges tensors; that fails for those of FakeTensorMode."""
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


def _known(name: str, args: Sequence[Any]) -> Any:
    """Return the value that all elements of the result have, if the data need not be known."""
    if name in _FILLS:
        place = _FILLS[name]
        value = args[place] if isinstance(place, int) else place
        return _notes(value).get("value") if isinstance(value, torch.Tensor) else value
    if name in _NONE or (name == "ne" and args[0] is args[1]):
        return False
    if not args:
        return None
    if isinstance(args[0], (list, tuple)):  # what is put together of equals
        values = [_notes(tensor).get("value") for tensor in tensors(list(args[0]))]
        return values[0] if name in ("stack", "cat") and len({*values}) == 1 else None
    value = _notes(args[0]).get("value") if isinstance(args[0], torch.Tensor) else None
    if name in _PAIRS and isinstance(args[1], torch.Tensor):
        both = (value, _notes(args[1]).get("value"))
        decides = name in ("logical_or", "bitwise_or")  # True or anything is True
        return decides if decides in both else None if None in both else not decides
    if value is None:
        return None
    if name in ("logical_not", "bitwise_not"):
        return not value
    if name in ("sum", "count_nonzero"):
        return value * args[0].numel() if len(args) == 1 or not value else None
    return value if name in _KEEPS else None


def _notes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what is known of the data of ``tensor``: "value" of all its elements, "seed" of random ones."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return {}
    notes: dict[str, Any] | None = getattr(storage, "_instrument_data", None)
    if notes is None:
        notes = storage._instrument_data = {}
    return notes


def _note(tensor: torch.Tensor, value: Any) -> None:
    notes = _notes(tensor)
    notes.clear()
    if value is not None:
        notes["value"] = value


def _kind(tensor: torch.Tensor) -> type:
    return (
        bool
        if tensor.dtype is torch.bool
        else float
        if tensor.is_floating_point()
        else complex
        if tensor.is_complex()
        else int
    )
