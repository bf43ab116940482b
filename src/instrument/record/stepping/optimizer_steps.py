"""`OptimizerSteps`: counts the steps of the first optimizer of a program."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...base.compat import autograd
from ...base.guard import guard
from ...base.live_objects import IdentitySet
from ...base.patch import Patch, apply, leave_no_frame, undo
from ..cuda_graphs import GraphFollower, cuda_graphs
from ..modules import parts
from ..modules.optimizers import parameters
from ..regions import dispatch

FEATURE = "following optimizers"
_RANGE = "Optimizer.step#"  # beginning of the range that torch opens around a step
_MIN_PHASE_STEPS = 6  # consecutive steps of the first optimizer in a training phase; the critic of a GAN makes 5
_MIN_SEPARATE_STEPS = 2  # the same, where the backward passes of the next phase do not reach its parameters
MIN_STEPS_ALONE = 50  # steps of another optimizer, or on other threads, without a step of the first

_Gradient: TypeAlias = tuple[Callable[[], Any], int] | None


class _ThreadState(threading.local):
    """Open ranges of optimizer steps on the thread, whether a step is due after them, and updates so far."""

    ranges = 0
    due = False
    count = 0


class OptimizerSteps:
    """Calls ``on_step()`` after each step of the first optimizer that steps, from `follow` to `remove`.

    With ``every`` it is called after the steps of all optimizers that the creating thread calls.

    An optimizer that was created since the last step of the first takes its place at once, as in each fold, trial
    or inner loop. An older one takes its place when it steps twice in a row and either updates some of the same
    parameters, or had that place before, or the first is deleted, or it follows a phase of the first alone, as if
    layers are trained one after the other; otherwise, after 50 steps alone. A phase is six steps in a row, or two
    if the other's backward pass adds nothing to the gradients of the first, as that of a fold and unlike that of a
    generator, which passes through the critic. An optimizer on another thread takes
    its place only after the thread of the first has ended. A step that a `torch.amp.GradScaler` skips counts. A
    step during the backward pass, as with one optimizer for each parameter, ends with that pass and belongs to the
    thread that called the pass. The steps of an optimizer that wraps another count once. A step in the capture of
    a CUDA graph, which runs nothing, counts at each replay.

    A step compiled by torch.compile is not seen, as a hook would become a part of it; ``compiled`` is true then.

    ``on_step`` is called after torch has closed its range around the step, and after the whole backward pass: if a
    recording stops inside these and another one starts there, torch crashes.
    """

    def __init__(self, on_step: Callable[[], None], *, every: bool = False) -> None:
        self._graphs = GraphFollower()
        self._on_step = on_step
        self._every = every
        self._first: weakref.ref[Any] | None = None
        self._first_parameters = IdentitySet()
        self._successors = IdentitySet()  # optimizers created since the last step of the first
        self._predecessors = IdentitySet()  # optimizers that a successor replaced
        self._unrelated_optimizers = IdentitySet()  # optimizers that share no parameter with the first
        self._rival: weakref.ref[Any] | None = None  # the first other optimizer since the last step of the first
        self._rival_steps = 0
        self._first_gradients: list[_Gradient] = []  # after the rival's first step
        self._in_a_row = 0  # steps of the first since another optimizer stepped
        self._has_unreported_step = False  # a step that was not reported
        self._compiled_before = len(_compiled)
        self._state = _ThreadState()
        self._thread = get_ident() if every else None  # the thread whose steps count; None before the first
        self._threads_in_backward: set[int] = set()  # threads whose backward pass is running
        self._threads_with_step: set[int] = set()  # threads in whose backward pass an optimizer stepped
        self._handle: Any = None
        self._patches: list[Patch] = []

    def follow(self) -> None:
        """Start counting; after an interrupt at any point, `remove` undoes it.

        An interrupt inside torch's registration leaves a hook that does nothing.
        """
        try:
            self._graphs.follow()
            self._handle = register_optimizer_step_post_hook(self._after_step)
            apply(self._new_patches(), self._patches)
        except BaseException:
            self.remove()
            raise
        if self._on_step is _nothing:  # removed meanwhile, by a signal handler or another thread
            self.remove()

    def add_new(self, optimizer: Any) -> None:
        """Note that an optimizer was created just now."""
        self._successors.add(optimizer)

    def stay(self, thread: int | None) -> None:
        """Let the first steps that count be those of ``thread``, which records a window; None for any thread."""
        if self._first is None:
            self._thread = thread

    @property
    def compiled(self) -> bool:
        """Whether the step of an optimizer was compiled since this object was created."""
        return len(_compiled) > self._compiled_before

    @property
    def parameters(self) -> list[Any]:
        """The parameters that the first optimizer updates; empty if none has stepped."""
        first = self._first() if self._first is not None else None
        return parameters(first) if first else []

    def remove(self) -> None:
        """Stop counting."""
        self._on_step = _nothing
        try:
            if self._handle is not None:
                self._handle.remove()
            self._graphs.remove()
        finally:
            undo(self._patches)

    def _new_patches(self) -> Iterator[Patch]:
        yield Patch(torch.amp.GradScaler, "step", self._make_scaler_step)
        yield parts.wrap_backward(self._begin_pass, self._threads_in_backward.discard, self._end_pass)
        yield from parts.contexts(torch.autograd.profiler.record_function, self._range, parts.Switch())

    def _range(self, context: Any) -> dispatch.Token | None:
        if not context.name.startswith(_RANGE):
            return None
        self._state.ranges += 1
        return self._on_range_closed, None

    @guard.contained(FEATURE)
    def _on_range_closed(self, _: None) -> None:
        state = self._state
        state.ranges -= 1
        if state.due and not state.ranges:
            state.due = False
            self._report()

    def _report(self) -> None:
        if self._state.ranges:
            self._state.due = True
            return
        if self._has_unreported_step:
            self._has_unreported_step = False
            self._on_step()
        self._on_step()

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        try:
            if dispatch.tracing():
                _note_compiled()
                return
            if cuda_graphs.captures and self._graphs.defer(self._on_replay, weakref.ref(optimizer)):
                return
            thread = self._calling_thread()
            if thread is None or not self._counts(optimizer, thread):
                return
            if autograd.in_backward():
                self._threads_with_step.add(thread)
            else:
                self._state.count += 1
                self._report()
        except Exception as error:
            guard.failed(FEATURE, error)

    def _on_replay(self, reference: weakref.ref[Any]) -> None:
        """Count the replay of an update; of a deleted optimizer only if it was the first one."""
        optimizer = reference()
        if optimizer is not None:
            self._after_step(optimizer)
        elif reference is self._first:
            self._report()

    def _begin_pass(self) -> int | None:
        if autograd.in_backward():
            return None
        self._threads_in_backward.add(get_ident())
        return get_ident()

    @guard.contained(FEATURE)
    def _end_pass(self) -> None:
        if get_ident() in self._threads_with_step:
            self._threads_with_step.discard(get_ident())
            self._report()

    def _calling_thread(self) -> int | None:
        """Return the thread whose update this is; None if torch does not show it.

        In a backward pass the update may run on a thread of autograd, which serves the passes of all threads.
        """
        current = get_ident()
        if current in self._threads_in_backward or not autograd.in_backward():
            return current
        passes = list(self._threads_in_backward)
        if len(passes) == 1:
            return passes[0]
        return self._thread if self._thread in passes else None if passes else current

    def _counts(self, optimizer: Any, thread: int) -> bool:
        if not self._every:
            return self._is_first(optimizer, thread)
        if thread != self._thread:
            return False
        if self._first is None:
            self._first = weakref.ref(optimizer)
        return True

    def _is_first(self, optimizer: Any, thread: int) -> bool:
        first = self._first() if self._first is not None else None
        if first is not optimizer and thread != self._thread and running(self._thread):
            return False
        self._thread = thread
        if first is optimizer:
            self._in_a_row = 1 if self._rival is not None else self._in_a_row + 1
            self._rival = None
            self._successors.clear()
        elif self._first is None or optimizer in self._successors:
            if first is not None:
                self._predecessors.add(first)
            self._set_first(optimizer, 1)
        elif self._takes_over(first, optimizer):
            self._set_first(optimizer, self._rival_steps)
        else:
            return False
        return True

    def _set_first(self, optimizer: Any, in_a_row: int) -> None:
        self._first, self._rival, self._in_a_row = weakref.ref(optimizer), None, in_a_row
        self._first_parameters = IdentitySet(parameters(optimizer))
        self._unrelated_optimizers = IdentitySet()
        self._successors.clear()

    def _takes_over(self, first: Any, optimizer: Any) -> bool:
        rival = self._rival() if self._rival is not None else None
        if rival is None:
            rival, self._rival, self._rival_steps = optimizer, weakref.ref(optimizer), 0
            if optimizer not in self._unrelated_optimizers and not any(
                parameter in self._first_parameters for parameter in parameters(optimizer)
            ):
                self._unrelated_optimizers.add(optimizer)
            if first is not None and self._in_a_row >= _MIN_SEPARATE_STEPS:
                self._first_gradients = _gradients(first)
        if rival is not optimizer:
            return False
        self._rival_steps += 1
        follows = (
            first is None
            or optimizer not in self._unrelated_optimizers
            or optimizer in self._predecessors
            or self._in_a_row >= _MIN_PHASE_STEPS
            or (self._in_a_row >= _MIN_SEPARATE_STEPS and not _changed(self._first_gradients, first))
        )
        self._has_unreported_step = follows and self._rival_steps > 1  # its previous step
        return self._has_unreported_step or self._rival_steps > MIN_STEPS_ALONE

    def _make_scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, /, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._state.count
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            self._after_scaler_step(optimizer, before)
            return result

        return step

    @guard.contained(FEATURE)
    def _after_scaler_step(self, optimizer: Any, before: int) -> None:
        if self._state.count > before or cuda_graphs.graph is not None:
            return
        if self._counts(optimizer, get_ident()):
            self._state.count += 1
            self._report()


def _gradients(optimizer: Any) -> list[_Gradient]:
    """Return what `_changed` compares; no reference, which would keep the memory of gradients that are dropped."""
    gradients = [parameter.grad for parameter in parameters(optimizer)]
    return [None if gradient is None else (weakref.ref(gradient), gradient._version) for gradient in gradients]


def _changed(before: list[_Gradient], optimizer: Any) -> bool:
    """Return whether a backward pass has added to the gradients of the parameters of ``optimizer`` since."""
    for parameter, old in zip(parameters(optimizer), before, strict=False):
        gradient = parameter.grad
        if gradient is not None and (old is None or old[0]() is not gradient or old[1] != gradient._version):
            return True
    return False


def running(thread: int | None) -> bool:
    """Return whether ``thread`` is the number of a running thread."""
    return any(each.ident == thread for each in threading.enumerate()) if thread is not None else False


def _nothing() -> None:
    pass


_compiled: list[bool] = []


def _note_compiled() -> None:
    """Note that torch.compile traces the step of an optimizer, without adding anything to the graph."""
    _compiled.append(True)


_note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
