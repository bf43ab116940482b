"""The rules for ATen operators: which ones synchronize on a GPU, always or with certain arguments.

The rules follow PyTorch's CUDA kernels (aten/src/ATen/native/cuda). A kernel synchronizes if it reads a value,
a count or an error code back, or copies from memory that is not pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...explain.waits.operations import COUNT, FROM_GPU, FROM_PAGEABLE, GATHERED, KERNELS, VALUE, ZEROS
from ..transfer import COPIED_AT_ONCE_BYTES, is_gathered, parse_copy
from .state import PINNED, RunState, size_of
from .translations import TRANSLATED, Translation

Check = Callable[[RunState, Any, Sequence[Any], dict[str, Any]], None]  # state, operator, arguments
# The results that are on the GPU, for operators where not all are
GPU_OUTPUTS = {"_pack_padded_sequence": (0,)}

# Operators that accept CPU tensors together with GPU tensors
_MIXED_DEVICES = (
    "set_", "_pack_padded_sequence", "_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu", "_to_copy",
)  # fmt: skip

_CHECKED_NAMESPACES = (
    "aten", "prim", "prims", "quantized", "c10d", "_c10d_functional", "profiler", "inductor", "debugprims",
)  # fmt: skip
# Functions whose CPU kernels read values that their CUDA kernels do not read
CPU_CHECKS = ("quantile", "nanquantile")


@dataclass(frozen=True)
class OperatorRule:
    """How one operator behaves on a GPU.

    Attributes:
        check: records its synchronizations; None if it never synchronizes.
        gpu_outputs: which of its results are on the GPU; None for all.
        creates: whether it takes no tensors.
        name: the name without namespace and overload.
        same_device: whether all its tensors must be on one device.
        writes: whether all its results are arguments written in place, which keep their device.
        checked: whether its synchronizations are known.
        counted: whether it does anything on a GPU.
        on_gpu: the operator that a GPU runs in its place, for some arguments; None if there is none.
        communicates: whether it is one of torch.distributed.
    """

    check: Check | None
    gpu_outputs: tuple[int, ...] | None
    name: str
    creates: bool
    same_device: bool
    writes: bool
    on_gpu: Translation | None
    checked: bool
    counted: bool
    communicates: bool


def record_copy(state: RunState, target: Any, source: Any, non_blocking: bool) -> None:
    """Record the synchronization of a copy of ``source`` into ``target``, if it synchronizes."""
    to, fro = state.tags.get(target), state.tags.get(source)
    up, down = to not in (None, PINNED), fro not in (None, PINNED)
    if up == down or not source.numel() or not state.tags.is_on_host(source if up else target):
        return
    if not state.thread.call and torch._C._current_graph_task_id() != -1:
        state.tags.put([target, source], to if up else fro)  # a bucket from C++ code of DistributedDataParallel
        return
    host, on_host, on_gpu = (fro, source, target) if up else (to, target, source)
    if up and state.thread.call == "__setitem__" and not source.dim():  # `x[0] = 1`; more elements are filled
        state.record_sync("setitem", "copies the number for one element to the GPU", "H2D", size_of(source))
        return
    gathered = is_gathered(on_host, on_gpu.dtype, on_gpu)
    size = target.numel() * source.element_size()
    record_transfer(state, "copy_", up, host is PINNED, non_blocking, size, gathered=gathered)


def record_transfer(
    state: RunState, op: str, up: bool, pinned: bool, non_blocking: bool, size: int, *, gathered: bool = False
) -> None:
    """Record the synchronization of a copy between memory and GPU, if it synchronizes; see `is_gathered`."""
    if non_blocking and ((pinned and not gathered) or (up and size <= COPIED_AT_ONCE_BYTES)):
        return
    cause = FROM_GPU  # a non-blocking copy into memory that is not pinned is staged, and synchronizes
    if up:
        cause = "copies to the GPU from pinned memory, blocking" if pinned else FROM_PAGEABLE
        cause = GATHERED if pinned and gathered else f"non_blocking {FROM_PAGEABLE}" if non_blocking else cause
    state.record_sync(op, cause, "H2D" if up else "D2H", size)


def _has_mask(indices: Sequence[Any]) -> bool:
    """Return whether an index has a mask, whose True elements must be counted."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _record_indices(state: RunState, indices: Sequence[Any]) -> None:
    for index in indices:
        if index is not None and index.numel() and state.tags.is_on_host(index):
            state.record_sync("getitem", "copies an index to the GPU", "H2D", size_of(index))


