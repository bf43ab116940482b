"""Which operators make the CPU wait on a GPU, and what their CUDA kernels do that the CPU's do not.

Read from the CUDA kernels of PyTorch (aten/src/ATen/native/cuda): each waits where it reads a value, a count or
an error code back, or copies from memory that is not pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .state import State, size_of
from .tags import PINNED

Check = Callable[[State, Any, Sequence[Any], dict[str, Any]], None]  # of the state, the operator and its arguments

_VALUE = "reads a value back from the GPU"
_COUNT = "reads the size of its result back from the GPU"
_ERROR = "reads an error code back from the GPU"
_CHECK = "reads a check of its arguments back from the GPU"

# By the operator's name without namespace and overload
WAITS = {
    "_local_scalar_dense": _VALUE,
    "is_nonzero": _VALUE,
    "nonzero": _COUNT,
    "argwhere": _COUNT,
    "masked_select": _COUNT,
    "_unique": _COUNT,
    "_unique2": _COUNT,
    "unique_dim": _COUNT,
    "unique_consecutive": _COUNT,
    "unique_dim_consecutive": _COUNT,
    "bincount": _COUNT,
    "_coalesce": _COUNT,
    "_to_sparse": _COUNT,
    "to_sparse": _COUNT,
    "_to_sparse_csr": _COUNT,
    "_to_sparse_csc": _COUNT,
    "_to_sparse_bsr": _COUNT,
    "_to_sparse_bsc": _COUNT,
    "embedding_renorm_": _COUNT,
    "fake_quantize_per_channel_affine_cachemask": _CHECK,
    "masked_scatter_backward": _COUNT,
    "_linalg_check_errors": _ERROR,
    "_linalg_svd": _ERROR,
    "_linalg_eigh": _ERROR,
    "linalg_eig": _ERROR,
    "_linalg_eigvals": _ERROR,
    "linalg_eigvals": _ERROR,
    "linalg_lstsq": _ERROR,
    "linalg_pinv": _ERROR,
    "linalg_lu_factor": _ERROR,
    "linalg_ldl_factor": _ERROR,
    "cholesky": _ERROR,
    "cholesky_inverse": _ERROR,
    "linalg_matrix_exp": _VALUE,
    "_ctc_loss": "copies the lengths of its targets to the GPU",
    "_nested_tensor_from_mask": _COUNT,
    "_nested_tensor_from_mask_left_aligned": _VALUE,
}

# The results that are on the GPU, where not all are
OUTPUTS = {"_pack_padded_sequence": (0,)}

# Operators that take tensors of the CPU beside those of a GPU
_APART = (
    "set_",
    "_pack_padded_sequence",
    "_pad_packed_sequence",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "_to_copy",
)

# Functions whose kernels for the CPU read values that those for CUDA leave alone
CPU_CHECKS = ("quantile", "nanquantile")


def masks(indices: Sequence[Any]) -> bool:
    """Tell whether an index has a mask, whose True elements have to be counted."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _indices(state: State, indices: Sequence[Any]) -> None:
    for index in indices:
        if index is not None and state.tags.device(index) is None and index.numel():
            state.wait("getitem", "copies an index to the GPU", "H2D", size_of(index))


