"""Tensors without data: runs models too large for this machine, and answers reads so that checks pass.

Reads of values get plausible answers, the same in each run. Small tensors made of known numbers keep them, those
of random integers too, and a tensor filled with a number reads as that number. Checks for NaN and infinity find
none, an unknown floating-point number equals no other, unknown integers are 1, and a check that would raise
passes. Other data is random.

A tensor without data has a storage without data. If its numbers are known, a second storage with data is attached
to that storage, so that views share it. Operators run on both.
"""

from __future__ import annotations

import ast
import dis
import linecache
import operator
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import count
from types import CodeType
from typing import Any

import torch
from torch._prims_common import dtype_to_type
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ...explain.waits import sites
from ..counting.signatures import Found, Signatures
from .results import is_plain, is_sure, results_of, shares_memory
from .state import tensors

_READS = {"item", "bool", "float", "int", "tolist", "equal", "allclose"}
_EQUALITY = (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)
_NO_TENSOR = (ast.Is, ast.IsNot, ast.In, ast.NotIn)  # comparisons whose result is a bool


@lru_cache(maxsize=1024)
def _passing_value(code: CodeType, instruction: int, line: int) -> bool | None:
    """Return the truth value of the expression that ``code`` evaluates with which the check around it passes.

    A check is an ``assert``, or an ``if`` whose body raises. Return None without a check around the expression, or
    if another part of the condition decides.
    """
    for check, wanted in _checks(code.co_filename):
        last = check.test.end_lineno or line
        if check.lineno <= line <= last:
            return _value_of_operand(check.test, wanted, _operand(code, instruction, check, last))
    return None


@lru_cache(maxsize=64)
def _checks(file: str) -> tuple[tuple[ast.If | ast.Assert, bool], ...]:
    """Return the checks of a file, each with the truth value of its condition that lets it pass."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise))
    ]
    return tuple((node, isinstance(node, ast.Assert)) for node in nodes)


def _is_read(node: ast.expr) -> bool:
    """Return whether the truth of ``node`` itself is read, and not a part of it, as in ``x.item() > 3``."""
    return _name_of_call(node) in _READS or not any(
        _name_of_call(part) in _READS or (isinstance(part, ast.Compare) and isinstance(part.ops[0], _NO_TENSOR))
        for part in ast.walk(node)
    )


def _name_of_call(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def _operand(code: CodeType, instruction: int, check: ast.If | ast.Assert, last: int) -> ast.expr | None:
    """Return the operand of the condition that ``instruction`` belongs to; None if it cannot be told.

    The code of each operand ends with a conditional jump. Columns do not tell: Python 3.10 has none, and in Python
    3.11 a jump has that of the whole statement.
    """
    lines = [(start, end) for start, end, line in code.co_lines() if line and check.lineno <= line <= last]
    jumps = [
        each.offset
        for each in dis.get_instructions(code)
        if "_IF_" in each.opname and any(start <= each.offset < end for start, end in lines)
    ]
    operands = list(_operands(check.test))
    place = sum(jump < instruction for jump in jumps)
    return operands[place] if len(jumps) == len(operands) > place else None


def _operands(condition: ast.expr) -> Iterator[ast.expr]:
    """Yield the operands of ``and``, ``or`` and ``not``, in the order in which they are evaluated."""
    if isinstance(condition, ast.BoolOp):
        for value in condition.values:
            yield from _operands(value)
    elif isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        yield from _operands(condition.operand)
    else:
        yield condition


def _value_of_operand(node: ast.expr, wanted: bool, operand: ast.expr | None) -> bool | None:
    """Return the truth value that an operand of a condition must have."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _value_of_operand(node.operand, not wanted, operand)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator, right = node.ops[0], node.comparators[0]
        if isinstance(operator, _EQUALITY) and isinstance(right, ast.Constant) and isinstance(right.value, bool):
            equal = wanted != isinstance(operator, (ast.IsNot, ast.NotEq))
            return _value_of_operand(node.left, right.value == equal, operand)
    if not isinstance(node, ast.BoolOp):
        return wanted if _is_read(node) else None
    for value in node.values:
        if operand in [*_operands(value)]:
            return _value_of_operand(value, wanted, operand)
    return None


