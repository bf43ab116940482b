"""`Session`: drives the loop of a process without a framework, from the signs of its steps."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from typing import Any

from ...base import log, stderr
from ...base.config import PROCESS
from ...base.guard import exiting, guard, uncaught_error
from ...base.interrupts import Suppressed
from ...base.live_objects import IdentitySet
from ...base.patch import Patch
from ...base.run_folder import killed
from ...integrations.loop import AutomaticLoop, Loop
from ...record.modules.optimizers import outermost_modules, updates_only
from ...record.regions import dispatch
from ...record.stepping.epochs import EpochStarts
from ...record.stepping.explicit_steps import program_steps
from ...record.stepping.follower import StepFollower
from .termination import Termination

LAUNCHERS = ("torch.distributed.run", "accelerate.commands.launch", "torch.distributed.launch")
FEATURE = "following optimizers"
_MAX_OPTIMIZERS = 16  # whose models are searched for
_HINT = "choose what a step is with --step-on backward, forward or FUNCTION (train.py:train_step)"
_NO_STEP = f"nothing was recorded: no optimizer stepped, and no other sign of steps was found; {_HINT}"
_COMPILED = f"nothing was recorded: the steps of a compiled optimizer cannot be detected; {_HINT}"
_NEVER_STEPPED = f"nothing was recorded: an optimizer was made, but its step() was not called; {_HINT}"


class Session:
    """Drives the loop by a `StepFollower`, and annotates the models that optimizers train or that are called.

    It ends when a framework or the program itself starts a loop.
    """

    def __init__(self, loop: AutomaticLoop) -> None:
        self._loop = loop
        loop.labels_evaluation = True
        self._optimizers = IdentitySet()  # those made or stepped so far
        self._new_optimizers: list[weakref.ref[Any]] = []  # whose models are not annotated yet
        self._process = os.getpid()
        self._started_at = time.time()
        self._steps = StepFollower(
            self._end_step,
            self._restart_schedule,
            loop.step_on,
            on_begin=self._begin_step_0 if loop.records(0) else None,
            on_missed_steps=self._restart_after,
            on_optimizer_made=self._on_optimizer_made,
            on_model_found=self._on_model_found,
            on_batch=EpochStarts(lambda: loop.step_num, loop.begin_epoch).before_batch,
            is_recording=lambda: loop.recording_thread is not None,
        )
        self._post_hook: Any = None
        self._termination = Termination(loop)
        self._has_begun = False
        self._missed_step_0 = False  # step 0 was over before recording began
        self._explained = False
        self._ended = False  # hooks stay until exit: torch iterates over them, and they must not change then

    def begin(self) -> None:
        """Follow the steps of this process."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        # Before steps are counted: models come first
        self._post_hook = register_optimizer_step_post_hook(self._after_step)
        self._steps.follow()
        self._termination.install()
        self._follow_cells()
        atexit.register(self._exit)
        Patch(os, "_exit", self._exiting).apply()

    def _exiting(self, original: Any) -> Any:
        """Return `os._exit` that first ends the loop, as Python calls no exit handler there."""

        def end_first(leave: Any, *args: Any, **kwargs: Any) -> None:
            ends_work = threading.main_thread().ident, self._loop.recording_thread
            if threading.get_ident() in ends_work:  # a watchdog ends a program that hangs: do not wait then
                self._exit()
            leave(*args, **kwargs)

        return guard.around(FEATURE, original, end_first)

    def _follow_cells(self) -> None:
        """In IPython, end the loop with each cell: the end of a kernel comes late, and its output is lost."""
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is not None:
            stderr.forget()
            shell.events.register("pre_run_cell", self._begin_cell)
            shell.events.register("post_run_cell", self._end_cell)

    def _begin_cell(self, *_: Any) -> None:
        if self._process == os.getpid():
            self._loop.resume()

    def _end_cell(self, *_: Any) -> None:
        if self._process == os.getpid():
            self._loop.pause()

    def leave(self) -> None:
        """Ignore the steps from now on."""
        self._ended = True

    def _on_optimizer_made(self, optimizer: Any) -> None:
        self._add_optimizer(optimizer)
        if self._has_begun and not self._ended and self._steps.by is None:
            self._name_trained()  # step 0 is recorded, and may need the regions of the model

    def _on_model_found(self, model: Any) -> None:
        if self._loop.records(0) and not self._ended and Loop.current() in (None, self._loop):
            self._name_trained(model)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        """Note an optimizer that steps, in case it was copied or loaded and not made by its constructor."""
        try:
            if not dispatch.tracing():
                self._add_optimizer(optimizer)
        except Exception as error:
            guard.failed(FEATURE, error)

    def _add_optimizer(self, optimizer: Any) -> None:
        if not self._ended and optimizer not in self._optimizers and len(self._optimizers) < _MAX_OPTIMIZERS:
            self._optimizers.add(optimizer)
            self._new_optimizers.append(weakref.ref(optimizer))

    @guard.contained(FEATURE)
    def _begin_step_0(self) -> None:
        """Begin at step 0, which is to be recorded."""
        if Loop.current() is None and not self._ended:
            self._name_trained()
            self._start(0)

    @guard.contained(FEATURE)
    def _end_step(self) -> None:
        """End the step, at a point outside all of torch's own ranges."""
        self._termination.check()
        if not self._ready_to_count():
            return
        if self._missed_step_0:  # the first recorded step is the next one
            self._missed_step_0 = False
            log.warning("step 0 is not recorded: it was over before recording could begin")
        else:
            self._loop.step()

    @guard.contained(FEATURE)
    def _restart_after(self, count: int) -> None:
        """Start the schedule over at step ``count``, as the steps before it were missed."""
        if self._ready_to_count():
            self._missed_step_0 = False
            reason = f"steps up to {count - 1} passed before it was known what a step is"
            log.warning(reason)
            self._loop.restart(count, reason)

    def _ready_to_count(self) -> bool:
        """Annotate new models, and begin unless begun; return False if another loop counts the steps."""
        if Loop.current() is not (self._loop if self._has_begun else None):
            self.leave()  # to that loop
        if self._ended:
            return False
        if self._steps.by == "program":
            self._loop.warn_if_ignored()
        self._annotate_and_explain()
        if not self._has_begun:
            self._missed_step_0 = self._loop.records(0)
            self._start(int(self._missed_step_0), late=True)
        return True

    @guard.contained(FEATURE)
    def _annotate_and_explain(self) -> None:
        """Annotate and explain before a window opens, or between two steps of an open one."""
        self._name_new()
        self._explain()

    def _name_new(self) -> None:
        """Annotate the models of new optimizers, or defer that if a window ends with this step."""
        if self._has_begun and self._loop.record and self._loop.finished:
            return
        if self._optimizers_to_annotate() and self._loop.between_steps():
            self._name_trained()

    def _name_trained(self, *models: Any) -> None:
        """Annotate the models of new optimizers, and the outermost modules around ``models``."""
        optimizers = self._optimizers_to_annotate()
        self._new_optimizers.clear()
        if optimizers or models:
            with self._loop.own_work():
                self._loop.name(*outermost_modules(optimizers, models))

    def _optimizers_to_annotate(self) -> list[Any]:
        """Return the new optimizers, except those that only update parameters of annotated models."""
        optimizers = [optimizer() for optimizer in self._new_optimizers]
        optimizers = [
            optimizer
            for optimizer in optimizers
            if optimizer is not None and not updates_only(optimizer, self._loop.models)
        ]
        self._new_optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        return optimizers

    def _explain(self) -> None:
        """Log once what counts as a step, unless an optimizer does, and annotate the model that shows it."""
        explanation = self._steps.explanation
        if (explanation or self._loop.step_on) and not self._explained:
            self._explained = True
            self._loop.between_steps()
            if explanation and not program_steps.profile_started:
                with self._loop.own_work():
                    log.warning(explanation)
            if self._steps.model is not None and not self._loop.records(0):
                self._name_trained(self._steps.model)  # else it is annotated since it was found

    def _restart_schedule(self) -> None:
        """Start the schedule over: the steps so far were parts of step 0, which is over unless it begins now."""
        if self._has_begun and not self._ended and self._steps.by != "program":
            self._explained = False
            self._annotate_and_explain()
            is_over = self._steps.by is not None
            self._missed_step_0 = is_over and self._loop.records(0)
            reason = f"the schedule started over: steps are now counted by the {self._steps.by or 'optimizer'}"
            self._loop.restart(int(self._missed_step_0), reason, late=is_over)

    def _start(self, first_step: int, *, late: bool = False) -> None:
        self._has_begun = True
        self._loop.start(first_step=first_step, late=late)
        self._loop.on_framework_start = self.leave

    @guard.contained(FEATURE)
    def _exit(self) -> None:
        if self._process != os.getpid():  # a forked child
            return
        counted = self._ended or (self._loop.has_begun and self._steps.by is not None)
        self.leave()
        self._post_hook.remove()
        with exiting():
            self._loop.stop()
        self._termination.remove()
        if program_steps.profile_started:
            self._loop.warn_if_ignored()
            return
        started = os.environ.get(PROCESS) == str(self._process)  # by `instrument run` itself
        if started and not counted and not self._child_recorded() and sys.modules.keys().isdisjoint(LAUNCHERS):
            log.warning(self._reason_for_nothing())

    def _reason_for_nothing(self) -> str:
        steps, error = self._steps, uncaught_error()
        if error is not None:
            return f"nothing was recorded: the program ended with {type(error).__name__} before its first step"
        if steps.function_missing:
            return f"nothing was recorded: the function {self._loop.step_on} was not found, or never called"
        return _COMPILED if steps.compiled else _NEVER_STEPPED if steps.optimizer_never_stepped else _NO_STEP

    def _child_recorded(self) -> bool:
        """Return whether a process that this one started recorded something, or was killed while recording."""
        open_windows = (path for path, _ in killed(self._loop.manifest.parent))
        for path in (self._loop.manifest, *open_windows):
            with Suppressed(OSError):
                if path.stat().st_mtime >= self._started_at:
                    return True
        return False
