"""What the events of a snapshot belong to: the line of the program, the pass, the step and the region."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from ...base.source_paths import is_library, path_in_torch
from ...base.trace_marks import STEP_PREFIX
from ..tables.nest import NestedRanges
from ..tables.table import Array, Table

PYTHON, OPTIMIZER, BACKWARD, MODULE, WORKSPACE, PARAMETERS, EMPTY_CACHE, CAST, CLOSURE, ZERO_GRAD = (
    1 << bit for bit in range(10)
)
"""Marks of a stack: it has frames of Python, of an optimizer, of the backward pass, of a call of an ``nn.Module``,
of what a library computes in, of what makes or moves the parameters of a module, of ``empty_cache``, of what casts
for autocast, of a closure of the program that an optimizer calls, and then not of the optimizer, or of
``zero_grad``."""

_MODULE_FILE = "nn/modules/module.py"
_CALL = "_call_impl"
_MAKES_PARAMETERS = {"_apply", "convert", "to_empty", "load_state_dict", "_load_from_state_dict"}  # of nn.Module
_BACKWARD_FILES = ("autograd/__init__.py", "autograd/graph.py", "_tensor.py")
_BACKWARD_NAMES = {"backward", "grad", "_engine_run_backward", "_make_grads"}
_BASE_OF_OPTIMIZERS = "optim/optimizer.py"  # around the step of each, also of those of the program
_NOT_AN_OPTIMIZER = ("optim/lr_scheduler.py", "optim/swa_utils.py")
_ENGINE = re.compile(r"autograd::(?:python::PythonEngine|Engine)::|Backward\d*::apply|AccumulateGrad")
_WORKSPACE = re.compile("[wW]ork[sS]pace")
_GENERATED = re.compile(r"[\\/]\w\w[\\/]c[a-z2-7]{40,}\.py$")  # by torch.compile
_CAST = re.compile("autocast::cached_cast")
_ROOTS = {"<module>", "_bootstrap", "_run_module_as_main"}  # the outermost frames of threads that Python starts
_FAR = 1 << 40


class StackFacts(NamedTuple):
    """What each stack tells, by its number.

    Attributes:
        line: the row in ``frames`` of the innermost frame of the program or, without one, of Python; -1 without
            frames of Python. Code that torch.compile generates is not of the program: the line that calls it is.
        marks: the marks, added up.
        calls: the rows in ``frames`` of the lines outside of torch that call modules.
        calls_module: for each frame, whether it is torch's call of a module.
        outside: for each frame, whether it is Python outside of torch, which can call a module.
    """

    line: Array
    marks: Array
    calls: Array
    calls_module: Array
    outside: Array


def stack_facts(frames: Table, stacks: Sequence[tuple[int, ...]]) -> StackFacts:
    """Return what the stacks of a `MemorySnapshot` tell."""
    files, names = frames.text("file"), frames.text("name")
    marks = np.array([_marks(*each) for each in zip(files, names, strict=True)] or [0])
    own_files = _by_text(frames, lambda file: not is_library(file) and not _GENERATED.search(file))
    users = (marks & PYTHON > 0) & own_files
    roots = np.array([name in _ROOTS for name in names] or [False])
    flat = np.fromiter(chain.from_iterable(stacks), np.int64)
    sizes = np.array([len(stack) for stack in stacks])
    starts = np.cumsum(sizes) - sizes
    by_stack = _Reduced(flat, starts, sizes)
    python = marks[flat] & PYTHON > 0
    innermost = by_stack.lowest(python)
    own = by_stack.lowest(users[flat])
    line = np.where(own >= 0, own, innermost)
    all_marks = by_stack.union(marks[flat])
    optimizer, inner = (by_stack.lowest(marks[flat] & mark > 0) for mark in (OPTIMIZER, MODULE | BACKWARD))
    base = _by_text(frames, lambda file: path_in_torch(file) == _BASE_OF_OPTIMIZERS)
    calls_own = (own >= 0) & ~base[flat[optimizer]] if len(flat) else own >= 0
    # Frames nearer to the allocation than torch's optimizer are of what it calls: Lightning trains in a closure.
    closure = ((inner >= 0) & (inner < optimizer)) | (calls_own & (own < optimizer))
    all_marks = np.where(closure, all_marks & ~OPTIMIZER | CLOSURE, all_marks)
    outermost = by_stack.highest(python)
    rooted = roots[flat[outermost]] & (outermost >= 0) if len(flat) else outermost >= 0
    if rooted.sum() * 2 > (outermost >= 0).sum():  # else roots are not recorded
        # autograd's threads call hooks, custom functions and checkpointed parts
        all_marks = np.where((outermost >= 0) & ~rooted, all_marks | BACKWARD, all_marks)
    line = np.where(line >= 0, flat[line] if len(flat) else line, -1)
    calls_module = marks & MODULE > 0
    outside = _by_text(frames, lambda file: _is_python(file) and not path_in_torch(file))
    return StackFacts(line, all_marks, _calls(by_stack, calls_module, outside), calls_module, outside)


def _calls(by_stack: _Reduced, calls_module: Array, outside: Array) -> Array:
    """Return the rows of the frames outside of torch that are next to torch's call of a module, in any stack."""
    flat, starts, sizes = by_stack
    if not len(flat):
        return flat
    place = np.where(outside[flat], np.arange(len(flat)), len(flat))
    following = np.minimum.accumulate(place[::-1])[::-1]
    callers = following[calls_module[flat]]
    same = callers < (starts + sizes).repeat(sizes)[calls_module[flat]]
    rows: Array = np.unique(flat[callers[same]])
    return rows


