"""Functions for which torch calls other operators on CUDA than on the CPU: counts those of CUDA in their place.

`Substitute` runs the CPU's operators uncounted, and counts one operator of CUDA in the forward and in the backward
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward, saved_tensors_hooks

from .state import RunState
from .torch_modes import FunctionMode, has_cpu_tensor, record_mixed_devices

Tensors = Sequence[Any]
_OF_RMS_NORM = ("input", "normalized_shape", "weight", "eps")
_aten = torch.ops.aten


@dataclass(frozen=True)
class CudaOperator:
    """An operator of CUDA that `Substitute` counts.

    Attributes:
        compute: returns its first result for the tensors, with the operators of the CPU.
        forward: the operator.
        forward_arguments: returns its arguments for the tensors.
        further: returns its other results, without data, for the tensors and the first result.
        backward: its backward operator.
        backward_arguments: returns the arguments of that for the gradient, the tensors and the saved results.
        layout: returns its first result, or the gradient of a tensor, with the strides that it has on CUDA, which
            may follow from those of the first tensor, or of that tensor.
        saves_first: whether the backward operator needs the first result.
    """

    compute: Callable[[Tensors], Any]
    forward: Any
    forward_arguments: Callable[[Tensors], Tensors]
    further: Callable[[Tensors, Any], list[Any]]
    backward: Any
    backward_arguments: Callable[[Any, Tensors, Tensors], Tensors]
    layout: Callable[[Any, Any], Any]
    saves_first: bool = True


class Substitute(torch.autograd.Function):
    """Computes a `CudaOperator`; call ``Substitute.apply(state, operator, *tensors)``."""

    @staticmethod
    def forward(ctx: Any, state: RunState, operator: CudaOperator, *tensors: Any) -> Any:
        """Compute and count it."""
        state.note_node()
        if has_cpu_tensor(state, tensors):
            record_mixed_devices(state, state.thread.call)
        needed = ctx.needs_input_grad[2:]
        ctx.state, ctx.operator, ctx.count = state, operator, len(tensors)
        with state.uncounted(), torch.set_grad_enabled(any(needed)), _without_hooks():
            given = _apart(tensors, needed)
            computed = operator.compute(given)
            out = operator.layout(computed.detach(), given[0])
            if not operator.saves_first:
                out = out.clone()  # the graph of the CPU may keep its own
            further = operator.further(tensors, out)
            state.tags.put([out, *further], state.tags.first_device(tensors))
        state.count(operator.forward, operator.forward_arguments(tensors), {}, [out, *further])
        graph: Any = torch.empty(0, device="cpu")
        graph._instrument_graph = given, computed  # until the backward pass drops what it saved
        ctx.save_for_backward(*tensors, *([out] if operator.saves_first else []), *further, graph)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Compute and count the backward operator."""
        state, operator, gradient = ctx.state, ctx.operator, gradients[0]
        saved = ctx.saved_tensors
        tensors, results, graph = saved[: ctx.count], saved[ctx.count : -1], saved[-1]
        again = torch.is_grad_enabled()  # the gradients need gradients
        with state.uncounted(), _without_hooks():
            given: Any
            computed: Any
            given, computed = getattr(graph, "_instrument_graph", (None, None))  # hooks may have copied the tensor
            if again or given is None:
                given = list(tensors) if again else _apart(tensors, ctx.needs_input_grad[2:])
                with torch.enable_grad():
                    computed = operator.compute(given)
            inputs = tuple(tensor for tensor in given if tensor is not None and tensor.requires_grad)
            found = iter(
                _engine_run_backward(
                    (computed,), (gradient,), True, again, inputs, allow_unreachable=True, accumulate_grad=False
                )
            )
            grads = [
                operator.layout(next(found), tensor) if tensor is not None and tensor.requires_grad else None
                for tensor in given
            ]
            state.tags.put(grads, state.tags.first_device(saved))
        state.count(operator.backward, operator.backward_arguments(gradient, tensors, results), {}, grads)
        return None, None, *grads


def _apart(tensors: Tensors, needed: Sequence[bool]) -> list[Any]:
    """Return the tensors outside the graph that made them."""
    return [
        tensor if tensor is None else tensor.detach().requires_grad_(need)
        for tensor, need in zip(tensors, needed, strict=True)
    ]


def _without_hooks() -> Any:
    """Keep what the program does with saved tensors from the graph of a substitute."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    # A result itself, packed by its own node, would keep that node and so itself
    return saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)


def can_substitute(state: RunState) -> bool:
    """Return whether neither a substitute runs, nor a transform of ``torch.func`` or forward mode."""
    if state.thread.uncounted_depth:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None and torch.autograd.forward_ad._current_level < 0


@contextmanager
def autocasting(state: RunState, given: dict[str, Any], names: Sequence[str], lower: bool) -> Iterator[None]:
    """Run the block as autocast on CUDA runs an operator: with these arguments cast, and without autocast inside.

    Args:
        state: the dry run.
        given: the arguments by name; those that are cast are replaced.
        names: the names of the tensors.
        lower: whether autocast has the operator compute in its own type, rather than in 32 bits.
    """
    if not torch.is_autocast_enabled("cuda"):
        yield
        return
    dtype = torch.get_autocast_dtype("cuda") if lower else torch.float32
    given.update((name, state.cast(given[name], dtype)) for name in names)
    with torch.autocast("cuda", enabled=False):
        yield


def rms_norm(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `rms_norm`, which is one operator on CUDA."""
    given = {"weight": None, "eps": None} | dict(zip(_OF_RMS_NORM, args, strict=False)) | kwargs
    with autocasting(mode.state, given, ("input", "weight"), lower=False):
        return _rms_norm(mode, func, *(given[name] for name in _OF_RMS_NORM))


def _rms_norm(mode: FunctionMode, func: Any, x: Any, shape: Any, weight: Any, eps: Any) -> Any:
    formats = (torch.channels_last, torch.channels_last_3d)
    other_format = (
        x.dim() in (4, 5) and x.is_contiguous(memory_format=formats[x.dim() - 4]) and not x.is_contiguous()
    )
    mixed = weight is not None and weight.dtype != x.dtype
    if mode.tags.device(x) is None or not can_substitute(mode.state) or other_format or mixed or x.is_complex():
        return mode.run_and_tag(func, (x, shape, weight, eps), {})
    rows = (*x.shape[: x.dim() - len(shape)], *([1] * len(shape)))
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype

    # None of these may hold a tensor: the graph, and so a loss that is kept, would keep it
    operator = CudaOperator(
        lambda tensors: func(tensors[0], shape, tensors[1], eps),
        _aten._fused_rms_norm.default,
        lambda tensors: [tensors[0], shape, tensors[1], eps],
        lambda tensors, out: [torch.empty(rows, dtype=dtype, device="cpu")],
        _aten._fused_rms_norm_backward.default,
        lambda gradient, tensors, results: [
            gradient, tensors[0], shape, results[0], tensors[1],
            [each is not None and each.requires_grad for each in tensors],
        ],
        lambda tensor, of: tensor.contiguous(), saves_first=False,
    )  # fmt: skip
    return Substitute.apply(mode.state, operator, x, weight)  # type: ignore[no-untyped-call]


def dropout(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `dropout`, which is one operator on CUDA."""
    given = dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
    x, p, train = given["input"], given["p"], given["train"]
    if train and 0 < p < 1 and mode.tags.device(x) is not None and x.numel():
        return mode.run_and_tag(torch.native_dropout, (x, p, train), {})[0]
    return mode.run_and_tag(func, args, kwargs)
