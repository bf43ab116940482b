"""`StepFollower`: counts the steps of a program by the strongest sign of steps that it shows."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, Protocol

import torch

from ...base.compat import autograd, training
from ...base.guard import guard
from ...base.imports import ImportHook
from ...base.live_objects import IdentitySet
from ...base.patch import Change, Patch, apply, then, undo
from ..cuda_graphs import GraphedCallables, GraphFollower
from ..modules import parts
from ..modules.optimizers import live_optimizers, share_parameters
from ..modules.parts import patcher
from ..modules.uncompiled import skip_package
from ..regions import dispatch
from .compiled_code import DeferredCalls, without_compiler
from .explicit_steps import SIGNS, FunctionCallSteps, check_step_on, program_steps
from .optimizer_steps import FEATURE, MIN_STEPS_ALONE, OptimizerSteps, running
from .outermost_model import OutermostModel

# Number of model calls without a backward pass, or replays of an unknown graph, that one step may have
_MAX_EVENTS_IN_STEP = 100
_BEGIN_STEP = (parts.DATA, "Optimizer.zero_grad#", "Optimizer.step#")


class StepSource(Protocol):
    """Reports events that may end a step, from `follow` to `remove`."""

    def follow(self) -> None:
        """Start reporting."""

    def remove(self) -> None:
        """Stop reporting, and restore what was replaced."""


class StepFollower:
    """Calls ``on_step()`` at the end of each step, from `follow` to `remove`.

    In order of preference, a step ends where the program itself marks it (`instrument.steps`, ``prof.step()``);
    after the step of the first optimizer; if no optimizer was created, after each backward pass; before the first
    of those, after each call of `torch.autograd.grad` that creates no graph; and before the first of those, after
    each call of the outermost model that no backward pass can follow. Backward passes
    and calls count on one thread, the thread of the first of them, until that thread has ended or lets 50 of other
    threads pass. They do not count while another thread counts a step. A replay of a CUDA
    graph counts as what was captured, unless it happens inside a call or pass of the same kind, which counts
    itself. So a call of a callable from `make_graphed_callables` is one step, and its warm-up calls do not count.
    A graph captured before this object was created may contain steps: if there is no other sign, its replays are
    steps once there were 100 of them.

    Args:
        on_step: called at the end of each step.
        on_restart: called when a stronger sign appears, or an optimizer is created after calls of a model: all
            steps that ended so far are a part of step 0, which ends with the next call of ``on_step``. `by` is
            None if no step has ended by the new sign.
        step_on: "optimizer", "backward", "grad" or "forward" to count only these; or a function, whose calls are
            steps.
        weakest: the weakest of `SIGNS` that counts.
        on_begin: called once, when step 0 begins: when a DataLoader loads a batch, gradients are zeroed, a model
            is called, a backward pass starts or, as with a closure, an optimizer's step.
        on_missed_steps: called with N in place of ``on_step`` if the first N steps ended before it was known what
            a step is, the last of them now; without it, ``on_step`` is called N times.
        on_optimizer_made: called with each optimizer after its creation.
        on_model_found: called with the outermost model before its first call.
        on_batch: called with the iterator of a DataLoader before it loads a batch.
        is_recording: returns whether a window records: steps then stay on their thread, which alone can end it.

    Attributes:
        by: the sign that ended the last step: one of `SIGNS`, "replay", or the function; None before the first.
    """

    def __init__(
        self,
        on_step: Callable[[], None],
        on_restart: Callable[[], None],
        step_on: str | None = None,
        *,
        weakest: str = SIGNS[0],
        on_begin: Callable[[], None] | None = None,
        on_missed_steps: Callable[[int], None] | None = None,
        on_optimizer_made: Callable[[Any], None] | None = None,
        on_model_found: Callable[[Any], None] | None = None,
        on_batch: Callable[[Any], None] | None = None,
        is_recording: Callable[[], bool] = lambda: False,
    ) -> None:
        check_step_on(step_on)
        self.by: str | None = None
        self._on_step = on_step
        self._on_restart = on_restart
        self._step_on = step_on
        self._weakest = SIGNS.index(weakest)
        self._on_begin = on_begin
        self._on_missed_steps = on_missed_steps
        self._on_optimizer_made = on_optimizer_made
        self._on_model_found = on_model_found
        self._on_batch = on_batch
        self._is_recording = is_recording
        self._optimizers = IdentitySet()
        self._earlier_optimizers = IdentitySet()  # created before, perhaps for another model
        self._searched_earlier = False  # for optimizers created before
        self._thread: int | None = None  # of the last step, or of step 0 while that is recorded
        self._passed_over = 0  # signs on other threads since then
        self._counting = threading.RLock()  # never waited for
        self._uncounted_passes = 0  # backward passes not counted so far
        self._uncounted_calls = 0  # calls of the model not counted so far
        self._replays: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of unknown graphs
        self._replayed_graph: weakref.ref[Any] | None = None  # the unknown graph whose replays are steps
        self._patches: list[Change] = []
        self._graphs = GraphFollower(self._on_unknown_replay)
        self._graph_making = making = GraphedCallables()
        self._steps: OptimizerSteps | None = None
        if step_on in (None, "optimizer"):
            self._steps = OptimizerSteps(lambda: self._end_step("optimizer"))
        self._model: OutermostModel | None = None
        if step_on != "optimizer" or on_begin is not None:
            self._model = OutermostModel(self._follow_model, self._end_model_call, lambda: making.active)
        self._function: FunctionCallSteps | None = None
        if step_on not in (None, *SIGNS):
            self._function = FunctionCallSteps(step_on, lambda: self._end_function_call(step_on))
        self._deferred = DeferredCalls()
        sources = (self._graphs, making, self._steps, self._model, self._function, self._deferred)
        self._sources: list[StepSource] = [source for source in sources if source is not None]

    def follow(self) -> None:
        """Start counting; after an interrupt at any point, `remove` undoes it."""
        try:
            for source in self._sources:
                source.follow()
            if self._step_on is None:
                program_steps.listen(self._end_program_step)
            apply(self._new_patches(), self._patches)
            apply([ImportHook("torch._dynamo", self._compiler_imported)], self._patches)
        except BaseException:
            self.remove()
            raise
        if self._on_step is _nothing:  # removed meanwhile, by a signal handler or another thread
            self.remove()

    @property
    def compiled(self) -> bool:
        """Whether the step of an optimizer was compiled, so that it is not seen."""
        return self._steps is not None and self._steps.compiled

    @property
    def model(self) -> Any:
        """The outermost model, if one was called before an optimizer was created; else None."""
        return self._model.model if self._model is not None else None

    @property
    def explanation(self) -> str | None:
        """One sentence on what counts as a step; None if it is an optimizer step or marked by the program."""
        model = self.model
        shown = "the model" if model is None else type(model).__name__
        reasons = {
            "backward": "no optimizer step was seen, so each backward pass",
            "grad": "no optimizer step and no backward() was seen, so each call of torch.autograd.grad",
            "forward": f"no optimizer step and no backward pass was seen, so each call of {shown}",
        }
        if self.by in reasons and self._step_on is None:
            return f"{reasons[self.by]} counts as a step; use --step-on to choose something else"
        if self.by == "replay":
            return (
                "no step was seen except replays of a CUDA graph that was captured before steps were counted, so "
                "each replay counts as a step; call step() after each step, or use --step-on FUNCTION"
            )
        return None

    @property
    def function_missing(self) -> bool:
        """Whether the function whose calls are steps was not found."""
        return self._function is not None and not self._function.found

    @property
    def optimizer_never_stepped(self) -> bool:
        """Whether backward passes were not counted because of an optimizer that has not stepped yet."""
        return self._uncounted_passes > 0 and self.by is None

    @guard.contained(FEATURE)
    def remove(self) -> None:
        """Stop counting, and restore everything that was replaced."""
        program_steps.remove(self._end_program_step)
        self._on_step = self._on_restart = _nothing
        self._on_missed_steps = None
        for source in self._sources:
            source.remove()
        undo(self._patches)

    def _new_patches(self) -> Iterator[Patch]:
        yield parts.wrap_backward(self._begin_step_0, then=self._end_pass)
        yield parts.wrap_grad(self._begin_step_0, self._end_grad)
        yield Patch(torch.optim.Optimizer, "__init__", lambda original: then(original, self._add_optimizer))
        yield from parts.contexts(torch.autograd.profiler.record_function, self._range, parts.Switch())

    @guard.contained(FEATURE)
    def _compiler_imported(self, _: Any) -> None:
        skip_package()

    # Called by the sources

    @without_compiler
    def _end_step(self, by: str, count: int = 1) -> None:
        self._deferred.call_after_compiled_code(functools.partial(self._count_steps, by, count))

    def _count_steps(self, by: str, count: int) -> None:
        if by in SIGNS and SIGNS.index(by) < self._weakest:
            return
        if by in ("optimizer", "program"):  # `OptimizerSteps` distinguishes threads
            self._report(by, count)
        elif self._counting.acquire(blocking=False):
            try:
                if self.by not in (None, by) or self._counts_here():
                    self._thread, self._passed_over = get_ident(), 0
                    self._report(by, count)
            finally:
                self._counting.release()

    def _counts_here(self) -> bool:
        """Return whether backward passes and calls on this thread are steps."""
        if get_ident() == self._thread or not running(self._thread):
            return True
        self._passed_over += 1
        return self._passed_over > MIN_STEPS_ALONE and not self._is_recording()

    def _report(self, by: str, count: int) -> None:
        if self.by != by:
            if self.by in SIGNS and by in SIGNS and SIGNS.index(by) < SIGNS.index(self.by):
                return
            before, self.by = self.by, by
            if self._model is not None and by != "forward":
                self._model.remove()
            if before is not None:
                self._on_restart()
        if count > 1 and self._on_missed_steps is not None:
            self._on_missed_steps(count)
        else:
            for _ in range(count):
                self._on_step()

    def _end_program_step(self) -> None:
        self._end_step("program")

    def _defer_or_skip(self, replayed: Callable[..., None], *args: Any) -> bool:
        """Defer the call to the replays of the graph that is being captured.

        Returns:
            Whether the call does not count as a step now.
        """
        return self._graphs.defer(replayed, *args) or self._graph_making.active

    @without_compiler
    def _end_function_call(self, function: str) -> None:
        if not self._defer_or_skip(self._on_function_replay, function):
            self._end_step(function)

    def _on_function_replay(self, function: str) -> None:
        if self._function is not None and not self._function.is_running:
            self._end_step(function)

    def _on_unknown_replay(self, graph: Any) -> None:
        """Count a replay of a graph whose content is unknown."""
        if self._step_on is not None or self.by not in (None, "replay"):
            return
        if (
            self.by == "replay"
            and self._replayed_graph is not None
            and self._replayed_graph() not in (None, graph)
        ):
            return  # another part of the same step
        replays = self._replays[graph] = self._replays.get(graph, 0) + 1
        if replays > _MAX_EVENTS_IN_STEP:
            self._replayed_graph = weakref.ref(graph)
            self._end_step("replay", replays if self.by is None else 1)

    @guard.contained(FEATURE)
    @without_compiler
    def _begin_step_0(self, *, trains: bool = True) -> None:
        """Begin step 0, unless it has begun; ``trains`` tells whether this thread does more than load batches."""
        if self._function is not None:
            self._function.search()
        if self._on_begin is not None:
            on_begin, self._on_begin = self._on_begin, None
            if not len(self._optimizers):
                self._find_earlier()  # before step 0 is recorded
            self._leave_model()
            steps = self._steps if trains else None
            if steps is not None:
                steps.stay(get_ident())  # a window opens for 0.3 s, in which other threads train
            with guard.contained("beginning step 0"):
                on_begin()
            if steps is not None and not self._is_recording():
                steps.stay(None)

    def _range(self, context: Any) -> dispatch.Token | None:
        if not context.name.startswith(_BEGIN_STEP):
            return None
        before, loads = patcher.parts, context.name.startswith(parts.DATA)
        if loads and self._on_batch is not None:
            with guard.contained(FEATURE):
                self._on_batch(training.caller_in(sys._getframe(2), "torch.utils.data.dataloader"))
        self._begin_step_0(trains=not loads)
        return patcher.begin_range(context, before)

    @guard.contained(FEATURE)
    @without_compiler
    def _add_optimizer(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self._optimizers.add(optimizer)
        if self._steps is not None:
            self._steps.add_new(optimizer)
        if self._function is not None:
            self._function.search()
        self._leave_model()
        starts_over = self._step_on is None and self.by == "forward"
        if starts_over:  # the calls were a test or an evaluation; the updates will be the steps
            self.by = None
        if self._on_optimizer_made is not None:
            self._on_optimizer_made(optimizer)
        if starts_over:
            self._deferred.call_after_compiled_code(self._start_over)

    def _start_over(self) -> None:
        if self.by is None:
            self._on_restart()

    def _leave_model(self) -> None:
        """Stop following the model if its calls will not be steps."""
        if self._model is not None and self._on_begin is None and self._step_on is None and len(self._optimizers):
            self._model.remove()

    def _find_earlier(self) -> None:
        """Find the optimizers that were created before `follow`, or without their constructor."""
        if not self._searched_earlier:
            self._searched_earlier = True
            for optimizer in live_optimizers():
                self._earlier_optimizers.add(optimizer)

    def _expects_optimizer(self) -> bool:
        """Return whether an optimizer exists, so that its steps are expected."""
        if not len(self._optimizers):
            self._find_earlier()
            model = self.model
            for optimizer in self._earlier_optimizers:
                if model is None or share_parameters(optimizer, model):
                    self._optimizers.add(optimizer)
            self._earlier_optimizers.clear()
        return len(self._optimizers) > 0 and not self.compiled

    @guard.contained(FEATURE)
    @without_compiler
    def _end_pass(self) -> None:
        """Count the end of a backward pass."""
        if self._defer_or_skip(self._outside_backward, self._end_pass):
            return
        if self._step_on == "backward":
            self._end_step("backward")
        elif self._step_on is None and self.by not in ("optimizer", "program"):
            if self._expects_optimizer():
                self._uncounted_passes += 1
                return
            missed = self._uncounted_passes if self.by is None else 0
            self._end_step("backward", missed + 1)

    def _outside_backward(self, replayed: Callable[[], None]) -> None:
        if not autograd.in_backward():
            replayed()

    @guard.contained(FEATURE)
    @without_compiler
    def _end_grad(self) -> None:
        """Count a call of `torch.autograd.grad`."""
        if self._defer_or_skip(self._outside_backward, self._end_grad):
            return
        may_count = self._step_on is None and self.by in (None, "forward", "grad")
        if self._step_on == "grad" or (may_count and not self._expects_optimizer()):
            self._end_step("grad")

    def _follow_model(self, model: Any) -> None:
        if self._on_model_found is not None:
            self._on_model_found(model)
        self._begin_step_0()
        if self._is_recording():
            self._thread = get_ident()  # a call of another thread may end first
        self._leave_model()

    def _end_model_call(self, model: Any) -> None:
        if model is not self.model or self._defer_or_skip(self._on_model_replay):
            return
        if self._step_on == "forward":
            self._end_step("forward")
        elif self._step_on is None and self.by in (None, "forward") and not self._expects_optimizer():
            missed = 0
            if model.training and torch.is_grad_enabled():
                self._uncounted_calls += 1
                if self._uncounted_calls <= _MAX_EVENTS_IN_STEP:
                    return
                missed = self._uncounted_calls - 1 if self.by is None else 0
            self._end_step("forward", missed + 1)

    def _on_model_replay(self) -> None:
        if self._model is not None and not self._model.running and self.model is not None:
            self._end_model_call(self.model)


def _nothing() -> None:
    pass
