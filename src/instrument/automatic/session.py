"""`Session`: drives the loop of a process whose framework does not, by its optimizers."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from typing import Any

from .. import log
from ..guard import exiting, guard
from ..identity import IdentitySet
from ..integrations.loop import Loop
from ..regions import live
from ..syncs.stepping import OptimizerSteps
from .models import trained
from .program import PROCESS

_LAUNCHERS = ("torch.distributed.run", "accelerate.commands.launch", "torch.distributed.launch")
FEATURE = "following optimizers"
_MOST = 16  # optimizers whose models are looked for, which may take 50 ms each
_NO_STEP = "no optimizer stepped, and no framework told of steps: nothing was recorded"
_COMPILED = "the steps of a compiled optimizer are not seen: nothing was recorded; instrument.steps tells them"


class Session:
    """Steps are told by the first optimizer; models are those that the optimizers train.

    A framework that starts a loop itself, or a program that does, is left to it.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._seen = IdentitySet()  # optimizers
        self._new: list[weakref.ref[Any]] = []  # those whose models are to be named
        self._process = os.getpid()
        self._since = time.time()
        self._steps: OptimizerSteps | None = None
        self._begun = False
        self._missed = False
        self._left = False  # the hooks stay: torch calls them from a dictionary that must not change then

    def begin(self) -> None:
        """Follow the optimizers of this process."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._after)  # before steps are told: models come first
        self._steps = OptimizerSteps(self._stepped)
        atexit.register(self._over)

    def leave(self) -> None:
        """Follow them no more."""
        self._left = True

    def _after(self, optimizer: Any, *_: Any) -> None:
        """Take note of an optimizer that steps for the first time."""
        try:
            if live.tracing() or self._left or optimizer in self._seen or len(self._seen) >= _MOST:
                return
            self._seen.add(optimizer)
            self._new.append(weakref.ref(optimizer))
        except Exception as error:
            guard.failed(FEATURE, error)

    @guard.contained(FEATURE)
    def _stepped(self) -> None:
        """Name the models of new optimizers, and tell the step: here, where torch is in none of its own ranges."""
        if self._left or not self._told():
            return
        with guard.contained(FEATURE):
            new = [optimizer() for optimizer in self._new]
            self._new.clear()
            if not (self._loop.record and self._loop.over):
                for optimizer in new:
                    self._loop.name(*(trained(optimizer) if optimizer is not None else []))
        if self._missed:  # the step that is over went by unseen, and the next one is the first
            self._missed = False
        else:
            self._loop.step()

    def _told(self) -> bool:
        """Begin if nothing runs yet; False where somebody else tells of steps."""
        if Loop.current() is not (self._loop if self._begun else None):
            self.leave()
        elif not self._begun:
            self._begun = True
            self._missed = self._loop.records(0)
            self._loop.start(first_step=int(self._missed))
            self._loop.until_told = self.leave
        return not self._left

    @guard.contained(FEATURE)
    def _over(self) -> None:
        if self._process != os.getpid():  # a forked child
            return
        told = self._left or self._loop.begun
        self.leave()
        with exiting():
            self._loop.stop()
        asked = os.environ.get(PROCESS) == str(self._process)
        if asked and not told and not self._others() and sys.modules.keys().isdisjoint(_LAUNCHERS):
            compiled = self._steps is not None and self._steps.compiled
            log.warning(_COMPILED if compiled else _NO_STEP)

    def _others(self) -> bool:
        """Tell whether processes that this one started recorded something."""
        try:
            return self._loop.manifest.stat().st_mtime >= self._since
        except OSError:
            return False