def _index(state: RunState, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if state.tags.device(args[0]) is None:
        return
    _record_indices(state, args[1])
    if _has_mask(args[1]):
        state.record_sync("getitem", COUNT)


def _fill(state: RunState, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Check the value, which masked_fill and index_fill read; fill_ reads it only from another device.

    The operator is also what torch 2.15 makes of a number that is assigned to elements, whose indices it copies.
    """
    if func._schema.name.startswith("aten::index_fill") and state.tags.device(args[0]) is not None:
        _record_indices(state, args[2:3])
    if not isinstance(args[-1], torch.Tensor) or state.tags.device(args[-1]) is None:
        return
    name = func._schema.name.partition("::")[2]
    if name != "fill_" or state.tags.device(args[0]) is None:
        state.record_sync(name, VALUE)


def _where(state: RunState, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for value in args[1:3]:
        if isinstance(value, torch.Tensor) and not value.dim() and state.tags.get(value) is None:
            state.record_sync("where", "copies a number to the GPU", "H2D", size_of(value))


def _only_if(op: str, synchronizes: Callable[[Sequence[Any], dict[str, Any]], bool]) -> Check:
    """Return the check of an operator that synchronizes if ``synchronizes(args, kwargs)``."""

    def check(state: RunState, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if synchronizes(args, kwargs):
            state.record_sync(op)

    return check


def _is_sorted(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether `isin` sorts its inputs; smaller ones are compared pairwise."""
    elements, tests = args[:2]
    both = isinstance(elements, torch.Tensor) and isinstance(tests, torch.Tensor)
    return bool(both and tests.numel() >= 10 * elements.numel() ** 0.145)


def _is_long(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether `mode` counts modes; up to this size, one thread block sorts."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    return bool(args[0].dim() and args[0].shape[dim] > 2048)


def _in_node(name: str) -> Check:
    """Return the check of a backward formula that counts zeros, but not while a mode is on."""

    def check(state: RunState, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        node = torch._C._current_autograd_node()
        if node is not None and node.name().startswith(name):
            state.record_sync(name.removesuffix("Backward").lower(), ZEROS)

    return check


def _index_put(state: RunState, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if state.tags.device(args[0]) is None:
        return
    values = args[2]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    number = values.numel() == 1 and state.tags.device(values) is None
    _record_indices(state, args[1])
    if not _has_mask(args[1]):
        if number:
            state.record_sync("setitem", "copies a number to the GPU", "H2D", size_of(values))
    elif accumulate or not number:  # a number is filled in by the mask, without a count
        state.record_sync("setitem", COUNT)


def _copy(state: RunState, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    source, non_blocking = parse_copy(args[1:], kwargs)
    record_copy(state, args[0], source, non_blocking)


def _foreach_copy(state: RunState, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    sources, non_blocking = parse_copy(args[1:], kwargs)
    for target, source in zip(args[0], sources, strict=False):
        record_copy(state, target, source, non_blocking)


def _has_tensor_as_std(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return isinstance(args[1] if len(args) > 1 else kwargs.get("std"), torch.Tensor)


def _has_no_bounds(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    low, high = ([*args, kwargs.get("min", 0), kwargs.get("max", 0)] if len(args) < 4 else args)[-2:]
    return bool(low == high)


def _check_errors(state: RunState, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False))
    if given.get("check_errors", kwargs.get("check_errors")):
        state.record_sync("linalg")


def _has_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values()))


CHECKS: dict[str, Check] = {
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index_put),
    "copy_": _copy,
    "equal": _only_if("equal", lambda args, kwargs: args[0].shape == args[1].shape),
    **dict.fromkeys(("fill_", "masked_fill", "masked_fill_", "index_fill", "index_fill_"), _fill),
    "where": _where,
    "isin": _only_if("isin", _is_sorted),
    "nanmedian": _only_if("nanmedian", lambda args, kwargs: len(args) == 1),
    "searchsorted": _only_if("searchsorted", lambda args, kwargs: kwargs.get("sorter") is not None),
    "segment_reduce": _only_if("segment_reduce", lambda args, kwargs: not kwargs.get("unsafe", False)),
    "mode": _only_if("mode", _is_long),
    "ones": _in_node("ProdBackward"),
    "max": _in_node("CumprodBackward"),
    "_foreach_copy_": _foreach_copy,
    "histc": _only_if("histc", _has_no_bounds),
    "normal": _only_if("normal", _has_tensor_as_std),
    "repeat_interleave": _only_if("repeat_interleave", lambda args, kwargs: kwargs.get("output_size") is None),
    **dict.fromkeys(("linspace", "logspace"), _only_if("linspace", _has_tensor)),
    **{f"linalg_{name}_ex": _check_errors for name in ("inv", "cholesky", "solve", "lu_factor", "ldl_factor")},
    "_linalg_solve_ex": _check_errors,
}


def rule_of(func: Any) -> OperatorRule:
    """Return the rule of an operator; cache it, as the look-up takes 20 us."""
    namespace, _, name = func._schema.name.partition("::")
    tags = set(func.tags)
    dependent = bool(tags & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
    check = CHECKS.get(name) if namespace == "aten" else None
    if check is None and (name in KERNELS or dependent):
        cause = KERNELS.get(name, VALUE if torch.Tag.data_dependent_output in tags else COUNT)

        def check(state: RunState, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
            state.record_sync(name, cause)

    takes = any("Tensor" in str(argument.type) for argument in func._schema.arguments if not argument.is_out)
    written = [result.alias_info is not None and result.alias_info.is_write for result in func._schema.returns]
    return OperatorRule(
        check, GPU_OUTPUTS.get(name), name, creates=not takes,
        same_device=namespace == "aten" and name not in _MIXED_DEVICES,
        writes=bool(written) and all(written) and name.endswith("_"),
        on_gpu=TRANSLATED.get(func), checked=namespace in _CHECKED_NAMESPACES, counted=namespace != "prim",
        communicates=namespace in ("c10d", "_c10d_functional"),
    )  # fmt: skip
