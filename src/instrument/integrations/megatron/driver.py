"""`Driver`: drives a loop by what it is told of Megatron."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...guard import guard
from ...modules.parts import Switch
from ...patch import Change
from ...stepping.optimizer_steps import OptimizerSteps
from ..loop import Loop
from .calls import FEATURE
from .pushes import Pushes


class Driver:
    """Steps are told by the first of these that there is.

    Iterations of ``megatron.training``; `step`; the steps of megatron.core's optimizers; those of the first
    optimizer of torch's.
    """

    def __init__(self, loop: Loop, first_step: int) -> None:
        self.loop = loop
        self.switch = Switch()
        self.pushes = Pushes()
        self.changes: list[Change] = []
        self.updating = False  # a step of megatron.core's optimizer runs
        self.training = False  # ``megatron.training`` runs its loop
        self._first_step = first_step
        self._steps: OptimizerSteps | None = None
        self._teller: str | None = None  # who tells the steps
        self._number: int | None = None  # of the last iteration
        self._inside = False  # one runs

    @guard.contained(FEATURE)
    def step(self) -> None:
        """Tell that a step of your own loop ended, where no optimizer of torch's or Megatron's says so."""
        if not self.switch.on or self._teller == "iteration":
            return
        counted = self._teller is not None and self._teller != "step"  # the optimizer's step was this one's
        self._teller = "step"
        if not counted:
            self._advance()

    @guard.contained(FEATURE)
    def end(self) -> None:
        """End the recording: training is over."""
        atexit.unregister(self.end)
        self.pushes.close(0)
        self.loop.stop(complete=self._number is not None and not self._inside)

    def forward(self, model: Any) -> None:
        """A micro-batch begins: the first one of a training begins the loop."""
        told = self.training or self._teller == "iteration"  # by iterations, whose number is not known here
        if not told and torch.is_grad_enabled():
            self._start([model], self._first_step)
        if self.loop.running:
            self.loop.name(_inner(model))

    @guard.contained(FEATURE)
    def updated(self, by: str = "optimizer") -> None:
        """A step of an optimizer ended."""
        if not self.switch.on or self._teller in ("iteration", "step"):
            return
        if by == "torch" and (self.updating or self._teller == "optimizer"):
            return
        self._teller = by
        self._advance()

    @contextmanager
    def iteration(self, number: int | None, models: Sequence[Any]) -> Iterator[None]:
        """The body is the iteration ``number`` of ``megatron.training``.

        The one before ends where this begins: its evaluation, checkpoint and log lines are its own.
        """
        for _ in range(self._skipped(number, models)):
            self.loop.step()
        self._inside = True
        depth = len(self.pushes)
        with self.loop.region("step"):
            try:
                yield
            finally:
                self.pushes.close(depth)
        self._inside = False

    def wait_for_optimizers(self) -> None:
        """Hear of the steps of torch's optimizers, until `forget_optimizers`."""
        if self._steps is None:
            self._steps = OptimizerSteps(lambda: self.updated("torch"))
            self._steps.follow()

    def forget_optimizers(self) -> None:
        """Hear of them no more."""
        if self._steps is not None:
            self._steps.remove()
            self._steps = None

    def _skipped(self, number: int | None, models: Sequence[Any]) -> int:
        """Begin with the first iteration; return by how many steps a later one is ahead of the one before."""
        last, self._teller = self._number, "iteration"
        self._number = number if number is not None else 0 if last is None else last + 1
        begun = self.loop.begun
        with guard.contained("following an iteration"):
            self._start(models, self._number)
        return max(self._number - last, 1) if begun and last is not None else 0

    def _start(self, models: Sequence[Any], first_step: int) -> None:
        if self.loop.running:
            return
        self.wait_for_optimizers()
        self.loop.start(*(_inner(model) for model in models), first_step=first_step)
        if Loop.current() is self.loop:
            atexit.unregister(self.end)
            atexit.register(self.end)  # before the loop's own end, which does not know whether the step is over

    def _advance(self) -> None:
        if self.loop.running:
            self.loop.step()
        else:
            self._start([], self._first_step + 1)  # one is over


def _inner(model: Any) -> Any:
    """Return the model inside the wrappers of data parallelism and mixed precision."""
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model
