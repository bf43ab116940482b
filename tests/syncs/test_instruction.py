"""The operation that a Python frame is executing."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from instrument.syncs.calls import callee_in, operation_at


class CallerRecorder:
    """Records the caller's current operation on every access."""

    def __init__(self) -> None:
        self.seen: list[str | None] = []

    def note(self, *_: Any, **__: Any) -> Any:
        frame = sys._getframe(1)
        assert frame is not None
        self.seen.append(operation_at(frame))
        return self

    def text(self, *_: Any) -> str:
        self.seen.append(operation_at(sys._getframe(1)))
        return "1"

    def truth(self, *_: Any) -> bool:
        self.seen.append(operation_at(sys._getframe(1)))
        return True

    def number(self, *_: Any) -> int:
        self.seen.append(operation_at(sys._getframe(1)))
        return 1

    def __iter__(self) -> Any:
        self.seen.append(operation_at(sys._getframe(1)))
        return iter((1, 2))

    item = cpu = to = sum = note
    __getitem__ = __add__ = __radd__ = __matmul__ = __lt__ = __neg__ = __mod__ = note
    __setitem__ = __delitem__ = __iadd__ = note
    __bool__ = __contains__ = truth
    __float__ = lambda self: float(self.number())  # noqa: E731
    __repr__ = __format__ = text


EXPRESSIONS = {
    "x.item()": "item",
    "x.sum().item()": "sum item",
    "x.to('cpu', non_blocking=False)": "to",
    "y = [x.cpu()]": "cpu",
    "function(x)": "function",
    "functions[0](x)": None,
    "holder.deep.note(1)": "note",
    "note(1)": "note",
    "note(*[1])": "note",
    "note(1, **{})": "note",
    "x.sum(\n).to(\n1,\n)": "sum to",
    "(x\n.sum()\n.item())": "sum item",
    "bool(x)": "bool",
    "str(x)": "format",
    "print(x, file=nothing)": "print",
    "f'{x}'": "format",
    "f'{x:.3f}'": "format",
    "f'{x!r}'": "format",
    "x[0]": "getitem",
    "x[0:1]": "getitem",
    "x[0] = 1": "setitem",
    "del x[0]": "delitem",
    "if x: pass": "bool",
    "while x: break": "bool",
    "y = 1 if x else 2": "bool",
    "assert x": "bool",
    "y = not x": "bool",
    "y = x and 1": "bool",
    "y = x or 1": "bool",
    "1 in x": "contains",
    "x + 1": "add",
    "1 + x": "add",
    "x @ x": "matmul",
    "x += 1": "add",
    "x < 1": "lt",
    "-x": "neg",
    "a, b = x": "iter",
    "for y in x: pass": "iter",
    "[*x]": "iter",
}


def run(source: str, filename: str) -> list[str | None]:
    """Run ``source`` as the body of a function."""
    recorder = CallerRecorder()

    class Nothing:
        def write(self, _: str) -> None:
            pass

    class Holder:
        deep = recorder

    body = "\n    ".join(source.split("\n"))
    names = "x, note, function, functions, holder, nothing"
    code = f"def function_of({names}):\n    {body}\n"
    scope: dict[str, Any] = {}
    exec(compile(code, filename, "exec"), scope)

    def function(value: Any) -> None:
        recorder.seen.append(operation_at(sys._getframe(1)))

    scope["function_of"](recorder, recorder.note, function, [function], Holder, Nothing())
    return recorder.seen


@pytest.mark.parametrize(("source", "expected"), EXPRESSIONS.items())
def test_operations_without_source(source: str, expected: str | None) -> None:
    """The instruction itself identifies the operation when the source file is missing."""
    if sys.version_info < (3, 11) and "(" in source:
        pytest.skip("Python 3.10 knows the line only")
    expected_ops = expected.split() if expected else [None]
    assert expected_ops == run(source, "<made up>")


def test_operations_with_source(tmp_path: Any) -> None:
    """With source, a line with several operations gives the one that runs, also across lines."""
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 knows the line only")
    path = tmp_path / "step.py"
    source = 'print("ä"), x.item(), x.to(\n    "cpu",\n), "%s" % x'
    path.write_text("def function_of(*_):\n    " + "\n    ".join(source.split("\n")), encoding="utf-8")
    assert ["item", "to", "format"] == run(source, str(path))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("loss.item()", "item"),
        ("total += f(loss.sum().item())", "item"),
        ("train(model)", "train"),
        ("f(g(x))", None),
        ("x = y", None),
    ],
)
def test_callee_from_the_line(line: str, expected: str | None) -> None:
    """From a line alone, the known synchronizing call is taken, or the only call."""
    assert expected == callee_in(line)
