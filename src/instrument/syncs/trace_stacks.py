"""Finds call sites in the Python stacks of a trace, whose frames have no line of the call."""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..findings import Site
from ..traces.trace import Trace
from . import sites

FRAME = re.compile(r"^(?P<file>[^<].*)\((?P<line>\d+)\): (?P<function>.+)$")
"""The names of Python functions in a trace: file, line of the definition, function."""
_BUILT_IN = re.compile(r"^<built-in (?:method|function) (?P<function>\w+)")
_MAX_LINE_LENGTH = 2048  # characters of a frame's name: a trace may hold anything
_PROFILER = ("torch/profiler/profiler.py", "torch/autograd/profiler.py")
# Packages that a trace from another machine names by a path relative to an unknown folder
PACKAGES = frozenset((
    "accelerate", "apex", "bitsandbytes", "composer", "datasets", "deepspeed", "diffusers", "einops", "evaluate",
    "flash_attn", "ignite", "jax", "keras", "lightning", "lightning_fabric", "megatron", "numpy", "pandas", "peft",
    "PIL", "pytorch_lightning", "ray", "sklearn", "scipy", "sentence_transformers", "sglang", "timm", "tokenizers",
    "torch", "torchaudio", "torchmetrics", "torchrec", "torchtitan", "torchtune", "torchvision", "tqdm",
    "transformer_engine", "transformers", "triton", "trl", "vllm", "wandb", "xformers",
))  # fmt: skip
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class StackSites:
    """Turns the names that torch.profiler gives Python frames, such as ``train.py(12): main``, into sites.

    The number is the line at which the function was when the profiler first saw it: the first line of its
    definition, or where it stood when the recording began. It is not the line of the call that synchronized. The
    site has that line if the source is on this machine and has only one call of that name, else 0. If a file that
    is not on this machine has several functions of one name, such as ``forward``, the number becomes part of the
    function's name.
    """

    def __init__(self, trace: Trace) -> None:
        self._lines: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._paths: dict[str, str] = {}
        for code in np.unique(trace.frames.name).tolist():
            if found := FRAME.match(trace.strings[code]):
                self._lines[found["file"], found["function"]].add(found["line"])

    def locate(self, stack: list[str]) -> tuple[Site | None, Site | None, bool | None]:
        """Return the sites of the user's and of the library's function, and whether the profiler made the call.

        Args:
            stack: the names of the frames, innermost first; the last result is None if there are none.
        """
        site = via = None
        frames = [
            (found, stack[row - 1] if row else "")
            for row, name in enumerate(stack)
            if (found := FRAME.match(name[:_MAX_LINE_LENGTH]))
        ]
        for frame, inner in frames:
            owner = sites.code_owner(self._path(frame["file"]))
            if owner == sites.USER:
                site = self._call_site(frame, inner)
                break
            if owner == sites.LIBRARY and via is None:
                via = self._function_site(frame)
        profiler = any(_of_profiler(frame) for frame, _ in frames)
        return site, via, profiler if stack else None

    def needed(self, stack: list[str]) -> set[int]:
        """Return the places in a stack, innermost first, of the frames that `locate` needs for its result."""
        kept, via, site = {0}, False, False
        for place, name in enumerate(stack):
            if not (frame := FRAME.match(name[:_MAX_LINE_LENGTH])):
                continue
            owner = sites.code_owner(self._path(frame["file"]))
            if owner == sites.USER and not site:
                kept |= {max(place - 1, 0), place}
                site = True
            elif (owner == sites.LIBRARY and not via and not site) or _of_profiler(frame):
                kept.add(place)
            via |= owner == sites.LIBRARY
        return kept

    def _call_site(self, frame: re.Match[str], inner: str) -> Site:
        called = _BUILT_IN.match(inner) or FRAME.match(inner[:_MAX_LINE_LENGTH])
        path, number = self._path(frame["file"]), int(frame["line"])
        found = find_call(path, frame["function"], number, called["function"] if called else None)
        return Site(path, found[1], found[0]) if found else self._function_site(frame)

    def _function_site(self, frame: re.Match[str]) -> Site:
        file, function = frame["file"], frame["function"]
        several = len(self._lines[file, function]) > 1
        return Site(file, 0, f"{function} (line {frame['line']})" if several else function)

    def _path(self, file: str) -> str:
        if file not in self._paths:
            self._paths[file] = _absolute_path(file)
        return self._paths[file]


def _of_profiler(frame: re.Match[str]) -> bool:
    return frame["file"].replace("\\", "/").endswith(_PROFILER)


def _absolute_path(file: str) -> str:
    """Return the absolute path of a file whose leading folder, one of ``sys.path``, torch.profiler cut off.

    A file that is not on this machine is placed among the installed packages if it belongs to a known package.
    """
    if Path(file).is_absolute() or file.startswith("<"):
        return file
    for folder in ("", sysconfig.get_path("stdlib"), *sys.path):
        path = Path(folder, file)
        if _is_file(path):
            return str(path.absolute())
    package = re.split(r"[/\\]", file)[0]
    return str(Path(sysconfig.get_path("purelib"), file)) if package in PACKAGES else file


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


class FunctionDefinition(NamedTuple):
    """A function in a source file.

    Attributes:
        name: its qualified name.
        first_lines: the lines at which it may begin: that of ``def`` and those of its decorators.
        last_line: the line at which it ends.
        calls: name and line of each call in its own body; the name is the last one, ``item`` of ``loss.item()``.
    """

    name: str
    first_lines: tuple[int, ...]
    last_line: int
    calls: tuple[tuple[str, int], ...]


def find_call(file: str, function: str, number: int, callee: str | None) -> tuple[str, int] | None:
    """Return the qualified name of a function, and the line of its only call of ``callee``, else 0.

    Return None if the source is not on this machine, or has no such function at that line: it is another version.

    Args:
        file: path of the source file.
        function: name of the function, without its class.
        number: a line of the function; its first line tells functions of one name apart.
        callee: name of the called function; None if unknown.
    """
    named = [each for each in _definitions(file) if each.name.rpartition(".")[2] == function]
    chosen = [each for each in named if number in each.first_lines] or named
    if len(chosen) != 1 or not min(chosen[0].first_lines) <= number <= chosen[0].last_line:
        return None
    lines = {line for name, line in chosen[0].calls if name == callee}
    return chosen[0].name, lines.pop() if len(lines) == 1 else 0


@lru_cache(maxsize=256)
def _definitions(file: str) -> tuple[FunctionDefinition, ...]:
    try:
        if not Path(file).is_file():  # a trace may name anything, also a device that is read without end
            return ()
        with tokenize.open(file) as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()
    module = FunctionDefinition(
        "<module>", (1,), max((node.end_lineno or 0 for node in tree.body), default=0), tuple(_calls(tree))
    )
    return (module, *_definitions_in(tree, ""))


def _definitions_in(scope: ast.AST, prefix: str) -> Iterator[FunctionDefinition]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, _Function):
            begins = {node.lineno, *(decorator.lineno for decorator in node.decorator_list)}
            yield FunctionDefinition(prefix + node.name, tuple(begins), node.end_lineno or 0, tuple(_calls(node)))
            yield from _definitions_in(node, f"{prefix}{node.name}.<locals>.")
        else:
            inner = f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix
            yield from _definitions_in(node, inner)


def _calls(scope: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the calls that run in a function's own frame."""
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
