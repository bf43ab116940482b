"""Which line of a function made a call, where its source is here and leaves no choice."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """A function in a file.

    Attributes:
        name: its qualified name.
        first_lines: where it begins: at ``def``, or at its first decorator.
        last_line: where it ends.
        calls: the name that each of its own calls ends in, as ``item`` of ``loss.item()``, and the line.
    """

    name: str
    first_lines: tuple[int, ...]
    last_line: int
    calls: tuple[tuple[str, int], ...]


def find(file: str, function: str, number: int, callee: str | None) -> tuple[str, int] | None:
    """Return the qualified name of a function, and the line of its only call of ``callee``, or 0.

    None where the source is not here, or has no such function there: it is another version.

    Args:
        file: where it is.
        function: its name, without that of its class.
        number: its first line; or another one of it, which tells it where no other has its name.
        callee: the name of what it called; None where that is not known.
    """
    named = [each for each in _definitions(file) if each.name.rpartition(".")[2] == function]
    chosen = [each for each in named if number in each.first_lines] or named
    if len(chosen) != 1 or not min(chosen[0].first_lines) <= number <= chosen[0].last_line:
        return None
    lines = {line for name, line in chosen[0].calls if name == callee}
    return chosen[0].name, lines.pop() if len(lines) == 1 else 0


@lru_cache(maxsize=256)
def _definitions(file: str) -> tuple[Definition, ...]:
    try:
        if not Path(file).is_file():  # a trace may name anything, also what never ends
            return ()
        with tokenize.open(file) as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()
    module = Definition(
        "<module>", (1,), max((node.end_lineno or 0 for node in tree.body), default=0), tuple(_calls(tree))
    )
    return (module, *_inside(tree, ""))


def _inside(scope: ast.AST, prefix: str) -> Iterator[Definition]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, _Function):
            begins = {node.lineno, *(decorator.lineno for decorator in node.decorator_list)}
            yield Definition(prefix + node.name, tuple(begins), node.end_lineno or 0, tuple(_calls(node)))
            yield from _inside(node, f"{prefix}{node.name}.<locals>.")
        else:
            yield from _inside(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)


def _calls(scope: ast.AST) -> Iterator[tuple[str, int]]:
    """The calls that run in a function's own frame."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, (_Function, ast.Lambda)):
            continue
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute):
                yield called.attr, called.end_lineno or node.lineno
            elif isinstance(called, ast.Name):
                yield called.id, node.lineno
        yield from _calls(node)
