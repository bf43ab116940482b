"""Counts the synchronizations of a dry run by step, and ends the program after a number of steps."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

import torch

from ..guard import guard
from ..modules import backward_calls
from ..patch import Patch, leave_no_frame
from ..stepping.optimizer_steps import running
from ..syncs.budget import Budget
from ..syncs.early_stop import ProgramStopper
from ..syncs.events import SyncEvent
from ..syncs.listener import LiveRecorder
from .step_place import Place, StepPlace, place_of

FEATURE = "finding the ends of steps"


class StepRecorder(LiveRecorder):
    """Counts each synchronization in its step, and ends the program after `max_steps`.

    Code after an update, such as logging or the update of another model, belongs to the step of that update until
    the iteration of the loop ends. Without a loop around the update, or if the program calls what makes the update
    again, the step ends with the next call of a module with trainable parameters, or the next backward pass.

    Args:
        path: as in `LiveRecorder`.
        budget: is told where each step ends.
        outermost: the code of the function that calls the program.

    Attributes:
        updates: the number of steps so far; the last of them may not have ended.
        max_steps: the number of steps after which the program ends; None means no limit.
        stopper: ends the program.
        in_step: whether the step of the last update has not ended.
        step: the number of the step, from 1 on; 0 before the first update, None before an optimizer is made.
    """

    def __init__(self, path: Callable[[], tuple[str, ...]], budget: Budget | None, outermost: CodeType) -> None:
        super().__init__(path)
        self.updates = 0
        self.max_steps: int | None = None
        self.stopper = ProgramStopper()
        self.in_step = False
        self._budget = budget
        self._outermost = outermost
        self._thread = 0  # of the last update
        self._begin: Place = ()  # of the last backward pass
        self._marked = False  # whether the program says where steps end
        self._update = StepPlace((), ())
        self._in_unwanted_step = False

    def patches(self) -> Iterator[Patch]:
        """Return what must be patched."""
        yield backward_calls.wrap_backward(self._begin_pass)
        yield Patch(torch.nn.Module, "__call__", self._make_call)

    def on_update(self, marked: bool) -> None:
        """Note the update of a step; with ``marked`` the program itself says that the step ends here."""
        if self._limit_reached:
            self._stop()
        self._end_step()
        self.updates += 1
        self.step = self.updates
        self._thread, self._marked, self.in_step = get_ident(), marked, True
        self._update = StepPlace(place_of(sys._getframe(1), self._outermost), self._begin)

    def restart(self, step: int | None) -> None:
        """Begin at step 0 again, or before the first one."""
        self.updates, self.step, self.in_step = 0, step, False

    def make_event(self, op: str, cause: str, frame: FrameType | None, **more: Any) -> SyncEvent:
        """As in `LiveRecorder`."""
        self._look(frame)
        return super().make_event(op, cause, frame, **more)

    def add(self, event: SyncEvent) -> None:
        """Count ``event``, unless it belongs to a step beyond the limit."""
        if not self._in_unwanted_step:
            super().add(event)

    @property
    def _limit_reached(self) -> bool:
        return self.max_steps is not None and self.updates >= self.max_steps

    @guard.contained(FEATURE)
    def _look(self, frame: FrameType | None, *, begins: bool = False) -> None:
        """End the step if the program has left it; ``begins``: a forward or backward pass begins now."""
        if not self.in_step or (get_ident() != self._thread and running(self._thread)):
            return
        position = self._update.position(place_of(frame, self._outermost))
        if not self._marked and (position == "same iteration" or (position == "same call" and not begins)):
            return
        self._end_step()
        self._in_unwanted_step = self._limit_reached and position != "after the loop"

    def _end_step(self) -> None:
        if self.in_step:
            self.in_step, self.step = False, self.updates + 1
            if self._budget is not None:
                self._budget.next_step()

    def _stop(self) -> None:
        steps = f"{self.max_steps} step{'s' * ((self.max_steps or 0) > 1)}"
        around = "; the rest of the loop around theirs was not checked" * self._update.has_loop_around
        self.stopper.stop(f"stopped after {steps}, the limit of --steps{around}")

    def _begin_pass(self) -> None:
        frame = sys._getframe(1)
        self._begins(frame)
        self._begin = place_of(frame, self._outermost)

    def _begins(self, frame: FrameType) -> None:
        """Note that a forward or backward pass begins, which ends the program if the step is beyond the limit."""
        self._look(frame, begins=True)
        if self._limit_reached and not self.in_step:
            self._stop()

    def _make_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if (self.in_step or self._limit_reached) and any(
                    parameter.requires_grad for parameter in module.parameters()
                ):
                    self._begins(sys._getframe(1))
                return original(module, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise

        return call
