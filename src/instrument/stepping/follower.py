"""`StepFollower`: counts the steps of a program by the strongest sign of steps that it shows."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, Protocol

from ..compat import autograd
from ..cuda_graphs import GraphFollower
from ..guard import guard
from ..identity import IdentitySet
from ..imports import ImportHook
from ..modules import backward_calls, parts
from ..modules.optimizers import live_optimizers, share_parameters
from ..patch import Change, Patch, apply, leave_no_frame, undo
from .compiled_code import DeferredCalls, skip_package, without_compiler
from .function_calls import SIGNS, FunctionCallSteps, check_step_on
from .graphed_callables import GraphedCallables
from .optimizer_steps import FEATURE, OptimizerSteps, running
from .outermost_model import OutermostModel
from .program_steps import program_steps

# Number of model calls without a backward pass, or replays of an unknown graph, that one step may have
_MOST_IN_STEP = 100
_BEGIN_STEP = (parts.DATA, "Optimizer.zero_grad#", "Optimizer.step#")


class StepSource(Protocol):
    """Reports events that may end a step, from `follow` to `remove`."""

    def follow(self) -> None:
        """Start reporting."""

    def remove(self) -> None:
        """Stop reporting, and restore what was replaced."""


class StepFollower:
    """Calls ``stepped()`` at the end of each step, from `follow` to `remove`.

    In order of preference, a step ends where the program itself marks it (`instrument.steps`, ``prof.step()``);
    after the step of the first optimizer; if no optimizer was created, after each backward pass; and before the
    first backward pass, after each call of the outermost model that no backward pass can follow. Backward passes
    and calls count on one thread, the thread of the first of them, until that thread has ended. A replay of a CUDA
    graph counts as what was captured, unless it happens inside a call or pass of the same kind, which counts
    itself. So a call of a callable from `make_graphed_callables` is one step, and its warm-up calls do not count.
    A graph captured before this object was created may contain steps: if there is no other sign, its replays are
    steps once there were 100 of them.

    Args:
        stepped: called at the end of each step.
        restarted: called when a stronger sign appears: all steps that ended so far are a part of step 0, which
            ends with the next call of ``stepped``.
        step_on: "optimizer", "backward" or "forward" to count only these; or a function, whose calls are steps.
        weakest: the weakest of `SIGNS` that counts.
        begun: called once, when step 0 begins: when a DataLoader loads a batch, gradients are zeroed, a model is
            called, a backward pass starts or, as with a closure, an optimizer's step.
        missed: called with N in place of ``stepped`` if the first N steps ended before it was known what a step
            is, the last of them now; without it, ``stepped`` is called N times.
        made: called with each optimizer after its creation.
        found: called with the outermost model before its first call.

    Attributes:
        by: the sign that ended the last step: one of `SIGNS`, "replay", or the function; None before the first.
    """

    def __init__(
        self,
        stepped: Callable[[], None],
        restarted: Callable[[], None],
        step_on: str | None = None,
        *,
        weakest: str = SIGNS[0],
        begun: Callable[[], None] | None = None,
        missed: Callable[[int], None] | None = None,
        made: Callable[[Any], None] | None = None,
        found: Callable[[Any], None] | None = None,
    ) -> None:
        check_step_on(step_on)
        self.by: str | None = None
        self._stepped = stepped
        self._restarted = restarted
        self._step_on = step_on
        self._weakest = SIGNS.index(weakest)
        self._begun = begun
        self._missed = missed
        self._made = made
        self._found = found
        self._optimizers = IdentitySet()
        self._earlier = IdentitySet()  # created before, perhaps for another model
        self._searched_earlier = False  # for optimizers created before
        self._thread: int | None = None  # of the last step
        self._passes = 0  # backward passes not counted so far
        self._calls = 0  # calls of the model not counted so far
        self._replays: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of unknown graphs
        self._replayed: weakref.ref[Any] | None = None  # the unknown graph whose replays are steps
        self._patches: list[Change] = []
        self._graphs = GraphFollower(self._unknown_replayed)
        self._graph_making = making = GraphedCallables()
        self._steps: OptimizerSteps | None = None
        if step_on in (None, "optimizer"):
            self._steps = OptimizerSteps(lambda: self._ended("optimizer"))
        self._model: OutermostModel | None = None
        if step_on != "optimizer" or begun is not None:
            self._model = OutermostModel(self._model_found, self._model_called, lambda: making.active)
        self._function: FunctionCallSteps | None = None
        if step_on not in (None, *SIGNS):
            self._function = FunctionCallSteps(step_on, lambda: self._function_called(step_on))
        self._deferred = DeferredCalls()
        sources = (self._graphs, making, self._steps, self._model, self._function, self._deferred)
        self._sources: list[StepSource] = [source for source in sources if source is not None]

    def follow(self) -> None:
        """Start counting; after an interrupt at any point, `remove` undoes it."""
        try:
            for source in self._sources:
                source.follow()
            if self._step_on is None:
                program_steps.listen(self._program)
            apply(self._patched(), self._patches)
            apply([ImportHook("torch._dynamo", self._compiler_imported)], self._patches)
        except BaseException:
            self.remove()
            raise
        if self._stepped is _nothing:  # removed meanwhile, by a signal handler or another thread
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
        if self.by == "backward" and self._step_on is None:
            return (
                "no optimizer step was seen, so each backward pass counts as a step; "
                "use --step-on to choose something else"
            )
        if self.by == "forward" and self._step_on is None:
            return (
                f"no optimizer step and no backward pass was seen, so each call of {_name(self.model)} counts "
                "as a step; use --step-on to choose something else"
            )
        if self.by == "replay":
            return (
                "no step was seen except replays of a CUDA graph that was captured before steps were counted, so "
                "each replay counts as a step; call step() after each step, or use --step-on FUNCTION"
            )
        return None

    @property
    def missing(self) -> bool:
        """Whether the function whose calls are steps was not found."""
        return self._function is not None and not self._function.found

    @property
    def waiting(self) -> bool:
        """Whether backward passes were not counted because of an optimizer that has not stepped yet."""
        return self._passes > 0 and self.by is None

    @guard.contained(FEATURE)
    def remove(self) -> None:
        """Stop counting, and restore everything that was replaced."""
        program_steps.remove(self._program)
        self._stepped = self._restarted = _nothing
        self._missed = None
        for source in self._sources:
            source.remove()
        undo(self._patches)

    def _patched(self) -> Iterator[Patch]:
        import torch

        yield backward_calls.wrap_backward(self._begins, then=self._passed)
        yield Patch(torch.optim.Optimizer, "__init__", self._making)
        yield from parts.contexts(torch.autograd.profiler.record_function, self._range, parts.Switch())

    @guard.contained(FEATURE)
    def _compiler_imported(self, _: Any) -> None:
        skip_package()

    # Called by the sources

    @without_compiler
    def _ended(self, by: str, count: int = 1) -> None:
        self._deferred.after(functools.partial(self._step_ended, by, count))

    def _step_ended(self, by: str, count: int) -> None:
        if by in SIGNS and SIGNS.index(by) < self._weakest:
            return
        if by not in ("optimizer", "program"):  # `OptimizerSteps` distinguishes optimizers
            if by == self.by and get_ident() != self._thread and running(self._thread):
                return
            self._thread = get_ident()
        if self.by != by:
            if self.by in SIGNS and by in SIGNS and SIGNS.index(by) < SIGNS.index(self.by):
                return
            before, self.by = self.by, by
            if self._model is not None and by != "forward":
                self._model.remove()
            if before is not None:
                self._restarted()
        if count > 1 and self._missed is not None:
            self._missed(count)
        else:
            for _ in range(count):
                self._stepped()

    def _program(self) -> None:
        self._ended("program")

    def _defer_or_skip(self, replayed: Callable[..., None], *args: Any) -> bool:
        """Defer the call to the replays of the graph that is being captured.

        Returns:
            Whether the call does not count as a step now.
        """
        return self._graphs.defer(replayed, *args) or self._graph_making.active

    @without_compiler
    def _function_called(self, function: str) -> None:
        if not self._defer_or_skip(self._function_replayed, function):
            self._ended(function)

    def _function_replayed(self, function: str) -> None:
        if self._function is not None and not self._function.inside:
            self._ended(function)

    def _unknown_replayed(self, graph: Any) -> None:
        """Count a replay of a graph whose content is unknown."""
        if self._step_on is not None or self.by not in (None, "replay"):
            return
        if self.by == "replay" and self._replayed is not None and self._replayed() not in (None, graph):
            return  # another part of the same step
        replays = self._replays[graph] = self._replays.get(graph, 0) + 1
        if replays > _MOST_IN_STEP:
            self._replayed = weakref.ref(graph)
            self._ended("replay", replays if self.by is None else 1)

    @guard.contained(FEATURE)
    @without_compiler
    def _begins(self) -> None:
        """Begin step 0, unless it has begun."""
        if self._function is not None:
            self._function.search()
        if self._begun is not None:
            begun, self._begun = self._begun, None
            if not len(self._optimizers):
                self._find_earlier()  # before step 0 is recorded
            self._leave_model()
            with guard.contained("beginning step 0"):
                begun()

    def _range(self, context: Any) -> None:
        if context.name.startswith(_BEGIN_STEP):
            self._begins()

    def _making(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(optimizer, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            with guard.contained(FEATURE):
                self._optimizer_made(optimizer)

        return init

    @without_compiler
    def _optimizer_made(self, optimizer: Any) -> None:
        self._optimizers.add(optimizer)
        if self._function is not None:
            self._function.search()
        self._leave_model()
        if self._made is not None:
            self._made(optimizer)

    def _leave_model(self) -> None:
        """Stop following the model if its calls will not be steps."""
        if self._model is not None and self._begun is None and self._step_on is None and len(self._optimizers):
            self._model.remove()

    def _find_earlier(self) -> None:
        """Find the optimizers that were created before `follow`, or without their constructor."""
        if not self._searched_earlier:
            self._searched_earlier = True
            for optimizer in live_optimizers():
                self._earlier.add(optimizer)

    def _expects_optimizer(self) -> bool:
        """Return whether an optimizer exists, so that its steps are expected."""
        if not len(self._optimizers):
            self._find_earlier()
            model = self.model
            for optimizer in self._earlier:
                if model is None or share_parameters(optimizer, model):
                    self._optimizers.add(optimizer)
            self._earlier.clear()
        return len(self._optimizers) > 0 and not self.compiled

    @guard.contained(FEATURE)
    @without_compiler
    def _passed(self) -> None:
        """Count the end of a backward pass."""
        if self._defer_or_skip(self._pass_replayed):
            return
        if self._step_on == "backward":
            self._ended("backward")
        elif self._step_on is None and self.by not in ("optimizer", "program"):
            if self._expects_optimizer():
                self._passes += 1
                return
            missed = self._passes if self.by is None else 0
            self._ended("backward", missed + 1)

    def _pass_replayed(self) -> None:
        if not autograd.in_backward():
            self._passed()

    def _model_found(self, model: Any) -> None:
        if self._found is not None:
            self._found(model)
        self._begins()
        self._leave_model()

    def _model_called(self, model: Any) -> None:
        if model is not self.model or self._defer_or_skip(self._model_replayed):
            return
        if self._step_on == "forward":
            self._ended("forward")
        elif self._step_on is None and self.by in (None, "forward") and not self._expects_optimizer():
            missed = 0
            if model.training and _grad_enabled():
                self._calls += 1
                if self._calls <= _MOST_IN_STEP:
                    return
                missed = self._calls - 1 if self.by is None else 0
            self._ended("forward", missed + 1)

    def _model_replayed(self) -> None:
        if self._model is not None and not self._model.running and self.model is not None:
            self._model_called(self.model)


def _name(model: Any) -> str:
    return "the model" if model is None else type(model).__name__


def _grad_enabled() -> bool:
    import torch

    return bool(torch.is_grad_enabled())


def _nothing() -> None:
    pass
