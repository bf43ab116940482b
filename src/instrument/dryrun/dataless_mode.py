"""Tensors without data: runs models too large for this machine, and answers reads of their values.

Reads of values get plausible answers, the same in each run. Small tensors made of known numbers keep them, and a
tensor filled with a number reads as that number. Checks for NaN and infinity find none, an unknown floating-point
number equals no other, unknown integers are 1, and a check that would raise passes. Other data is random.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from .known_data import is_meta, known_data_of, run_on_known_data
from .known_values import LEAVE_DATA_UNCHANGED, kind_of, known_of, note, notes_of
from .script_checks import passing_value
from .tags import tensors

_COPIES = ("_to_copy", "copy_")


@contextmanager
def _modes_off() -> Iterator[None]:
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def _answer_of_check(found: bool) -> bool:
    """Return the answer that lets a check around the caller pass, or ``found`` without such a check."""
    wanted = passing_value(sys._getframe(1))
    return found if wanted is None else wanted


class DatalessMode:
    """A FakeTensorMode that answers reads of values.

    Attributes:
        mode: the FakeTensorMode, to be entered below the other modes.
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
        out = self._run(func, name, args, kwargs)
        if name in _COPIES and not is_meta(out) and any(map(is_meta, tensors(args))):
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")  # as torch says
        if name not in LEAVE_DATA_UNCHANGED:
            with _modes_off():
                run_on_known_data(func, args, kwargs, out)
        return out

    def _run(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        known = known_of(name, args)
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = tree_map_only(torch.Tensor, self.mode.from_tensor, self.run_with_data(func, *args, **kwargs))
            out = _answer_of_check(out) if isinstance(out, bool) else out
        if func._schema.is_mutable and name not in LEAVE_DATA_UNCHANGED:
            for tensor in tensors(list(args[:1])):
                note(tensor, known)
        elif known is not None and isinstance(out, torch.Tensor):
            note(out, known)
        return out

    def run_or_use_data(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``func``; if it is C++ code that reads the data itself, pass tensors with data."""
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "data is not allocated yet" not in str(error):
                raise
            return tree_map_only(torch.Tensor, self.mode.from_tensor, self.run_with_data(func, *args, **kwargs))

    def _value(self, tensor: torch.Tensor) -> Any:
        value = None if is_meta(tensor) else notes_of(tensor).get("value")
        known = self.known_data(tensor)
        if known is None and value is not None:
            return kind_of(tensor)(value)
        found = self.run_with_data(torch.Tensor.item, tensor)
        return _answer_of_check(found) if known is None and isinstance(found, bool) else found

    def known_data(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor with the data of ``tensor``; None if the data is unknown."""
        with _modes_off():
            return known_data_of(tensor)

    def run_with_data(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``func`` for tensors with data."""
        with _modes_off():
            return func(
                *tree_map_only(torch.Tensor, self._with_data, args),
                **tree_map_only(torch.Tensor, self._with_data, kwargs),
            )

    def _with_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with data, of the shape and dtype of ``tensor``; the same one each time."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        if is_meta(tensor):
            return torch.empty_strided(tuple(tensor.size()), tensor.stride(), dtype=tensor.dtype, device="meta")
        known = known_data_of(tensor)
        if known is not None:
            return known.clone()
        notes = notes_of(tensor)
        if "value" in notes:
            return torch.full(tuple(tensor.shape), notes["value"], dtype=tensor.dtype)
        data = torch.rand(
            tuple(tensor.shape), generator=self._random.manual_seed(notes.setdefault("seed", next(self._seeds)))
        )
        if tensor.dtype is torch.bool:
            return data > 0.5
        if tensor.is_floating_point() or tensor.is_complex():
            return data.to(tensor.dtype)
        return torch.ones(tuple(tensor.shape), dtype=tensor.dtype)  # valid as a length, a class or an index

    def existing_device(self, device: torch.device) -> torch.device:
        """Return ``device`` as a tensor on it reports it.

        Raises:
            Exception: torch's own error for a device that is not there, which FakeTensorMode would accept.
        """
        if device.type in ("cpu", "meta"):
            return torch.device(device.type)
        with _disable_current_modes():
            return torch.empty(0, device=device).device

    def set_known_value(self, tensor: Any, value: Any) -> None:
        """Make all elements of ``tensor`` read as ``value``."""
        note(tensor, value)

    def deepcopy(self, tensor: Any, memo: dict[int, Any]) -> Any:
        """Copy ``tensor`` for `copy.deepcopy`; torch's own method copies memory that the tensor lacks."""
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        out = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            out = torch.nn.Parameter(out, tensor.requires_grad)
        elif tensor.requires_grad:
            out.requires_grad_()
        notes_of(out).update(notes_of(tensor))
        if tensor.grad is not None and not isinstance(tensor, torch.nn.Parameter):
            out.grad = tensor.grad.detach().clone()
        memo[id(tensor)] = out
        return out

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``tensor`` with data, which has one element in memory."""
        with _modes_off():
            if is_meta(tensor):
                return self._with_data(tensor)
            return torch.zeros((), dtype=tensor.dtype).expand(tuple(tensor.shape))