class _Reduced(NamedTuple):
    """Reduces values of frames to one for each stack."""

    flat: Array
    starts: Array
    sizes: Array

    def _reduce(self, function: np.ufunc, values: Array, empty: int) -> Array:
        """Return the result for each stack, and ``empty`` for stacks without frames."""
        some = self.sizes > 0
        result = np.full(len(self.sizes), empty)
        if some.any():
            result[some] = function.reduceat(values, self.starts[some])
        return result

    def union(self, values: Array) -> Array:
        return self._reduce(np.bitwise_or, values, 0)

    def lowest(self, wanted: Array) -> Array:
        """Return the place in ``flat`` of the innermost wanted frame; -1 if there is none."""
        places = self._reduce(np.minimum, np.where(wanted, np.arange(len(self.flat)), _FAR), _FAR)
        return np.where(places < _FAR, places, -1)

    def highest(self, wanted: Array) -> Array:
        """Return the place in ``flat`` of the outermost wanted frame; -1 if there is none."""
        return self._reduce(np.maximum, np.where(wanted, np.arange(len(self.flat)), -1), -1)


def _by_text(frames: Table, function: Callable[[str], bool]) -> Array:
    by_code = {code: function(frames.strings[code]) for code in np.unique(frames.file).tolist()}
    return np.array([by_code[code] for code in frames.file.tolist()] or [False])


def _marks(file: str, name: str) -> int:
    """Return the marks of a frame."""
    if not _is_python(file):
        patterns = ((BACKWARD, _ENGINE), (WORKSPACE, _WORKSPACE), (CAST, _CAST))
        return sum(mark for mark, pattern in patterns if pattern.search(name))
    inside = path_in_torch(file)
    if name == "zero_grad":
        return PYTHON | ZERO_GRAD
    if inside.startswith("optim/"):
        return PYTHON | (0 if inside in _NOT_AN_OPTIMIZER else OPTIMIZER)
    if inside == _MODULE_FILE:
        return PYTHON | (MODULE if name == _CALL else PARAMETERS if name in _MAKES_PARAMETERS else 0)
    if name == "empty_cache" and file.endswith("memory.py"):  # of torch.cuda, torch.accelerator and torch_npu
        return PYTHON | EMPTY_CACHE
    if inside in _BACKWARD_FILES and name in _BACKWARD_NAMES:
        return PYTHON | BACKWARD
    return PYTHON | (PARAMETERS if name == "__init__" or inside == "nn/parameter.py" else 0)


