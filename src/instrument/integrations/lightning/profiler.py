"""`InstrumentProfiler`: records windows with the actions that Lightning profiles as regions."""

from __future__ import annotations

import os
from typing import Any

from ...base import log
from ...base.guard import guard
from ..events import contained_events
from .callback import InstrumentCallback
from .packages import FEATURE, LightningMixin


def _inert_profiler(profiler: InstrumentProfiler, *_: Any, **__: Any) -> None:
    """Make ``profiler`` inert: it profiles nothing."""
    from ..loop import Loop

    super(InstrumentProfiler, profiler).__init__()
    profiler._report, profiler.loop = [], Loop.__new__(Loop)


class InstrumentProfiler(LightningMixin):
    """Records windows of optimizer steps with Lightning's actions as regions, in ``Trainer(profiler=...)``.

    The actions have Lightning's names (``[Strategy]SingleDeviceStrategy.training_step``, ``run_training_batch``).
    Otherwise it works as `InstrumentCallback` does; if the Trainer has one of these too, its arguments apply.

    Args:
        out: the folder for the recorded windows.
        arguments: as for `InstrumentCallback`; by default the summary is the report that Lightning logs.

    Raises:
        TypeError, ValueError: wrong arguments.
        ImportError: Lightning is not installed.
    """

    base = "profilers.Profiler"
    inert = "profilers.PassThroughProfiler"
    _callback: InstrumentCallback | None = None  # of the Trainer that uses this profiler

    @guard.prepared(FEATURE, otherwise=_inert_profiler)
    def __init__(self, out: str | os.PathLike[str] = "runs/instrument", **arguments: Any) -> None:
        from ..loop import Loop

        super().__init__()
        self._report: list[str] = []
        arguments.setdefault("on_summary", self._report.append)
        self.loop = Loop(out, **arguments)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin a run: add a callback to the Trainer, for the events that a profiler does not get."""
        try:
            self._report.clear()
            self._join(self._lightning_module.trainer.callbacks)  # type: ignore[attr-defined]
        except Exception as error:
            guard.failed(FEATURE, error)
        super().setup(stage, local_rank, log_dir)  # type: ignore[misc]

    def _join(self, callbacks: list[Any]) -> None:
        others = [callback for callback in callbacks if isinstance(callback, InstrumentCallback)]
        others = [callback for callback in others if not callback.loop.automatic]
        if not others:
            others.append(ProfilerCallback(self))
            callbacks.insert(0, others[0])
        if others[0].loop is not self.loop and self._callback is not others[0]:
            log.warning("InstrumentProfiler uses the arguments of the Trainer's InstrumentCallback, not its own")
        self._callback = others[0]
        self._callback.by_profiler = True
        # Actions in which steps begin and end
        self._not_regions = (f"[Callback]{self._callback.state_key}.", "run_training_epoch")  # type: ignore[attr-defined]

    @guard.contained(FEATURE)
    def start(self, action_name: str) -> None:
        """Open the region of an action."""
        if self._callback is not None and not action_name.startswith(self._not_regions):
            self._callback.loop.enter(action_name)

    @guard.contained(FEATURE)
    def stop(self, action_name: str) -> None:
        """Close the region of an action, and regions that an exception left open in it."""
        if self._callback is not None and not action_name.startswith(self._not_regions):
            self._callback.loop.leave(action_name)

    def summary(self) -> str:
        """Return the summary of the windows of this run."""
        try:
            return "\n".join(self._report)
        except Exception as error:
            guard.failed(FEATURE, error)
        return ""


@contained_events(FEATURE)
class ProfilerCallback(InstrumentCallback):
    """Follows, for ``profiler``, the events that are not actions: steps, evaluations, and the end of a run."""

    def __init__(self, profiler: InstrumentProfiler) -> None:
        self._profiler = profiler
        self._follow(profiler.loop)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Stop the loop, and log the report, which Lightning omits after an exception."""
        super().on_exception(trainer, module, exception)
        with guard.contained(FEATURE):
            self._profiler.describe()  # type: ignore[attr-defined]
