"""Answers that let a check pass: False for ``if (std == 0).any(): raise``, True for ``assert mask.all()``."""

from __future__ import annotations

import ast
import dis
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType

from ..syncs import sites

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
