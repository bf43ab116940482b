"""`SyncReport`: the report of a run, to print, to assert on and to export."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...base.page_file import Page
from ...base.units import count, counted
from . import serialize
from .events import CHOSEN
from .report_data import ReportData, times

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

_WIDTH = 100  # columns, without a terminal
_INTERNAL = {"each_step", "max_in_step", "negligible", "sort", "typical", "why_untimed"}  # only for this package


class SyncReport(ReportData, Page):
    """The lines that make the CPU wait for the GPU; print it, or read the attributes of `ReportData`."""

    def assert_max(self, most: int | None = None) -> None:
        """Fail if a step synchronizes more than ``most`` times or exceeds its budget; allowed calls do not count.

        Without ``most`` no step may synchronize, or only within the budget if one was given.

        The step with the most synchronizations counts; those outside steps do not. Without steps the whole run
        counts as one step. It also fails if anything inside `no_syncs` synchronized, if the run ended early, if
        nothing could be checked, and if a budget or a comment matches nothing, as one that is misspelled. Code
        that is "not covered" but ran does not make it fail.

        Raises:
            AssertionError: with the report as its message.
            TypeError, ValueError: ``most`` is not a number of synchronizations.
        """
        reason = self.over(most)
        if reason is not None:
            raise AssertionError(f"{reason}\n\n{self}")

    def over(self, most: int | None = None) -> str | None:
        """Return one sentence on why `assert_max` would fail; None if it would not.

        If several steps synchronize too often, the sentence has their number and how often each does.
        """
        unlimited = most is None and self.budgeted
        most = most or 0
        if not isinstance(most, int) or isinstance(most, bool):
            raise TypeError(f'"most" must be an int: {most!r}')
        if most < 0:
            raise ValueError(f'"most" must be >= 0: {most}')
        forbidden = sum(found.count for found in self.syncs if found.forbidden)
        if forbidden:
            return f"the CPU waits for the GPU {times(forbidden)} inside no_syncs"
        wrong = next((found for found in self.not_covered if found.forbidden), None)
        if wrong is not None:
            about = "" if wrong.cause.startswith(CHOSEN) else "would not run on a GPU: "
            return f"{about}{wrong.cause} ({wrong.site or wrong.via})"
        if self.exceeded:
            return self.exceeded[0]
        waits = self.max_in_step(*self.syncs) + self.dropped
        if waits > most and not unlimited:
            return self._too_many(waits, most)
        if self.unavailable_reason:
            return f"nothing could be checked: {self.unavailable_reason}"
        if not self.finished:
            return "the run ended early"
        return self.unmatched[0] if self.unmatched else None

    def _too_many(self, waits: int, most: int) -> str:
        over = sorted(number for number in self.each_step(*self.syncs) if number > most)
        if self.steps < 2 or not over:
            return f"the {'step' if self.steps else 'run'} waits for the GPU {times(waits)}; allowed: {most}"
        over[-1] = waits
        who = "every step waits" if len(over) == self.steps else f"{len(over)} of {self.steps} steps wait"
        return f"{who} for the GPU {self._range(over)}; allowed in a step: {most}"

    def _range(self, waits: list[int]) -> str:
        """Return how often steps synchronize, from the least to the most, and how often most of them do."""
        least, most = waits[0], waits[-1]
        if least == most:
            return times(most)
        usual, steps = Counter(waits).most_common(1)[0]
        usually = f" ({count(usual)} in most)" if 2 * steps > len(waits) else ""
        return f"{'once' if least == 1 else count(least)} to {times(most)}{usually}"

    def to_json(self) -> str:
        """Return the exact report as JSON; `instrument.explain.waits.serialize.as_dict` describes it."""
        return serialize.to_json(self)

    def to_sarif(self) -> str:
        """Return the findings as SARIF 2.1.0 for code scanning, such as GitHub's on pull requests."""
        from ...show.text.sarif import to_sarif

        return to_sarif([self])

    def _page(self) -> str:
        from ...show.sections.syncs import page_of

        return page_of([("", self)])

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_") and name not in _INTERNAL]

    def __repr__(self) -> str:
        at = counted(len(self.syncs), "line")
        return f"<synchronizations at {at}, in {counted(self.steps, 'step')}; print it>"

    def __str__(self) -> str:
        from ...show.text.lines import as_text
        from ...show.text.syncs import lines

        return as_text(lines(self, shutil.get_terminal_size((_WIDTH, 0)).columns))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from ...show.text.lines import as_rich
        from ...show.text.syncs import lines

        return as_rich(lines(self, options.max_width), no_wrap=True, overflow="ignore")


def render(report: SyncReport, *, console: Console) -> None:
    """Print ``report``, in color if the console is a terminal."""
    console.print(report, soft_wrap=True)
