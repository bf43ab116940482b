"""`InstrumentProfiler`: what Lightning profiles becomes regions."""

from __future__ import annotations

import os
from typing import Any

from ... import log
from ...guard import guard
from .callback import FEATURE, InstrumentCallback
from .packages import LightningMixin


def _without(profiler: InstrumentProfiler, *_: Any, **__: Any) -> None:
    """Leave ``profiler`` as one of Lightning's that profiles nothing."""
    from ..loop import Loop

    super(InstrumentProfiler, profiler).__init__()
    profiler._report, profiler.loop = [], Loop.__new__(Loop)


class InstrumentProfiler(LightningMixin):
    """Records windows of optimizer steps with Lightning's actions as regions, in ``Trainer(profiler=...)``.

    The actions go by Lightning's names (``[Strategy]SingleDeviceStrategy.training_step``, ``run_training_batch``).
    The rest is as with `InstrumentCallback`; beside one on the same Trainer, that one's arguments hold.

    Args:
        out: the folder that windows land in.
        arguments: as for `InstrumentCallback`; by default the summary is the report that Lightning logs.

    Raises:
        TypeError, ValueError: arguments that are not accepted.
        ImportError: Lightning is not installed.
    """

    base = "profilers.Profiler"
    stand_in = "profilers.PassThroughProfiler"
    _callback: InstrumentCallback | None = None  # of the Trainer that this is used by

    @guard.prepared(FEATURE, otherwise=_without)
    def __init__(self, out: str | os.PathLike[str] = "runs/instrument", **arguments: Any) -> None:
        from ..loop import Loop

        super().__init__()
        self._report: list[str] = []
        arguments.setdefault("tell", self._report.append)
        self.loop = Loop(out, **arguments)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin a run: have the Trainer call a callback, which a profiler's actions cannot replace."""
        try:
            self._report.clear()
            self._join(self._lightning_module.trainer.callbacks)  # type: ignore[attr-defined]
        except Exception as error:
            try:
                guard.failed(FEATURE, error)
            except Exception as raised:
                if raised is error:
                    raise
        super().setup(stage, local_rank, log_dir)  # type: ignore[misc]

    def _join(self, callbacks: list[Any]) -> None:
        others = [callback for callback in callbacks if isinstance(callback, InstrumentCallback)]
        others = [callback for callback in others if not callback.loop.automatic]
        if not others:
            others.append(ProfilerCallback(self))
            callbacks.insert(0, others[0])
        if others[0].loop is not self.loop and self._callback is not others[0]:
            log.warning("InstrumentProfiler goes by the arguments of the InstrumentCallback beside it")
        self._callback = others[0]
        self._callback.by_profiler = True
        # Steps begin and end in these.
        self._apart = (f"[Callback]{self._callback.state_key}.", "run_training_epoch")  # type: ignore[attr-defined]

    @guard.contained(FEATURE)
    def start(self, action_name: str) -> None:
        """Open the region of an action."""
        if self._callback is not None and not action_name.startswith(self._apart):
            self._callback.loop.enter(action_name)

    @guard.contained(FEATURE)
    def stop(self, action_name: str) -> None:
        """Close it, and what an exception left open in it."""
        if self._callback is not None and not action_name.startswith(self._apart):
            self._callback.loop.leave(action_name)

    def summary(self) -> str:
        """Return the summary of the windows of this run."""
        try:
            return "\n".join(self._report)
        except Exception as error:
            try:
                guard.failed(FEATURE, error)
            except Exception as raised:
                if raised is error:
                    raise
        return ""


class ProfilerCallback(InstrumentCallback):
    """Tells ``profiler`` what is no action: steps, evaluations, and the end, also of a run that failed."""

    def __init__(self, profiler: InstrumentProfiler) -> None:
        self._profiler = profiler
        self._follow(profiler.loop)

    @guard.contained(FEATURE)
    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """End, with the report that Lightning leaves out then."""
        super().on_exception(trainer, module, exception)
        with guard.contained(FEATURE):
            self._profiler.describe()  # type: ignore[attr-defined]
