"""`ProfileBox`: the black box of a profile, whose slow steps request windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...base.files import part_file
from ...base.guard import guard
from ...base.run_folder import BLACK_BOX
from ..slow_steps.box import BlackBox
from ..slow_steps.judging import SlowStep
from ..slow_steps.step_numbers import RecordedWindow
from ..slow_steps.step_reports import Reported
from .requests import WindowRequest

FEATURE = "opening a window at a slow step"
_NAMED = 5  # slow steps in the summary


class ProfileBox:
    """The black box of a profile: times its steps, for ``on_steps`` too; a slow step may request a window.

    Once it is known which slow steps recur, a window is requested around the next one. Recorded steps are longer
    than others, so the box does not time them.

    Args:
        request: called with the request, on the loop's thread; None if no slow step requests a window.
        active: the number of recorded steps of such a window.
        reported: the functions of ``on_steps``.

    Attributes:
        box: the black box.
    """

    def __init__(self, request: Callable[[WindowRequest], None] | None, active: int, reported: Reported) -> None:
        self._request = request
        self._active = active
        self._reported = reported
        self.box = BlackBox(reported=reported)

    def begin(self, first_step: int) -> None:
        """Begin with a new box, unless the run goes on."""
        if self.box.step_num != first_step:
            self.box = BlackBox(first_step=first_step, reported=self._reported)
        self.box.start()

    def add_window(self, window: RecordedWindow) -> None:
        """Tell the functions of ``on_steps`` of a window that was recorded."""
        self.box.reports.add_window(window)

    def after(self, end_step: Callable[[int], None]) -> Callable[[int], None]:
        """Return a function that calls ``end_step``, and then ends a step in the box."""
        end_in_box, request = self.box.end_step, self._request

        def end_in_both(now_ns: int) -> None:
            end_step(now_ns)
            try:
                slow = end_in_box()
                if slow is not None and request is not None:
                    request(self._window_for(slow))
            except Exception as error:
                guard.failed(FEATURE, error)

        return end_in_both

    def _window_for(self, slow: SlowStep) -> WindowRequest:
        request = WindowRequest(str(slow), self._active, automatic=True)
        if not slow.period:
            return request
        before = request.warmup + (self._active > 1)  # with a step to compare with
        reason = f"one step in {slow.period} is slow: {slow}"
        return replace(request, reason=reason, first=slow.step + slow.period - before, every=slow.period)

    @property
    def worst(self) -> list[str]:
        """The slow steps with the largest delays, each with its phase; the largest first."""
        return [str(slow) for slow in self.box.worst[:_NAMED]]

    @property
    def nothing_slow(self) -> str:
        """What a usual step takes, if no step was slow; else empty."""
        return "" if self.box.worst else self.box.report().partition("\n")[0]

    @guard.contained(FEATURE)
    def write(self, trace: Path) -> Path | None:
        """Write the times of the steps before a window beside its trace; return the file."""
        path = trace.with_name(f"{trace.name.partition('.pt.trace')[0]}{BLACK_BOX}")
        with part_file(path) as part:
            part.write_text(self.box.to_json())
            part.replace(path)  # the loop does not wait for the disk
        return path
