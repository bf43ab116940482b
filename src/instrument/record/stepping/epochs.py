"""`EpochStarts`: finds the steps with which a loop over a DataLoader begins."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ...base.compat import training


class EpochStarts:
    """Calls ``on_epoch`` with the first step of each epoch: each loop over a DataLoader that takes several steps.

    A loop within one step, such as an evaluation, is none. So an epoch is reported in its second step.

    Args:
        step: returns the number of the current step.
        on_epoch: called with the number of a step.
    """

    def __init__(self, step: Callable[[], int], on_epoch: Callable[[int], None]) -> None:
        self._step = step
        self._on_epoch = on_epoch
        # The loops without a second step so far, with the first one
        self._begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def before_batch(self, iterator: Any) -> None:
        """Note that ``iterator``, of a DataLoader, is asked for a batch."""
        if training.batches_drawn(iterator) == 0:
            self._begun[iterator] = self._step()
        elif self._begun and (first := self._begun.get(iterator)) not in (None, self._step()):
            del self._begun[iterator]
            self._on_epoch(first)
