"""Operators that wait on a GPU depending on what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..syncs.operations import CHECK, COUNT, ERROR, VALUE
from ..syncs.transfer import parse_copy
from .copies import copied
from .state import State, size_of

Check = Callable[[State, Any, Sequence[Any], dict[str, Any]], None]  # of the state, the operator and its arguments


def _masks(indices: Sequence[Any]) -> bool:
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
    if _masks(args[1]):
        state.wait("getitem", COUNT)


def _equal(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if args[0].shape == args[1].shape:
        state.wait("equal", VALUE)


def _filled(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """masked_fill and index_fill take their value as a number, fill_ where it is elsewhere."""
    if not isinstance(args[-1], torch.Tensor) or state.tags.device(args[-1]) is None:
        return
    name = func._schema.name.partition("::")[2]
    if name != "fill_" or state.tags.device(args[0]) is None:
        state.wait(name, VALUE)


def _where(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for value in args[1:3]:
        if isinstance(value, torch.Tensor) and not value.dim() and state.tags.get(value) is None:
            state.wait("where", "copies a number to the GPU", "H2D", size_of(value))


def _isin(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    elements, tests = args[:2]
    both = isinstance(elements, torch.Tensor) and isinstance(tests, torch.Tensor)
    if both and tests.numel() >= 10 * elements.numel() ** 0.145:  # below, each is compared with all
        state.wait("isin", COUNT)


def _nanmedian(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if len(args) == 1:
        state.wait("nanmedian", COUNT)


def _searchsorted(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if kwargs.get("sorter") is not None:
        state.wait("searchsorted", CHECK)


def _mode(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    if args[0].dim() and args[0].shape[dim] > 2048:  # what fits into one block is sorted there
        state.wait("mode", VALUE)


def _segment_reduce(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if not kwargs.get("unsafe", False):
        state.wait("segment_reduce", CHECK)


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
    if not _masks(args[1]):
        if number:
            state.wait("setitem", "copies a number to the GPU", "H2D", size_of(values))
    elif accumulate or not number:  # a number is filled in where the mask is, uncounted
        state.wait("setitem", COUNT)


def _copy(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    source, non_blocking = parse_copy(args[1:], kwargs)
    copied(state, args[0], source, non_blocking)


def _foreach_copy(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    sources, non_blocking = parse_copy(args[1:], kwargs)
    for target, source in zip(args[0], sources, strict=False):
        copied(state, target, source, non_blocking)


def _histc(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    low, high = ([*args, kwargs.get("min", 0), kwargs.get("max", 0)] if len(args) < 4 else args)[-2:]
    if low == high:
        state.wait("histc", "reads the least and the greatest element back from the GPU")


def _normal(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if isinstance(args[1] if len(args) > 1 else kwargs.get("std"), torch.Tensor):
        state.wait("normal", CHECK)


def _repeat_interleave(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_size") is None:
        state.wait("repeat_interleave", COUNT)


def _check_errors(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False))
    if given.get("check_errors", kwargs.get("check_errors")):
        state.wait("linalg", ERROR)


def _spaced(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    state.wait("linspace", VALUE)


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
