"""The context of a call in a trace: operator, backward node, regions, step, and site in the Python stack."""

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

from ...base.findings import Site
from ...read.tables.autograd import engine_node_name
from ...read.tables.nest import NestedRanges, rows_around
from ...read.tables.steps import main_thread, process_of_threads
from ...read.tables.table import Array, Table
from ...read.tables.trace import MODULE_PREFIX, Trace
from . import sites
from .operations import public_name

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
            if frame := FRAME.match(trace.strings[code]):
                self._lines[frame["file"], frame["function"]].add(frame["line"])

    def locate(self, stack: list[str]) -> tuple[Site | None, Site | None, bool | None]:
        """Return the sites of the user's and of the library's function, and whether the profiler made the call.

        Args:
            stack: the names of the frames, innermost first; the last result is None if there are none.
        """
        frames = _frames_of(stack)
        user, library = self._places(frames)
        site = None if user is None else self._call_site(frames[user], stack[user - 1] if user else "")
        via = None if library is None else self._function_site(frames[library])
        return site, via, any(map(_of_profiler, frames.values())) if stack else None

    def needed(self, stack: list[str]) -> set[int]:
        """Return the places in a stack, innermost first, of the frames that `locate` needs for its result."""
        frames = _frames_of(stack)
        user, library = self._places(frames)
        kept = {0} | {place for place, frame in frames.items() if _of_profiler(frame)}
        kept |= set() if user is None else {max(user - 1, 0), user}
        return kept if library is None else kept | {library}

    def _places(self, frames: dict[int, re.Match[str]]) -> tuple[int | None, int | None]:
        """Return the places of the user's function, and of the innermost one of a library that it called."""
        library = None
        for place, frame in frames.items():
            owner = sites.code_owner(self._path(frame["file"]))
            if owner == sites.USER:
                return place, library
            if owner == sites.LIBRARY and library is None:
                library = place
        return None, library

    def _call_site(self, frame: re.Match[str], inner: str) -> Site:
        called = _BUILT_IN.match(inner) or FRAME.match(inner[:_MAX_LINE_LENGTH])
        path, number = self._path(frame["file"]), int(frame["line"])
        call = find_call(path, frame["function"], number, called["function"] if called else None)
        return Site(path, call[1], call[0]) if call else self._function_site(frame)

    def _function_site(self, frame: re.Match[str]) -> Site:
        file, function = frame["file"], frame["function"]
        several = len(self._lines[file, function]) > 1
        return Site(file, 0, f"{function} (line {frame['line']})" if several else function)

    def _path(self, file: str) -> str:
        if file not in self._paths:
            self._paths[file] = _absolute_path(file)
        return self._paths[file]


def _frames_of(stack: list[str]) -> dict[int, re.Match[str]]:
    """Return the Python functions in a stack by their places."""
    matches = ((place, FRAME.match(name[:_MAX_LINE_LENGTH])) for place, name in enumerate(stack))
    return {place: frame for place, frame in matches if frame}


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


_OPERATOR = re.compile(r"^(?!autograd::|torch::autograd::)[A-Za-z_]\w*::(\w+)")


class CallContext(NamedTuple):
    """The operator, regions, step and stack around a call on its thread.

    Attributes:
        op: public name of the outermost operator; None outside operators.
        operator: row of that operator; None outside operators.
        since_ns: when that operator began.
        backward: the autograd node that ran.
        region: names of the regions, outermost first.
        step: number of the step; None outside steps.
        site: the user's function; None if no stack was recorded.
        via: the innermost function of a library.
        profiler: whether the profiler itself made the call; None if no stack was recorded.
        module: the innermost ``nn.Module`` of the stack, such as "Linear_3"; empty if none was recorded.
    """

    op: str | None
    operator: int | None
    since_ns: int
    backward: str | None
    region: tuple[str, ...]
    step: int | None
    site: Site | None
    via: Site | None
    profiler: bool | None
    module: str = ""


class TraceContext:
    """Finds the operators, regions, steps and stacks around given times on threads of a trace.

    Args:
        trace: the trace.
        thread: the number of a thread for each time; -1 for none.
        at_ns: the times.
    """

    def __init__(self, trace: Trace, thread: Array, at_ns: Array) -> None:
        self._trace = trace
        self._operators = _innermost_rows(trace.operators, thread, at_ns, trace.operators.parent)
        self._regions = _innermost_rows(trace.regions, thread, at_ns)
        self._frames = _innermost_rows(trace.frames, thread, at_ns, trace.frames.parent)
        self._steps = _steps(trace, thread, at_ns)
        self._functions = StackSites(trace)
        main, process = main_thread(trace), process_of_threads(trace)
        beside_main = np.where(process[thread] == process[main], main, -1)
        self._main_regions = _innermost_rows(trace.regions, beside_main, at_ns)

    def context(self, row: int) -> CallContext:
        """Return the context at the time in ``row``."""
        operators = _row_and_parents(self._trace.operators, self._operators[row])
        regions = _row_and_parents(self._trace.regions, self._regions[row])
        public = [(each, match[1]) for each, name in operators if (match := _OPERATOR.match(name))]
        backward = next((node for _, name in operators if (node := engine_node_name(name))), None)
        if backward is not None and not regions:  # autograd's thread works for the main thread
            regions = _row_and_parents(self._trace.regions, self._main_regions[row])
        op, operator, since = None, None, 0
        if public:
            operator, name = public[-1]
            op, since = public_name(name), int(self._trace.operators.start_ns[operator])
        step = self._steps[row]
        named = tuple(name for _, name in reversed(regions))
        stack = [name for _, name in _row_and_parents(self._trace.frames, self._frames[row])]
        site, via, profiler = self._functions.locate(stack)
        module = next((name.removeprefix(MODULE_PREFIX) for name in stack if name.startswith(MODULE_PREFIX)), "")
        number = None if step < 0 else int(step)
        return CallContext(op, operator, since, backward, named, number, site, via, profiler, module)

    def thread(self, number: int) -> str:
        """Return the name of the thread, or its number."""
        if number < 0:
            return ""
        thread = self._trace.threads[number]
        return thread.name.strip() or str(thread.thread)


def _row_and_parents(table: Table, row: int) -> list[tuple[int, str]]:
    """Return a row and the rows around it, innermost first, each with its name."""
    return [(each, table.strings[table.name[each]]) for each in rows_around(int(row), table.parent)]


def _innermost_rows(table: Table, thread: Array, at_ns: Array, parents: Array | None = None) -> Array:
    """Return the innermost row open on each thread at each time, or -1; ``parents``: those by time, if known."""
    innermost = NestedRanges(table.start_ns, table.end_ns, table.thread, parents).innermost_at(at_ns, thread)
    return np.where(thread >= 0, innermost, -1)


def _steps(trace: Trace, thread: Array, at_ns: Array) -> Array:
    """Return the number of the step of each thread's process at each time, or -1."""
    process = process_of_threads(trace)
    steps = trace.steps
    innermost = NestedRanges(steps.start_ns, steps.end_ns, process[steps.thread]).innermost_at(
        at_ns, process[thread]
    )
    held = (innermost >= 0) & (thread >= 0)
    result = np.full(len(thread), -1)
    result[held] = steps.number[innermost[held]]
    return result
