"""The context of a call in a trace: operator, backward node, regions, step and Python stack around it."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from ..findings import Site
from ..traces.autograd import engine_node_name
from ..traces.main_threads import main_thread
from ..traces.nest import NestedRanges
from ..traces.step_content import process_of_threads
from ..traces.table import Array, Table
from ..traces.trace import MODULE_PREFIX, Trace
from .operations import public_name
from .trace_stacks import StackSites

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
        self._operators = _innermost_rows(trace.operators, thread, at_ns)
        self._regions = _innermost_rows(trace.regions, thread, at_ns)
        self._frames = _innermost_rows(trace.frames, thread, at_ns)
        self._steps = _steps(trace, thread, at_ns)
        self._functions = StackSites(trace)
        main = main_thread(trace)
        in_main = np.isin(thread, _threads_of_process(trace, main)) if main >= 0 else np.zeros(len(thread), bool)
        self._main_regions = _innermost_rows(trace.regions, np.where(in_main, main, -1), at_ns)

    def context(self, row: int) -> CallContext:
        """Return the context at the time in ``row``."""
        operators = _row_and_parents(self._trace.operators, self._operators[row])
        regions = _row_and_parents(self._trace.regions, self._regions[row])
        public = [(each, found[1]) for each, name in operators if (found := _OPERATOR.match(name))]
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

    def launched_by_operator(self, work: int) -> bool:
        """Return whether a row of `Trace.gpu` was launched inside an operator."""
        return bool(self._trace.gpu.operator[work] >= 0)

    def thread(self, number: int) -> str:
        """Return the name of the thread, or its number."""
        if number < 0:
            return ""
        thread = self._trace.threads[number]
        return thread.name.strip() or str(thread.thread)


def _row_and_parents(table: Table, row: int) -> list[tuple[int, str]]:
    """Return a row and the rows around it, innermost first, each with its name."""
    found, row = [], int(row)
    while row >= 0:
        found.append((row, table.strings[table.name[row]]))
        row = int(table.parent[row])
    return found


def _innermost_rows(table: Table, thread: Array, at_ns: Array) -> Array:
    """Return the innermost row open on each thread at each time, or -1."""
    found = NestedRanges(table.start_ns, table.end_ns, table.thread).innermost_at(at_ns, thread)
    return np.where(thread >= 0, found, -1)


def _steps(trace: Trace, thread: Array, at_ns: Array) -> Array:
    """Return the number of the step of each thread's process at each time, or -1."""
    process = process_of_threads(trace)
    steps = trace.steps
    found = NestedRanges(steps.start_ns, steps.end_ns, process[steps.thread]).innermost_at(at_ns, process[thread])
    held = (found >= 0) & (thread >= 0)
    result = np.full(len(thread), -1)
    result[held] = steps.number[found[held]]
    return result


def _threads_of_process(trace: Trace, thread: int) -> list[int]:
    """Return the numbers of all threads in the process of ``thread``."""
    process = trace.threads[thread].process
    return [number for number, each in enumerate(trace.threads) if each.process == process]
