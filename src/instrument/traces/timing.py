"""Reads the timing of a run, within and around its recorded windows, from the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

Span = tuple[int, int]  # the first and the last step


@dataclass(frozen=True)
class Timing:
    """The steps around one or several windows, the run so far, and how the windows ended.

    Attributes:
        around_ns: For each window, the median duration of the timed but not recorded steps before and after it.
        around_steps: The ranges of these steps, in order and without overlap.
        run_steps: The number of steps of the run when the last window was written.
        run_ns: The wall time of these steps, without the untimed ones.
        untimed_steps: The first and the last of the steps whose time is not known.
        own_ns: How long the library itself worked while the windows were open.
        endings: For each window, its planned steps (None without a planned end), and why it ended before its last
            step; empty if it did not.
        cut_steps: The steps that did not run to their end, or were not recorded to their end.
        around_each_ns: The durations of all steps around the windows; empty if the manifest does not say them.
    """

    around_ns: tuple[int, ...] = ()
    around_steps: tuple[Span, ...] = ()
    run_steps: int = 0
    run_ns: int = 0
    untimed_steps: Span | None = None
    own_ns: int = 0
    endings: tuple[tuple[Span | None, str], ...] = ()
    cut_steps: tuple[int, ...] = ()
    around_each_ns: tuple[int, ...] = ()

    @classmethod
    def from_manifest(cls, entry: Mapping[str, Any] | None) -> Timing | None:
        """Return the timing in a line of the manifest; None if it has none."""
        known = entry.get("timing") if entry else None
        if entry is None or not isinstance(known, Mapping):
            return None
        run_steps, run_ns, around_ns = (known.get(key) for key in ("run_steps", "run_ns", "around_ns"))
        own_ns, cut_step = known.get("own_ns", 0), entry.get("cut_step")
        if not (isinstance(run_steps, int) and isinstance(run_ns, int) and isinstance(own_ns, int)):
            return None
        around = (around_ns,) if isinstance(around_ns, int) else ()
        reason = str(entry.get("reason") or "") if entry.get("status") == "partial" else ""
        return cls(
            around,
            _join_spans(filter(None, map(_span, _as_list(known.get("around_steps"))))) if around else (),
            run_steps,
            run_ns,
            _span(known.get("untimed_steps")),
            own_ns,
            ((_span(entry.get("planned_steps")), reason),),
            (cut_step,) if isinstance(cut_step, int) else (),
            tuple(each for each in _as_list(known.get("around_each_ns")) if isinstance(each, int))
            if around
            else (),
        )

    def __add__(self, later: Timing) -> Timing:
        """Return the timing of both; a window in two parts ended as the later part says."""
        last = later if later.run_steps >= self.run_steps else self
        endings = dict(self.endings) | dict(later.endings)
        return Timing(
            self.around_ns + later.around_ns,
            _join_spans(self.around_steps + later.around_steps),
            last.run_steps,
            last.run_ns,
            last.untimed_steps,
            self.own_ns + later.own_ns,
            tuple((planned, reason) for planned, reason in endings.items() if reason),
            (*self.cut_steps, *later.cut_steps),
            self.around_each_ns + later.around_each_ns,
        )

    @property
    def around(self) -> tuple[int, float] | None:
        """The number of steps timed around the windows, and the median of the windows' medians in ns."""
        if not self.around_ns:
            return None
        return sum(last - first + 1 for first, last in self.around_steps), median(self.around_ns)


def _join_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the same steps as spans that neither overlap nor touch."""
    joined: list[Span] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return tuple(joined)


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _span(value: object) -> Span | None:
    """Return the first and the last step in a value of the manifest; None if it is not a span."""
    pair = _as_list(value)
    if len(pair) != 2 or not all(isinstance(number, int) for number in pair) or pair[0] > pair[1]:
        return None
    return pair[0], pair[1]
