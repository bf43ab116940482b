"""Records the memory that the tensors of a dry run would take on a GPU, as they come and go.

An object that lives as long as the storage of a tensor is kept in the storage's attributes, so that also the end
of a tensor that only C++ holds, such as one saved for the backward pass, is seen when it happens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...base.compat.autograd import in_backward
from ...base.guard import guard
from .cuda_memory import A100, EXTRA, Gpu
from .recorder import FEATURE

_KEY = "_instrument_memory"
_storage = torch.Tensor.untyped_storage


class _Held:
    """The memory of one storage; its end is that of the storage."""

    __slots__ = ("events", "number", "size")

    def __init__(self, events: array[int], number: int, size: int) -> None:
        self.events = events
        self.number = number
        self.size = size

    def __del__(self) -> None:
        self.events.append(~self.number)


class MemoryRecord:
    """What was allocated on the GPU, in order.

    Attributes:
        events: the number of each allocation where it begins, and ``~number`` where it ends.
        sizes: the bytes of each allocation.
        positions: for each allocation, how many operators were recorded before.
        kinds: what allocations are for, where that is known: "parameters", "gradients", "optimizer_state", "casts"
            or "workspace".
        in_place: allocations that CUDA does not make if the first or second of two others ends right after.
        models: the modules of the models that were called, and their parameters.
    """

    def __init__(self) -> None:
        self.events = array("q")
        self.sizes = array("q")
        self.positions = array("i")
        self.kinds: dict[int, str] = {}
        self.in_place: dict[int, tuple[int, ...]] = {}
        self.models = Models()


_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


class Models:
    """The models of a run.

    Attributes:
        members: the class of each module that is in a list of modules and has modules of its own, such as a block
            of a transformer, by its path, as `Place.module` has it.
        parameters: the bytes of each parameter that is trained, by its path; one that modules share counts once.
    """

    def __init__(self) -> None:
        self.members: dict[str, str] = {}
        self.parameters: dict[str, int] = {}

    def add(self, model: torch.nn.Module, root: str) -> None:
        """Note a model that the program calls, and its path."""
        for path, module in model.named_modules():
            if isinstance(module, _LISTS):
                for name, member in module.named_children():
                    if type(member) not in _LISTS and next(member.children(), None) is not None:
                        self.members[".".join(filter(None, (root, path, name)))] = type(member).__qualname__
        for path, each in model.named_parameters():
            if each.requires_grad:
                self.parameters[f"{root}.{path}"] = each.numel() * each.element_size()


class MemoryRecorder:
    """Records in one run.

    Args:
        position: returns how many operators were recorded so far.
        gpu: the GPU.

    Attributes:
        call: the function of torch that the program called; empty in the backward pass.
        belongs_to_last: whether the next allocation belongs to the last recorded operator, as a copy to the GPU is
            recorded before its result is known.
    """

    def __init__(self, position: Callable[[], int], gpu: Gpu = A100) -> None:
        self.record = MemoryRecord()
        self.gpu = gpu
        self.call = ""
        self.belongs_to_last = False
        self._position = position
        self._handles: set[bool] = set()  # of cuBLAS: one for the backward pass, and one for all else

    def on_gpu(self, storage: Any) -> None:
        """Note that the memory of ``storage`` is on the GPU."""
        held = getattr(storage, _KEY, None)
        size = storage.nbytes()
        if held is None or held.size != size or held.events is not self.record.events:
            setattr(storage, _KEY, self._allocate(size) if size else None)

    def off_gpu(self, storage: Any) -> None:
        """Note that the memory of ``storage`` is not on the GPU."""
        if getattr(storage, _KEY, None) is not None:
            setattr(storage, _KEY, None)

    def on_operator(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, call: str) -> None:
        """Note what an operator takes on a GPU beside its results, which `on_gpu` has noted.

        Args:
            func: the operator.
            args: its arguments.
            kwargs: its arguments by keyword.
            out: its results.
            call: the function of torch that the program called; empty in the backward pass.
        """
        extra = EXTRA.get(func)
        if extra is not None:
            self.call = call
            try:
                extra(self, args, kwargs, out)
            except Exception as error:  # arguments that the rule does not expect
                guard.failed(FEATURE, error)

    def temporary(self, *sizes: int) -> None:
        """Note memory that an operator takes while it runs."""
        held = [self._allocate(size) for size in sizes if size]
        del held

    def resize(self, tensor: torch.Tensor, size: int) -> None:
        """Note that a result that was just made has another size on a GPU."""
        number = self.number(tensor)
        if number is not None:
            self.record.sizes[number] = size

    def use_cublas(self) -> None:
        """Note a matmul: the first one of a thread takes a workspace, which stays."""
        thread = in_backward()  # as on the GPU, where a thread of autograd runs the backward pass
        if thread not in self._handles:
            self._handles.add(thread)
            record = self.record
            record.kinds[len(record.sizes)] = "workspace"
            record.events.append(len(record.sizes))
            record.sizes.append(self.gpu.workspace_bytes)
            record.positions.append(self._position())

    def accumulate(self, out: torch.Tensor, *terms: torch.Tensor) -> None:
        """Note a sum that CUDA computes in the memory of one of its terms if nothing else needs that."""
        made, used = self.number(out), [self.number(term) for term in terms]
        if made is not None:
            self.record.in_place[made] = tuple(number for number in used if number is not None)

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the allocation that holds ``tensor``; None if there is none."""
        try:
            held = getattr(_storage(tensor), _KEY, None)
        except (NotImplementedError, RuntimeError):  # sparse
            return None
        return None if held is None else held.number

    def forget_places(self) -> None:
        """Note that what was recorded so far is dropped: all that is there was there before."""
        for number in range(len(self.record.positions)):
            self.record.positions[number] = -1

    def mark_model(self, model: torch.nn.Module, path: str) -> None:
        """Note what the parameters, gradients and buffers of a model are for."""
        self.record.models.add(model, path)
        parameters = list(model.parameters())
        self.mark([*parameters, *model.buffers()], "parameters")
        self.mark([each.grad for each in parameters if each.grad is not None], "gradients")

    def mark_optimizer(self, optimizer: Any) -> None:
        """Note what the parameters, gradients and state of an optimizer are for."""
        held = [each for group in optimizer.param_groups for each in group["params"]]
        self.mark(held, "parameters")
        self.mark([each.grad for each in held if each.grad is not None], "gradients")
        states = [each for state in optimizer.state.values() if isinstance(state, dict) for each in state.values()]
        self.mark([each for each in states if isinstance(each, torch.Tensor)], "optimizer_state")

    def mark(self, tensors: Sequence[Any], kind: str) -> None:
        """Note what tensors are for; a later note replaces an earlier one."""
        for tensor in tensors:
            number = self.number(tensor)
            if number is not None:
                self.record.kinds[number] = kind

    def _allocate(self, size: int) -> _Held:
        record = self.record
        number = len(record.sizes)
        record.sizes.append(size)
        record.positions.append(self._position() - self.belongs_to_last)
        self.belongs_to_last = False
        record.events.append(number)
        return _Held(record.events, number, size)