def module_calls(facts: StackFacts, stack: Sequence[int]) -> tuple[int, ...]:
    """Return the rows of the frames that call a module, the outermost first: the modules around an allocation.

    Frames have no names of modules; the line that calls one tells it from others of its class.
    """
    calls = []
    caller = -1
    for row in reversed(stack):
        if facts.calls_module[row]:
            if caller >= 0:
                calls.append(caller)
        elif facts.outside[row]:
            caller = row
    return tuple(calls)


def _is_python(file: str) -> bool:
    if file.endswith(".py") or file.startswith("<"):
        return True
    # A script may have no suffix, but so have headers of C++; frames without a file have "??".
    return file.startswith("/") and "." not in file.rpartition("/")[2] and "/include/" not in file


FORWARD_PASS, BACKWARD_PASS, OPTIMIZER_STEP = range(3)
PASS_NAMES = ("forward", "backward", "optimizer")
_UNKNOWN = -1
FREES = re.compile("^free")
"""The actions that free memory, or ask to."""
_SNAPSHOT = re.compile("^snapshot$")  # the event of an earlier snapshot, which never has a stack
_START, _END = re.compile("^START$"), re.compile("^END$")
_STEP_OF_PROFILER = re.compile(f"^{STEP_PREFIX}")
_STEP_OF_OPTIMIZER = re.compile(r"^Optimizer\.step#")


class Passes(NamedTuple):
    """The pass of each event; what is neither backward pass nor optimizer counts as forward.

    Attributes:
        kind: which of the three.
        number: counts up from one pass to the next on its GPU.
    """

    kind: Array
    number: Array


def passes_of(events: Table, annotations: Table, facts: StackFacts, stacks: Array) -> Passes:
    """Return the passes of the events of a `MemorySnapshot`, of which ``stacks`` says where each happened.

    An event without frames of Python, where others have some, is on a thread of autograd. An event of the program
    outside of modules begins no new pass.
    """
    kind, number = np.zeros(len(events), np.int64), np.zeros(len(events), np.int64)
    frees, taken = (events.matching("action", names) for names in (FREES, _SNAPSHOT))
    for device in np.unique(events.device).tolist():
        own = np.flatnonzero(events.device == device)
        marks = facts.marks[stacks[own]]
        alike = frees[own], ~frees[own] & ~taken[own]
        kind[own] = kinds = _kinds(marks, alike, _in_optimizer(events.time_ns[own], annotations, device))
        begins = (kinds != FORWARD_PASS) | (marks & MODULE > 0)
        strong = _filled(np.where(begins, kinds, _UNKNOWN))
        number[own] = np.cumsum(np.append(0, np.diff(strong) != 0)) if len(own) else strong
    return Passes(kind, number)


def _kinds(marks: Array, alike: tuple[Array, Array], in_optimizer: Array) -> Array:
    """Return the kinds of the events of a device, of which those ``alike`` have stacks, or none has."""
    python = marks & PYTHON > 0
    if python.any():  # a closure, with its forward and backward pass, is within the step too
        in_optimizer = in_optimizer & python & (marks & (MODULE | BACKWARD | CLOSURE) == 0)
    # Without stacks only torch's marks tell where the step of an optimizer ends.
    by_marks = in_optimizer.any() and not python.any()
    kind = np.full(len(marks), FORWARD_PASS if by_marks else _UNKNOWN)
    for those in alike:  # the stacks of frees are perhaps not recorded
        if python[those].any():
            kind[those] = np.where(python[those], FORWARD_PASS, BACKWARD_PASS)
    kind[marks & BACKWARD > 0] = BACKWARD_PASS
    kind[(marks & OPTIMIZER > 0) | in_optimizer] = OPTIMIZER_STEP
    return _filled(kind)


def _filled(kind: Array) -> Array:
    """Replace each unknown kind by the one before it, and those before the first by the forward pass."""
    last = np.maximum.accumulate(np.where(kind != _UNKNOWN, np.arange(len(kind)), -1))
    return np.where(last >= 0, kind[last], FORWARD_PASS)


