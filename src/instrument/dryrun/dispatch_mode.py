"""The mode below autograd: carries tags from operands to results, and records operators that synchronize."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..syncs.events import CHOSEN
from .rules import Rule, rule_of
from .state import RunState
from .tags import tensors

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter, FakeTensor}
_RULES: dict[Any, Rule] = {}
_CHECKED_NAMESPACES = (
    "aten",
    "prim",
    "prims",
    "quantized",
    "c10d",
    "_c10d_functional",
    "profiler",
    "inductor",
    "debugprims",
)
_ON_GPU_HINT = (
    ". Tensors made before the dry run, such as those of a batch, an optimizer or a copy of the model, are on the "
    "CPU unless on_gpu names them: on_gpu=[model, batch, optimizer]"
)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Sees each operator that one thread runs, forward and backward."""

    supports_higher_order_operators = True

    def __init__(self, state: RunState) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._state = state
        self._thread = state.thread
        self._first_device = state.tags.first_device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator."""
        if types and not _PLAIN_TYPES.issuperset(types):
            return NotImplemented  # a tensor subclass goes first, and its own operators come back here
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._run_higher_order(func, args, kwargs)
        rule = _RULES.get(func)
        if rule is None:
            rule = _RULES[func] = rule_of(func)
        state, thread = self._state, self._thread
        if rule.creates:
            device = self._device_of_created()
        else:
            device = self._first_device(args)
            if device is None and kwargs:
                device = self._first_device(kwargs.values())
            thread.last_device = device
        if device is not None:
            if rule.check is not None:
                rule.check(state, func, args, kwargs)
            elif rule.same_device and not thread.quiet_depth and self._has_cpu_tensor(args):
                self._record_mixed_devices(rule.name)
        thread.depth += 1
        try:
            fake = state.fake
            out = run_or_widen(func, args, kwargs) if fake is None else fake.run(func, args, kwargs)
        finally:
            thread.depth -= 1
        if fake is not None and isinstance(out, torch.Tensor) and out.layout is not torch.strided:
            state.record_not_covered(
                "tensors without data are never sparse inside: synchronizations on them were not checked"
            )
        if device is not None:
            if not rule.writes:
                self._tag(rule, out, device)
            if func.namespace not in _CHECKED_NAMESPACES:
                state.record_not_covered(f"the inside the operator {func._schema.name} was not checked")
        return out

    def _run_higher_order(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a composite operator, such as flex_attention, whose parts do not come back here."""
        device = self._first_device(args)
        out = func(*args, **kwargs)
        if device is not None:
            self._state.tags.put(out, device)
            self._state.record_not_covered(f"the inside the operator {func.name()} was not checked")
        return out

    def _record_mixed_devices(self, name: str) -> None:
        """Record an operator that would raise on a GPU; only once if an early device choice may be the cause."""
        state = self._state
        why = f"{name} takes tensors on the CPU and on the GPU, which raises an error on a GPU"
        if state.code_ran_before:
            why += _ON_GPU_HINT
        if state.cpu_by_name is not None:
            if state.early_choice_reported:
                return
            state.early_choice_reported = True
            why = (
                f"{CHOSEN}, without a GPU, so {state.cpu_by_name} uses the CPU. Choose the device inside the "
                "step, or run the file: instrument syncs FILE.py::FUNCTION"
            )
        state.record_not_covered(why, fails=True)

    def _has_cpu_tensor(self, values: Sequence[Any]) -> bool:
        """Return whether a tensor with a dimension is not on a GPU."""
        is_on_host = self._state.tags.is_on_host
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.dim() and value.numel() and is_on_host(value):
                    return True
            elif isinstance(value, (list, tuple)) and self._has_cpu_tensor(value):
                return True
        return False

    def _tag(self, rule: Rule, out: Any, device: torch.device) -> None:
        if rule.gpu_outputs is not None:
            out = [out[index] for index in rule.gpu_outputs]
        self._state.tags.put(out, device)

    def _device_of_created(self) -> torch.device | None:
        """Return the device on which C++ code creates a tensor: that of the arguments of the public call."""
        inputs = self._thread.inputs
        if inputs is not None:
            found: torch.device | None = self._first_device(inputs)
            return found
        # A formula of the backward pass creates it for the gradient of the previous operator.
        return self._thread.last_device if torch._C._current_autograd_node() is not None else None


def register_higher_order_operators(stack: ExitStack) -> None:
    """Let the mode see composite operators until ``stack`` is closed: torch 2.6 needs a rule for each."""
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        return
    for operator in torch._ops._higher_order_ops.values():

        def run(mode: DispatchMode, *args: Any, operator: Any = operator, **kwargs: Any) -> Any:
            return mode._run_higher_order(operator, args, kwargs)

        stack.callback(operator.python_key_table.pop, DispatchMode, None)
        operator.python_key_table[DispatchMode] = run


def run_or_widen(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator; run it in double precision if only CUDA supports the type."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "not implemented for '" not in str(error) or func._schema.is_mutable:
            raise
    kinds = {tensor.dtype for tensor in tensors([*args, kwargs])}
    wide = tree_map_only(torch.Tensor, torch.Tensor.double, (tuple(args), kwargs))
    out = func(*wide[0], **wide[1])
    return (
        tree_map_only(torch.Tensor, lambda tensor: tensor.to(next(iter(kinds))), out) if len(kinds) == 1 else out
    )
