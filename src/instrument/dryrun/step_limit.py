"""Ends a program after a number of steps, where the next step begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..syncs.early_stop import ProgramStopper
from ..syncs.events import SyncEvent
from ..syncs.recorder import Recorder


class StepLimit(Recorder):
    """Records the synchronizations after the last requested step, and stops the program.

    Code after an update, such as logging, belongs to the step of that update. The program therefore goes on until
    it begins another step, with a call of a module with trainable parameters or of an optimizer. Some of the
    synchronizations until then, such as the copy of a batch, belong to that step; `merge_into` leaves them out.

    Args:
        steps: the number of steps so far.
        path: as in `Recorder`.
        stopper: ends the program.
    """

    def __init__(self, steps: int, path: Callable[[], tuple[str, ...]], stopper: ProgramStopper) -> None:
        super().__init__(path)
        self.step = steps
        self._limit = steps
        self._stopper = stopper
        self._events: list[SyncEvent] = []
        self._handles = [
            register_module_forward_pre_hook(self._on_module_call),
            register_optimizer_step_pre_hook(lambda *_: self.stop()),
        ]

    def add(self, event: SyncEvent) -> None:
        """Keep ``event``."""
        self._events.append(event)

    def remove(self) -> None:
        """Remove the limit."""
        while self._handles:
            self._handles.pop().remove()

    def stop(self) -> None:
        """End the program.

        Raises:
            EarlyStop: always.
        """
        self._stopper.stop(f"stopped after {self._limit} step{'s' * (self._limit > 1)}, the limit of --steps")

    def merge_into(self, recorder: Recorder) -> None:
        """Add the recorded synchronizations to those of the earlier steps, up to the usual number in a step."""
        for event in self._events:
            seen = recorder.steps_of(event)
            inner = [count for step, count in seen.items() if step is not None and 0 < step < self._limit]
            usual = max(inner, default=0) if self._limit > 1 else int(seen[0] > 0)
            if not usual or seen[0] + seen[self._limit] < usual:
                recorder.add(event)

    def _on_module_call(self, module: Any, *_: Any) -> None:
        if any(parameter.requires_grad for parameter in module.parameters()):
            self.stop()
