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
    for node, wanted in _checks(code.co_filename):
        if node.lineno <= line <= (node.end_lineno or node.lineno):
            return _value_of_part(node, wanted, *_position(code, instruction, line, node))
    return None


@lru_cache(maxsize=64)
def _checks(file: str) -> tuple[tuple[ast.expr, bool], ...]:
    """Return the conditions of a file's checks, each with the truth value that lets it pass."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append((node.test, True))
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            found.append((node.test, False))
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


def _position(code: CodeType, instruction: int, line: int, condition: ast.expr) -> tuple[int, int | None]:
    """Return the line and the column of what an instruction of ``condition`` evaluates."""
    positions = getattr(code, "co_positions", None)  # from Python 3.11 on
    if positions is not None:
        return line, list(positions())[instruction // 2][2]
    operands = list(_operands(condition))
    jumps = list(_conditional_jumps(code, condition))
    place = sum(jump < instruction for jump in jumps)  # each operand ends with its jump
    if len(jumps) != len(operands) or place == len(operands):
        return line, None
    return operands[place].lineno, operands[place].col_offset


def _operands(condition: ast.expr) -> Iterator[ast.expr]:
    """Yield the operands of ``and``, ``or`` and ``not``, in the order in which they are evaluated."""
    if isinstance(condition, ast.BoolOp):
        for value in condition.values:
            yield from _operands(value)
    elif isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        yield from _operands(condition.operand)
    else:
        yield condition


def _conditional_jumps(code: CodeType, condition: ast.expr) -> Iterator[int]:
    """Yield the offsets of the conditional jumps in the lines of ``condition``."""
    line = 0
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if condition.lineno <= line <= (condition.end_lineno or line) and "_IF_" in instruction.opname:
            yield instruction.offset


def _value_of_part(node: ast.expr, wanted: bool, line: int, column: int | None) -> bool | None:
    """Return the truth value that the part of a condition at a column and line must have."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _value_of_part(node.operand, not wanted, line, column)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator, right = node.ops[0], node.comparators[0]
        if isinstance(operator, _EQUALITY) and isinstance(right, ast.Constant) and isinstance(right.value, bool):
            equal = wanted != isinstance(operator, (ast.IsNot, ast.NotEq))
            return _value_of_part(node.left, right.value == equal, line, column)
    if not isinstance(node, ast.BoolOp):
        return wanted if _is_read(node) else None
    for value in node.values:
        start = (value.lineno, value.col_offset)
        end = (value.end_lineno or value.lineno, value.end_col_offset or 0)
        if column is not None and start <= (line, column) < end:
            return _value_of_part(value, wanted, line, column)
    return None