def _in_optimizer(time_ns: Array, annotations: Table, device: int) -> Array:
    """Return which times are within a step of an optimizer, as torch marks them."""
    own = annotations.where((annotations.device == device) & annotations.matching("name", _STEP_OF_OPTIMIZER))
    own = own.where(np.argsort(own.time_ns, kind="stable"))
    depth = np.append(0, np.cumsum(np.where(own.matching("stage", _START), 1, -1)))
    depth -= np.minimum.accumulate(np.minimum(depth, 0))  # the begin of the first step is perhaps not recorded
    inside: Array = depth[np.searchsorted(own.time_ns, time_ns, "right")] > 0
    return inside


class Steps(NamedTuple):
    """The steps of a GPU.

    Attributes:
        number: the step of each event of the snapshot, from 0; 0 for events of other GPUs.
        complete: how many steps ended in the recorded events.
    """

    number: Array
    complete: int


def steps_of(passes: Passes, events: Table, annotations: Table, device: int) -> Steps:
    """Return the steps of ``device``: those that a profiler marks, else those that end with an optimizer.

    An optimizer that allocates nothing, as SGD without momentum, is known from torch's marks alone, and so is one
    that allocates in its first step only, as fused ones do.
    """
    own = np.flatnonzero(events.device == device)
    by_optimizer = passes.kind[own] == OPTIMIZER_STEP
    ended = _ends(annotations, _STEP_OF_PROFILER)
    ends = np.diff(by_optimizer.astype(np.int64), append=0) < 0
    if not len(ended) and ends.sum() <= 1:
        marked = _ends(annotations.where(annotations.device == device), _STEP_OF_OPTIMIZER)
        ended = marked if len(marked) > ends.sum() else ended
    number = np.zeros(len(events), np.int64)
    if len(ended) and len(own) and (events.time_ns[own] >= 0).all():
        at = np.unique(np.searchsorted(events.time_ns[own], ended, "right"))
        number[own] = np.searchsorted(at, np.arange(len(own)), "right")
        return Steps(number, len(at))
    number[own] = np.cumsum(ends) - ends
    return Steps(number, int(number.max(initial=0)))


def _ends(annotations: Table, pattern: re.Pattern[str]) -> Array:
    """Return the times at which the ranges with these names end, in order."""
    ends = annotations.matching("stage", _END) & annotations.matching("name", pattern)
    times: Array = np.sort(annotations.time_ns[ends])
    return times


_STEP = re.compile(f"^{STEP_PREFIX}")
_BOOTSTRAP, _THREADING = re.compile("^_bootstrap$"), re.compile(r"\bthreading\.py$")
_MOST_THREADS = 30  # of more, several have a region open at nearly any time, and none is known


def regions_of(
    events: Table,
    annotations: Table,
    rows: Array,
    passes: Passes,
    frames: Table,
    stacks: Sequence[tuple[int, ...]],
) -> list[str]:
    """Return the name of the innermost region that the thread of each event had open; empty if none is known.

    What the program sets with ``torch.cuda.memory._set_memory_metadata`` comes before regions.

    A range has a thread, and an event of the allocator does not say its own. What is known of it: in a backward
    pass, the loop's thread waits for threads of autograd, so that nothing begins or ends there while they have a
    range open; other threads with ranges run beside the loop. A thread that Python started has a root of its own
    in its stacks.

    Args:
        events: those of a `MemorySnapshot`, as the other tables.
        annotations: the begins and ends of ranges.
        rows: rows of events; -1 for memory that is older.
        passes: the passes of the events.
        frames: the frames of the stacks.
        stacks: the stacks.
    """
    regions = [events.strings[events.user_metadata[row]] if row >= 0 else "" for row in rows.tolist()]
    timed = np.flatnonzero(rows >= 0)
    timed = timed[events.time_ns[rows[timed]] >= 0]
    marks = annotations.where(annotations.time_ns >= 0)
    if not len(marks) or not len(timed):
        return regions
    marks = marks.where(np.argsort(marks.time_ns, kind="stable"))
    event = rows[timed]
    opened = _opened(marks, np.searchsorted(marks.time_ns, events.time_ns[event], "right"))
    backward = passes.kind == BACKWARD_PASS
    # Python started the threads whose stacks have a root of its own
    roots = set(np.flatnonzero(frames.matching("name", _BOOTSTRAP) & frames.matching("file", _THREADING)).tolist())
    started = np.array([not roots.isdisjoint(stack) for stack in stacks])[events.stack]
    program = ~backward & (events.stack > 0)
    in_thread = 2 * started[program].sum() > program.sum()  # where the loop is, as most of these are its own
    names = _names(opened, backward[event], started[event] == in_thread, in_thread)
    for place, name in zip(timed.tolist(), names.tolist(), strict=True):
        regions[place] = regions[place] or name
    return regions


