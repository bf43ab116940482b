"""Tensors without data: runs models too large for this machine, and answers reads so that checks pass.

Reads of values get plausible answers, the same in each run. Small tensors made of known numbers keep them, and a
tensor filled with a number reads as that number. Checks for NaN and infinity find none, an unknown floating-point
number equals no other, unknown integers are 1, and a check that would raise passes. Other data is random.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from types import CodeType, FrameType
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

from ...explain.waits import sites
from .known_data import (
    LEAVE_DATA_UNCHANGED,
    is_meta,
    kind_of,
    known_data_of,
    known_of,
    note,
    notes_of,
    run_on_known_data,
)
from .state import tensors

_READS = {"item", "bool", "float", "int", "tolist", "equal", "allclose"}
_EQUALITY = (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)
_NO_TENSOR = (ast.Is, ast.IsNot, ast.In, ast.NotIn)  # comparisons whose result is a bool


def passing_value(frame: FrameType | None) -> bool | None:
    """Return the truth value of the expression that ``frame`` evaluates with which the check around it passes.

    A check is an ``assert``, or an ``if`` whose body raises. Return None without a check around the expression, or
    if another part of the condition decides.

    Args:
        frame: the frame of the call that reads a value, or of anything that it calls.
    """
    here = sites.locate(frame).frame
    return None if here is None else _passing_value(here.f_code, here.f_lasti, here.f_lineno or 0)


@lru_cache(maxsize=1024)
def _passing_value(code: CodeType, instruction: int, line: int) -> bool | None:
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
    found: list[tuple[ast.If | ast.Assert, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append((node, True))
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            found.append((node, False))
    return tuple(found)


def _is_read(node: ast.expr) -> bool:
    """Return whether the truth of ``node`` itself is read, and not a part of it, as in ``x.item() > 3``."""
    if _name_of_call(node) in _READS:
        return True
    for part in ast.walk(node):
        if _name_of_call(part) in _READS or (
            isinstance(part, ast.Compare) and isinstance(part.ops[0], _NO_TENSOR)
        ):
            return False
    return True


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
            args, kwargs = tree_map_only(torch.Tensor, self._with_data, (args, kwargs))
            return func(*args, **kwargs)

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

    def pretended(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that pretends to have the data of ``tensor``, with one element in memory."""
        with _modes_off():
            if is_meta(tensor):
                return self._with_data(tensor)
            return torch.zeros((), dtype=tensor.dtype).expand(tuple(tensor.shape))
