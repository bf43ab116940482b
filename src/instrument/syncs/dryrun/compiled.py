"""Has torch.compile trace functions in a dry run, records its graphs and graph breaks, and runs them uncompiled.

Dynamo traces as without the dry run, with torch's own functions and no mode on: for tensors in the CPU's memory
that have the devices which they pretend to be on. What it makes of the program's code runs under the modes again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...base.compat import tracing
from ...base.early_stop import describe_error
from ...base.guard import guard
from ...base.patch import TRANSPARENT, Patch, suspended
from ..counting.compilation import CompilerEvent, EventKind
from .graphs import Graph, stack_site
from .state import RunState, as_cuda
from .steps import StepRecorder
from .torch_modes import DispatchMode, FunctionMode

FEATURE = "following torch.compile"
_NOT_TRACED = "a compiled function ran eagerly, as a dry run could not trace it: {}"


class Compiler:
    """Follows torch.compile in one run.

    Args:
        state: the run.
        recorder: says in which step the program is.
        patches: what the run replaced of torch, apart from the GPU and from what starts threads and processes:
            those that start while a thread compiles are watched, too.
        gpu: what it replaced for the GPU.

    Attributes:
        events: what torch.compile did, in order.
    """

    def __init__(
        self, state: RunState, recorder: StepRecorder, patches: Sequence[Patch], gpu: Sequence[Patch]
    ) -> None:
        self.events: list[CompilerEvent] = []
        self._state = state
        self._recorder = recorder
        self._patches = patches
        self._gpu = gpu
        self._callbacks: dict[int, _Callback] = {}
        self._lock = threading.RLock()  # what is replaced is restored for all threads
        self._prepared = False
        self._preparing: int | None = None  # the thread that does
        self._unknown = ""  # why Dynamo cannot be followed
        self._own = [
            Patch(owner, name, lambda original: lambda callback: self._callback(original(callback)))
            for owner, name in tracing.stance_applier()
        ]

    def patches(self) -> Sequence[Patch]:
        """Return what must be patched."""
        return self._own

    def clear(self) -> None:
        """Drop all events so far."""
        self.events.clear()

    def restart(self) -> None:
        """Make all events so far part of the first step."""
        self.events[:] = [event.before_steps() for event in self.events]

    def reset(self) -> None:
        """Have torch.compile forget what it compiled in the run, and in it what it compiled before."""
        if self._prepared:
            tracing.reset()

    def _callback(self, callback: Any) -> Any:
        """Return what torch calls for each frame of a compiled function, given what it would call."""
        if callback is None or callback is False or isinstance(callback, _Callback):
            return callback
        if self._preparing == threading.get_ident():
            return callback
        with self._lock:
            if not self._prepared:
                self._unknown = self._prepare()
                self._prepared = True
        if self._unknown:
            self._state.record_not_covered(_NOT_TRACED.format(self._unknown))
            return None
        made = self._callbacks.get(id(callback))
        if made is None:
            made = self._callbacks[id(callback)] = _Callback(self, callback)
        return made

    def _prepare(self) -> str:
        """Have Dynamo fill its tables with torch's own functions, and forget what it compiled.

        Return why it cannot be followed; empty if it can.
        """
        self._preparing = threading.get_ident()
        try:
            with self._state.uncounted(), self._without_modes(), suspended([*self._gpu, *self._patches]):
                return tracing.warm_up()
        finally:
            self._preparing = None

    def convert(self, original: Any, frame: Any, cached: Any, *more: Any) -> Any:
        """Have Dynamo compile a frame; return what it returns, or leave the frame alone."""
        if frame.f_code.co_filename == TRANSPARENT:
            return tracing.left_alone()
        breaks = tracing.graph_breaks()
        before = len(breaks)
        graphs: list[Any] = []
        try:
            with self._lock, self._torch_as_it_is(graphs):
                out = original(frame, cached, *more)
        except tracing.user_errors():
            raise
        except Exception as error:
            self._state.record_not_covered(_NOT_TRACED.format(describe_error(error).partition("\n")[0]))
            return tracing.left_alone()
        with guard.contained(FEATURE):
            self._note(frame, cached is not None and out.guarded_code is not None, len(graphs), breaks[before:])
        return out

    def _note(self, frame: Any, again: bool, graphs: int, breaks: Sequence[Any]) -> None:
        """Record the graphs, graph breaks and recompilation of a frame that Dynamo compiled."""
        recorder = self._recorder
        recorder.look(sys._getframe(1))
        if recorder.in_unwanted_step:
            return

        def add(kind: EventKind, stack: Any, reason: str = "") -> None:
            self.events.append(CompilerEvent(kind, recorder.step, recorder.path(), *stack_site(stack), reason))

        code = frame.f_code
        here = [(code.co_filename, code.co_firstlineno, code.co_name)]
        for _ in range(graphs):
            add("graph", here)
        if again:
            add("recompilation", here, tracing.recompilation_reason(code))
        for each in breaks:
            stack = [(line.filename, line.lineno, line.name) for line in each.user_stack]
            add("graph break", stack, tracing.break_reason(each))

    @contextmanager
    def _torch_as_it_is(self, graphs: list[Any]) -> Iterator[None]:
        """Run the block, in which Dynamo traces, with torch's own functions; collect the graphs that it makes."""

        def run_uncompiled(original: Any) -> Any:
            def compile_graph(output: Any, module: Any, inputs: Any) -> Any:
                graphs.append(module)
                return Graph(module, self._state)

            return compile_graph

        changes = tracing.changes(FakeTensorMode, run_uncompiled, self._pretending())
        with self._state.uncounted(), self._without_modes(), suspended(self._patches), ExitStack() as stack:
            for change in changes:
                Patch(*change).apply_in(stack)
            yield

    @contextmanager
    def _without_modes(self) -> Iterator[None]:
        with tracing.without_modes((FunctionMode,), (DispatchMode, FakeTensorMode)):
            yield

    def _pretending(self) -> dict[str, Callable[[Any], Any]]:
        """Return the replacements with which fake tensors of Dynamo are on the GPU, by the name of a function."""
        tags = self._state.tags

        def from_tensor(original: Any) -> Any:
            def convert(mode: Any, tensor: Any, *args: Any, **options: Any) -> Any:
                made = original(mode, tensor, *args, **options)
                if made is not tensor and (tag := tags.get(tensor)) is not None:
                    tags.put(made, tag)
                return made

            return convert

        def dispatch(original: Any) -> Any:
            def run(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                given = dict(kwargs or {})
                named = given.get("device")
                target = as_cuda(named)
                if target is not None:
                    given["device"] = torch.device("cpu")
                out = original(mode, func, types, args, given)
                device = target if named is not None else tags.first_device(args)
                if device is not None and not getattr(getattr(func, "_schema", None), "is_mutable", True):
                    tags.put(out, device)
                return out

            return run

        def specialize(original: Any) -> Any:
            def properties(value: Any) -> Any:
                known = original.__func__(value)
                device = tags.device(value)
                return known if device is None else {**known, "device": device}

            return staticmethod(properties)

        return {"from_tensor": from_tensor, "dispatch": dispatch, "specialize": specialize}


class _Callback:
    """What torch calls for each frame of compiled functions; passes for the original."""

    def __init__(self, compiler: Compiler, original: Any) -> None:
        self._compiler = compiler
        self._torchdynamo_orig_backend = original

    def __call__(self, *args: Any) -> Any:
        return self._compiler.convert(self._torchdynamo_orig_backend, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torchdynamo_orig_backend, name)
