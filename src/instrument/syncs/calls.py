"""Names the operation of a call that synchronizes after the instruction that the program runs."""

from __future__ import annotations

import dis
import linecache
import re
from functools import lru_cache
from types import CodeType, FrameType

from ..explain.waits import operations

# Operations of instructions that are not calls, by the beginnings of their names across Python versions
INSTRUCTIONS = (
    (("POP_JUMP", "JUMP_IF", "UNARY_NOT", "TO_BOOL", "JUMP_BACKWARD_IF"), "bool"),
    (("BINARY_SUBSCR", "BINARY_SLICE"), "getitem"),
    (("STORE_SUBSCR", "STORE_SLICE"), "setitem"),
    (("DELETE_SUBSCR",), "delitem"),
    (("FORMAT_", "CONVERT_VALUE", "BUILD_STRING"), "format"),
    (("CONTAINS_OP",), "contains"),
    (("GET_ITER", "FOR_ITER", "UNPACK_", "LIST_EXTEND", "SET_UPDATE"), "iter"),
    (("UNARY_NEGATIVE",), "neg"),
    (("UNARY_INVERT",), "invert"),
)
OPERATORS = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "@": "matmul",
    "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift", "[]": "getitem",
    "==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge",
}  # fmt: skip
_SPELLING = {
    "subtract": "sub", "multiply": "mul", "true_divide": "truediv", "floor_divide": "floordiv", "modulo": "mod",
    "power": "pow", "matrix_multiply": "matmul",
}  # fmt: skip


def operation_at(frame: FrameType) -> str | None:
    """Return the operation that ``frame`` carries out now ("item", "bool", "getitem"); None if it is not known."""
    return _operation_at(frame.f_code, frame.f_lasti, frame.f_lineno or 0)


@lru_cache(maxsize=4096)
def _operation_at(code: CodeType, last: int, line: int) -> str | None:
    """Return the operation of an instruction, cached: disassembling a long function takes 1 ms."""
    instructions = list(dis.get_instructions(code))
    # Cache entries that follow an instruction belong to it.
    now = max((each for each in instructions if each.offset <= last), key=lambda each: each.offset, default=None)
    if now is None:
        return None
    source = linecache.getline(code.co_filename, line).strip()
    text = _segment(code.co_filename, now) or source
    name = now.opname
    if name.startswith(("CALL", "PRECALL")) and not name.startswith("CALL_INTRINSIC"):
        certain, called = _callee(instructions, now)
        return _name_of(called if certain else callee_in(text))
    if name.startswith(("LOAD_ATTR", "LOAD_METHOD")):
        return _name_of(now.argval)
    if name.startswith(("BINARY_OP", "COMPARE_OP")):
        return _operator(now.argrepr, text)
    for beginnings, op in INSTRUCTIONS:
        if name.startswith(beginnings):
            return op
    if name.startswith(("BINARY_", "INPLACE_")):  # Python 3.10 has one instruction for each operator
        operator = name.split("_", 1)[1].lower()
        return _SPELLING.get(operator, operator)
    return None


def _operator(shown: str, text: str) -> str | None:
    sign = shown.removeprefix("bool(").removesuffix(")")
    if sign == "%" and text.startswith(('"', "'", 'f"', "f'")):
        return "format"
    return OPERATORS.get(sign) or OPERATORS.get(sign.removesuffix("="))


def _name_of(name: object) -> str | None:
    if isinstance(name, tuple):
        name = name[0]
    if not isinstance(name, str):
        return None
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    return operations.name_of_call(name)


def _callee(instructions: list[dis.Instruction], call: dis.Instruction) -> tuple[bool, object]:
    """Return whether the callee of a call was found, and its name, None if it has none.

    The callee begins where the call does, and ends before its brackets. Code that torch.compile made has no
    positions, nor has Python 3.10, so nothing is found there.
    """
    span = getattr(call, "positions", None)
    if span is None or span.col_offset is None:
        return False, None
    start, end = (span.lineno, span.col_offset), (span.end_lineno, span.end_col_offset)
    best, name = (0, 0), None
    for each in instructions:
        at = getattr(each, "positions", None)
        if at is None or at.col_offset is None or (at.lineno, at.col_offset) != start:
            continue
        if each.opname == "LOAD_CONST":  # names of arguments, from Python 3.13 on
            continue
        until = (at.end_lineno or 0, at.end_col_offset or 0)
        if best < until < end or (until == best and each.opname.startswith("LOAD_")):
            best = until
            name = each.argval if each.opname.startswith("LOAD_") else None
    return best > (0, 0), name


def callee_in(line: str) -> str | None:
    """Return the name of the call on ``line`` that most likely synchronizes; None if the text does not show it."""
    names = re.findall(r"(\w+)\s*\(", line)
    typical = [name for name in names if name in operations.TYPICAL_CALLS]
    return typical[-1] if typical else names[0] if len(set(names)) == 1 else None


def _segment(filename: str, instruction: dis.Instruction) -> str:
    """Return the source of ``instruction`` on one line; columns count bytes."""
    at = getattr(instruction, "positions", None)
    if at is None or None in (at.lineno, at.end_lineno, at.col_offset, at.end_col_offset):
        return ""
    lines = [linecache.getline(filename, number).encode() for number in range(at.lineno, at.end_lineno + 1)]
    lines[-1] = lines[-1][: at.end_col_offset]
    lines[0] = lines[0][at.col_offset :]
    return " ".join(b"".join(lines).decode(errors="replace").split())