def _index(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if state.tags.device(args[0]) is None:
        return
    _indices(state, args[1])
    if masks(args[1]):
        state.wait("getitem", _COUNT)


def _equal(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if args[0].shape == args[1].shape:
        state.wait("equal", _VALUE)


def _filled(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """masked_fill and index_fill take their value as a number, fill_ where it is elsewhere."""
    if not isinstance(args[-1], torch.Tensor) or state.tags.device(args[-1]) is None:
        return
    name = func._schema.name.partition("::")[2]
    if name != "fill_" or state.tags.device(args[0]) is None:
        state.wait(name, _VALUE)


def _where(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for value in args[1:3]:
        if isinstance(value, torch.Tensor) and not value.dim() and state.tags.get(value) is None:
            state.wait("where", "copies a number to the GPU", "H2D", size_of(value))


def _isin(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    elements, tests = args[:2]
    both = isinstance(elements, torch.Tensor) and isinstance(tests, torch.Tensor)
    if both and tests.numel() >= 10 * elements.numel() ** 0.145:  # below, each is compared with all
        state.wait("isin", _COUNT)


def _nanmedian(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if len(args) == 1:
        state.wait("nanmedian", _COUNT)


def _searchsorted(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if kwargs.get("sorter") is not None:
        state.wait("searchsorted", _CHECK)


def _mode(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    if args[0].dim() and args[0].shape[dim] > 2048:  # what fits into one block is sorted there
        state.wait("mode", _VALUE)


def _segment_reduce(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if not kwargs.get("unsafe", False):
        state.wait("segment_reduce", _CHECK)


def _in_node(name: str) -> Check:
    """A backward formula that reads whether there are zeros; under a mode it takes another way."""

    def check(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        node = torch._C._current_autograd_node()
        if node is not None and node.name().startswith(name):
            state.wait(name.removesuffix("Backward").lower(), "reads the number of zeros back from the GPU")

    return check


def _index_put(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if state.tags.device(args[0]) is None:
        return
    values = args[2]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    number = values.numel() == 1 and state.tags.device(values) is None
    _indices(state, args[1])
    if not masks(args[1]):
        if number:
            state.wait("setitem", "copies a number to the GPU", "H2D", size_of(values))
    elif accumulate or not number:  # a number is filled in where the mask is, uncounted
        state.wait("setitem", _COUNT)


def _copy(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    copied(state, args[0], args[1], non_blocking)


def _foreach_copy(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    for target, source in zip(args[0], args[1], strict=False):
        copied(state, target, source, non_blocking)


def copied(state: State, target: Any, source: Any, non_blocking: bool) -> None:
    """Note the wait of a copy of ``source`` into ``target``, if it has one."""
    to, fro = state.tags.get(target), state.tags.get(source)
    up, down = to not in (None, PINNED), fro not in (None, PINNED)
    if up == down or not source.numel():
        return
    if not state.here.call and torch._C._current_graph_task_id() != -1:
        state.tags.put([target, source], to if up else fro)  # a bucket of DistributedDataParallel's, of C++
        return
    host = fro if up else to
    moved(state, "copy_", up, host is PINNED and dense(target, source), non_blocking, size_of(source))


def dense(*copied: Any) -> bool:
    """Tell whether a copy takes no detour: what has gaps is put together in memory that is not pinned."""
    for tensor in copied:
        extent = 1
        for stride, size in sorted(
            (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            if size != 1:
                if stride != extent:
                    return False
                extent *= size
    return True


def moved(state: State, op: str, up: bool, pinned: bool, non_blocking: bool, size: int) -> None:
    """Note the wait of a copy between memory and GPU, if it has one."""
    if non_blocking and pinned:
        return
    if not up:
        # Into memory that is not pinned, also a copy that need not wait is staged, and waits
        state.wait(op, "copies from the GPU", "D2H", size)
    elif non_blocking:
        state.wait(op, "non_blocking copies to the GPU from memory that is not pinned", "H2D", size)
    else:
        where = "pinned memory, blocking" if pinned else "memory that is not pinned"
        state.wait(op, f"copies to the GPU from {where}", "H2D", size)


def _histc(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    low, high = ([*args, kwargs.get("min", 0), kwargs.get("max", 0)] if len(args) < 4 else args)[-2:]
    if low == high:
        state.wait("histc", "reads the least and the greatest element back from the GPU")


def _normal(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if isinstance(args[1] if len(args) > 1 else kwargs.get("std"), torch.Tensor):
        state.wait("normal", _CHECK)


def _repeat_interleave(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_size") is None:
        state.wait("repeat_interleave", _COUNT)


def _check_errors(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False))
    if given.get("check_errors", kwargs.get("check_errors")):
        state.wait("linalg", _ERROR)


def _spaced(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    state.wait("linspace", _VALUE)


CHECKS: dict[str, Check] = {
    "index": _index,
    "_unsafe_index": _index,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "_unsafe_index_put": _index_put,
    "copy_": _copy,
    "equal": _equal,
    "fill_": _filled,
    "masked_fill": _filled,
    "masked_fill_": _filled,
    "index_fill": _filled,
    "index_fill_": _filled,
    "where": _where,
    "isin": _isin,
    "nanmedian": _nanmedian,
    "searchsorted": _searchsorted,
    "segment_reduce": _segment_reduce,
    "mode": _mode,
    "ones": _in_node("ProdBackward"),
    "max": _in_node("CumprodBackward"),
    "_foreach_copy_": _foreach_copy,
    "histc": _histc,
    "normal": _normal,
    "repeat_interleave": _repeat_interleave,
    "linspace": _spaced,
    "logspace": _spaced,
    "linalg_inv_ex": _check_errors,
    "linalg_cholesky_ex": _check_errors,
    "linalg_solve_ex": _check_errors,
    "_linalg_solve_ex": _check_errors,
    "linalg_lu_factor_ex": _check_errors,
    "linalg_ldl_factor_ex": _check_errors,
}


@dataclass(frozen=True)
class Rule:
    """What is known of one operator.

    Attributes:
        check: notes its waits; None where it has none.
        outputs: which of its results are on the GPU; None for all.
        creates: it takes no tensors.
        name: without namespace and overload.
        together: all its tensors have to be on one device.
        writes: all that it returns is written in place, and stays where it is.
    """

    check: Check | None
    outputs: tuple[int, ...] | None
    name: str
    creates: bool
    together: bool
    writes: bool


def rule_of(func: Any) -> Rule:
    """Return the rule of an operator; look it up once, it costs 20 us."""
    namespace, _, name = func._schema.name.partition("::")
    tags = set(func.tags)
    dependent = bool(tags & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
    check = CHECKS.get(name) if namespace == "aten" else None
    if check is None and (name in WAITS or dependent):
        cause = WAITS.get(name, _VALUE if torch.Tag.data_dependent_output in tags else _COUNT)

        def check(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
            state.wait(name, cause)

    takes = any("Tensor" in str(argument.type) for argument in func._schema.arguments if not argument.is_out)
    written = [result.alias_info is not None and result.alias_info.is_write for result in func._schema.returns]
    return Rule(
        check, OUTPUTS.get(name), name, creates=not takes, together=namespace == "aten" and name not in _APART,
        writes=bool(written) and all(written) and name.endswith("_"),
    )  # fmt: skip