_COPIES = ("_to_copy", "copy_")


@contextmanager
def _modes_off() -> Iterator[None]:
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def _answer_of_check(answer: bool) -> bool:
    """Return the answer that lets a check around the caller pass, or ``answer`` without such a check."""
    here = sites.locate(sys._getframe(1)).frame
    wanted = None if here is None else _passing_value(here.f_code, here.f_lasti, here.f_lineno or 0)
    return answer if wanted is None else wanted


class _Operator:
    """What is the same in all calls of an operator.

    Attributes:
        name: its name without namespace and overload.
        shares_memory: whether its results are in the memory of its argument.
        is_sure: whether shapes and the like determine the results.
        decides: whether values of the results may be known if nothing is known of the arguments.
    """

    __slots__ = ("decides", "is_sure", "name", "shares_memory")

    def __init__(self, func: Any) -> None:
        self.name = func._schema.name.partition("::")[2]
        self.shares_memory = shares_memory(func)
        self.is_sure = is_sure(func)
        self.decides = self.name in _FILLS or self.name in _NEVER_TRUE or self.name in _COMPARISONS


_OPERATORS: dict[Any, _Operator] = {}


class DatalessMode:
    """A FakeTensorMode that answers reads of values.

    Attributes:
        mode: the FakeTensorMode, to be entered below the other modes.
    """

    def __init__(self) -> None:
        self.mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        self._random = torch.Generator()
        self._seeds = count()
        self._signatures = Signatures()

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Found]:
        """Run one operator; return its results, its signature and the tensors among its arguments."""
        operator = _OPERATORS.get(func)
        if operator is None:
            operator = _OPERATORS[func] = _Operator(func)
        offsets = [tensor.storage_offset() for tensor in tensors(args)] if operator.shares_memory else ()
        found = self._signatures.find(func, args, kwargs, torch.get_default_dtype(), *offsets)
        if operator.name == "_local_scalar_dense":
            return self._value(args[0]), found
        given, mode = found[1], self.mode
        plain = operator.is_sure and found[0].exact and all(is_plain(tensor, mode) for tensor in given)
        unknown = plain and given and not operator.decides and not any(map(_has_notes, given))
        value = None if unknown else known_of(operator.name, args)
        try:
            out = results_of(mode, func, args, kwargs, found) if plain else func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = tree_map_only(torch.Tensor, mode.from_tensor, self.run_with_data(func, *args, **kwargs))
            out = _answer_of_check(out) if isinstance(out, bool) else out
        if not unknown:
            self._follow(operator, func, args, kwargs, out, value)
        return out, found

    def _follow(
        self, operator: _Operator, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, value: Any
    ) -> None:
        """Note what is known of the data after an operator; ``value`` is that of all elements of the result."""
        name = operator.name
        if func._schema.is_mutable and name not in LEAVE_DATA_UNCHANGED:
            for tensor in tensors(list(args[:1])):
                note(tensor, value)
        elif value is not None and isinstance(out, torch.Tensor):
            note(out, value)
        if name in _COPIES and not is_meta(out) and any(map(is_meta, tensors(args))):
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")  # as torch says
        if name not in LEAVE_DATA_UNCHANGED:
            with _modes_off():
                run_on_known_data(func, args, kwargs, out)

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
        with _modes_off():
            is_known = known_data_of(tensor) is not None
        if not is_known and value is not None:
            return dtype_to_type(tensor.dtype)(value)
        item = self.run_with_data(torch.Tensor.item, tensor)
        return _answer_of_check(item) if not is_known and isinstance(item, bool) else item

    def run_with_data(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``func`` for tensors with data."""
        with _modes_off():
            args, kwargs = tree_map_only(torch.Tensor, self._with_data, (args, kwargs))
            return func(*args, **kwargs)

    def _with_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with data, of the shape and dtype of ``tensor``; the same one each time."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        if is_meta(tensor):
            return torch.empty_strided(tuple(tensor.size()), tensor.stride(), dtype=tensor.dtype, device="meta")
        data = known_data_of(tensor)
        if data is not None:
            return data.clone()
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

    def pretended(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that pretends to have the data of ``tensor``, with one element in memory."""
        with _modes_off():
            if is_meta(tensor):
                return self._with_data(tensor)
            return torch.zeros((), dtype=tensor.dtype).expand(tuple(tensor.shape))


_FILLS = {"full": 1, "fill_": 1, "zeros": 0.0, "zero_": 0.0, "ones": 1.0, "scalar_tensor": 0, "zeros_like": 0.0}
_NEVER_TRUE = ("isnan", "isinf", "isposinf", "isneginf")
_LOGICAL = ("logical_or", "bitwise_or", "logical_and", "bitwise_and")
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_KEEP_VALUE = (
    "_is_any_true", "any", "all", "_is_all_true", "view", "detach", "clone", "_to_copy", "expand", "alias",
    "squeeze", "unsqueeze", "select", "slice", "reshape", "max", "min", "amax", "amin", "mean",
)  # fmt: skip
# The former finds no infinity
LEAVE_DATA_UNCHANGED = ("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_")


def known_of(name: str, args: Sequence[Any]) -> Any:
    """Return the value that all elements of the result have, if it follows without the data; else None."""
    if name in _FILLS:
        place = _FILLS[name]
        value = args[place] if isinstance(place, int) else place
        return notes_of(value).get("value") if isinstance(value, torch.Tensor) else value
    if name in _NEVER_TRUE:
        return False
    if name in _COMPARISONS and "value" not in notes_of(args[0]):
        return _comparison_result(name, args[0], args[1])
    if not args:
        return None
    if isinstance(args[0], (list, tuple)):  # concatenated tensors with one value
        values = [notes_of(tensor).get("value") for tensor in tensors(list(args[0]))]
        return values[0] if name in ("stack", "cat") and len({*values}) == 1 else None
    value = notes_of(args[0]).get("value") if isinstance(args[0], torch.Tensor) else None
    if name in _LOGICAL and isinstance(args[1], torch.Tensor):
        both = (value, notes_of(args[1]).get("value"))
        decides = name in ("logical_or", "bitwise_or")  # True or anything is True
        return decides if decides in both else None if None in both else not decides
    if value is None:
        return None
    if name in ("logical_not", "bitwise_not"):
        return not value
    if name in ("sum", "count_nonzero"):
        return value * args[0].numel() if len(args) == 1 or not value else None
    return value if name in _KEEP_VALUE else None


def _comparison_result(name: str, tensor: torch.Tensor, other: Any) -> bool | None:
    """Return the result of a comparison of unknown numbers: floating-point ones equal none, integers are 1."""
    if other is tensor:
        return name in ("eq", "le", "ge")
    if tensor.is_floating_point():
        return {"eq": False, "ne": True}.get(name)
    whole = tensor.dtype is not torch.bool and not tensor.is_complex() and isinstance(other, (int, float))
    return bool(_COMPARISONS[name](1, other)) if whole else None


def notes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the notes on the data of ``tensor``: "value" of all its elements, "seed" of random ones."""
    try:
        storage: Any = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return {}
    notes: dict[str, Any] | None = getattr(storage, "_instrument_data", None)
    if notes is None:
        notes = storage._instrument_data = {}
    return notes


def _has_notes(tensor: torch.Tensor) -> bool:
    """Return whether anything is known of the data of ``tensor``, which has a storage."""
    storage = tensor.untyped_storage()
    return bool(getattr(storage, "_instrument_data", None)) or getattr(storage, _KEY, None) is not None


def note(tensor: torch.Tensor, value: Any) -> None:
    """Have all elements of ``tensor`` read as ``value``; None if the data is unknown."""
    notes = notes_of(tensor)
    notes.clear()
    if value is not None:
        notes["value"] = value


MAX_ELEMENTS = 2**14  # elements of a result; a mask of 128 x 128
_KEY = "_instrument_shadow"
_RANDOM_INTEGERS = ("aten::randint", "aten::randperm")
_SEED = 1


def is_meta(tensor: Any) -> bool:
    """Return whether the program put ``tensor``, which has no data in any case, on the meta device."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "meta"


def known_data_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor with the data of ``tensor``; None if the data is unknown."""
    if not isinstance(tensor, FakeTensor):
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
        return tensor.detach() if plain else None
    try:
        held = getattr(tensor.untyped_storage(), _KEY, None)
        if held is None:
            return None
        size, stride = tuple(map(int, tensor.size())), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(held, tensor.storage_offset(), size, stride)
    except (NotImplementedError, RuntimeError):  # sparse tensors have no storage; sizes may depend on data
        return None


def run_on_known_data(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """Run the operator ``func`` on the data, after it ran without data; call this with all modes off.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its arguments by keyword.
        out: its result.
    """
    given, made = list(tensors([*args, kwargs])), list(tensors(out))
    real = _results_with_data(func, args, kwargs, given, made)
    if real is None:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors(value):
                    _drop_data(tensor)
        return
    storages = {id(tensor.untyped_storage()) for tensor in given if isinstance(tensor, FakeTensor)}
    for fake, data in zip(made, real, strict=True):
        if not isinstance(fake, FakeTensor) or fake.layout is not torch.strided:  # only this layout has a storage
            continue
        if id(fake.untyped_storage()) not in storages:
            _attach_data(fake, data)


def _drop_data(tensor: torch.Tensor) -> None:
    """Drop the data of ``tensor``, and of all tensors that share its storage."""
    if isinstance(tensor, FakeTensor):
        with suppress(NotImplementedError, RuntimeError):
            tensor.untyped_storage().__dict__.pop(_KEY, None)


def _results_with_data(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], given: list[Any], made: list[Any]
) -> list[torch.Tensor] | None:
    """Return the results with data; None if a number is unknown, or a result has too many elements."""
    writes_lists = func._schema.name.startswith("aten::_foreach_") and func._schema.is_mutable  # returns nothing
    if not (made or writes_lists) or "empty" in func._schema.name:
        return None
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _random_integers(func, args, kwargs, made) if func._schema.name in _RANDOM_INTEGERS else None
    mutable = func._schema.is_mutable
    if mutable and not all(isinstance(tensor, FakeTensor) for tensor in given):
        return None
    try:
        if sum(int(tensor.numel()) for tensor in (*made, *given)) > MAX_ELEMENTS * (len(given) + 1):
            return None
        shadows = {id(tensor): known_data_of(tensor) for tensor in given}
        if any(shadow is None or shadow.numel() > MAX_ELEMENTS for shadow in shadows.values()):
            return None
        shown = tree_map_only(torch.Tensor, lambda tensor: shadows[id(tensor)], (tuple(args), kwargs))
        real = list(tensors(func(*shown[0], **shown[1])))
    except Exception:  # an operator may fail in any way: its values are then unknown
        return None
    alike = [each.shape for each in real] == [each.shape for each in made]
    return real if alike and all(each.device.type == "cpu" for each in real) else None


def _random_integers(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], made: list[Any]
) -> list[torch.Tensor] | None:
    """Return random integers, which programs take as places in their data; the same in each run."""
    if int(made[0].numel()) > MAX_ELEMENTS:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        own = tree_map_only(torch.Generator, lambda _: torch.default_generator, (tuple(args), kwargs))
        return list(tensors(func(*own[0], **own[1])))


def _attach_data(fake: FakeTensor, data: torch.Tensor) -> None:
    if fake.storage_offset() or data.layout is not torch.strided or is_meta(fake):
        return
    laid_out = torch.empty_strided(tuple(fake.size()), fake.stride(), dtype=fake.dtype).copy_(data)
    setattr(fake.untyped_storage(), _KEY, laid_out.untyped_storage())