class _Opened(NamedTuple):
    """The name of the innermost range that threads have open, at each of some places; empty without one.

    Attributes:
        loop: that of the thread that steps.
        helping: those of threads for which this one waits.
        beside: those of the others.
    """

    loop: Array
    helping: list[Array]
    beside: list[Array]


def _opened(marks: Table, places: Array) -> _Opened:
    """Return what threads have open at places between the begins and ends, which are in order."""
    begin, end = _paired(marks)
    names = np.array(marks.text("name"), object)[begin]
    thread = marks.thread[begin]
    steps = np.unique(marks.thread[marks.matching("name", _STEP) & (marks.thread >= 0)])
    if len(steps) == 1:
        thread = np.where(thread < 0, steps, thread)  # torch notes its own ranges on this thread
    threads, lane = np.unique(thread, return_inverse=True)
    nothing = np.full(len(places), "", object)
    if not 0 < len(threads) <= _MOST_THREADS:
        return _Opened(nothing, [], [])
    opened = dict.fromkeys(steps.tolist(), nothing)  # the begins of a thread can be too old to be kept
    nest = NestedRanges(begin, end, lane.reshape(-1))
    for number, each in enumerate(threads.tolist()):
        opened[each] = np.append(names, "")[nest.innermost_at(places - 1, np.full(len(places), number))]
    if len(threads) > 1 and len(steps) != 1:
        return _Opened(_agreed(list(opened.values())), [], list(opened.values()))
    loop = int(steps[0] if len(steps) else threads[0])
    own = thread == loop
    noted = np.sort(np.concatenate((begin[own], end[own])))
    beside = set(thread[np.searchsorted(noted, begin) != np.searchsorted(noted, end)].tolist())
    others = {each: names_of for each, names_of in opened.items() if each != loop}
    return _Opened(
        opened[loop],
        [names_of for each, names_of in others.items() if each not in beside],
        [names_of for each, names_of in others.items() if each in beside],
    )


def _paired(marks: Table) -> tuple[Array, Array]:
    """Return the rows at which ranges begin, and those at which they end; torch's own have no number."""
    begin: list[int] = []
    end: list[int] = []
    open_ = defaultdict[tuple[int, str], list[int]](list)
    columns = marks.range.tolist(), marks.text("name"), marks.text("stage")
    for row, (number, name, stage) in enumerate(zip(*columns, strict=True)):
        ranges = open_[number, "" if number >= 0 else name]
        if stage == "START":
            ranges.append(len(begin))
            begin.append(row)
            end.append(len(marks))
        elif ranges:
            end[ranges.pop()] = row
    return np.array(begin, np.int64), np.array(end, np.int64)


def _names(opened: _Opened, backward: Array, like_loop: Array, in_thread: bool) -> Array:
    """Return the name at each place.

    Args:
        opened: what threads have open.
        backward: whether autograd allocates there.
        like_loop: whether Python started the allocating thread if, and only if, it started that of the loop.
        in_thread: whether it started that of the loop, which is the main thread otherwise.
    """
    none = np.full(len(backward), "", object)
    helps = sum((names != "" for names in opened.helping), np.zeros(len(backward), np.int64))
    helping = sum(opened.helping, none)  # the only name, where one thread helps
    by_autograd = np.where(helps == 1, helping, opened.loop)
    by_loop = _agreed([opened.loop, *opened.beside]) if in_thread else opened.loop
    by_others = _agreed(opened.beside or [none])
    names: Array = np.where(backward, by_autograd, np.where(like_loop, by_loop, by_others))
    return names


def _agreed(threads: Sequence[Array]) -> Array:
    """Return the name that all threads have; empty where they differ."""
    names: Array = np.where(np.all([each == threads[0] for each in threads], axis=0), threads[0], "")
    return names
