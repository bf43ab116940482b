"""`SlowStepWindows`: opens a window after a slow step, and keeps the times of the steps before the window."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ..guard import guard
from ..part_file import part_file
from ..run_folder import BLACK_BOX
from ..slow_steps.box import BlackBox
from .requests import WindowRequest

FEATURE = "opening a window at a slow step"
_NAMED = 5  # slow steps in the summary


class SlowStepWindows:
    """Times the steps of a profile in a black box; a slow step requests a window.

    Recorded steps are longer than others, so the box does not time them.

    Args:
        request: called with the request, on the loop's thread.
        active: the number of recorded steps of such a window.

    Attributes:
        box: the black box.
    """

    def __init__(self, request: Callable[[WindowRequest], None], active: int) -> None:
        self._request = request
        self._active = active
        self.box = BlackBox()

    def begin(self, first_step: int) -> None:
        """Begin with a new box, unless the run goes on."""
        if self.box.step_num != first_step:
            self.box = BlackBox(first_step=first_step)
        self.box.start()

    def followed_by(self, step: Callable[[int | None], None], left_out: Sequence[int]) -> Callable[..., None]:
        """Return a function that ends a step in the box and calls ``step``, except on threads in ``left_out``."""
        end_step = self.box.end_step

        def end_and_count(global_step: int | None = None) -> None:
            if left_out and threading.get_ident() in left_out:
                return
            try:
                slow = end_step()
                if slow is not None:
                    self._request(WindowRequest(str(slow), self._active, automatic=True))
            except Exception as error:
                guard.failed(FEATURE, error)
            step(global_step)

        return end_and_count

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
