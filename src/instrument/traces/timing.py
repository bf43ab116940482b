"""What the manifest says of the run around its recorded windows."""

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
        around_ns: Of each window, the median duration of the steps timed before and after it, which are not
            recorded.
        around_steps: Those steps, in order, each once.
        run_steps: How many steps the run had made when the last window was written down.
        run_ns: The wall time that they took, but for the untimed ones.
        untimed_steps: The first and the last of the run's steps whose time is not known.
        own_ns: How long the library itself worked while the windows were open.
        endings: Of windows by their planned steps, which are None where the plan has no end: why the window ended
            before its last step, in words; empty where it did not.
        cut_steps: The steps that did not run, or were not recorded, to their end.
    """

    around_ns: tuple[int, ...] = ()
    around_steps: tuple[Span, ...] = ()
    run_steps: int = 0
    run_ns: int = 0
    untimed_steps: Span | None = None
    own_ns: int = 0
    endings: tuple[tuple[Span | None, str], ...] = ()
    cut_steps: tuple[int, ...] = ()

    @classmethod
    def from_manifest(cls, entry: Mapping[str, Any] | None) -> Timing | None:
        """Return what a line of the manifest says, if it has a timing."""
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
            _joined(filter(None, map(_span, _listed(known.get("around_steps"))))) if around else (),
            run_steps,
            run_ns,
            _span(known.get("untimed_steps")),
            own_ns,
            ((_span(entry.get("planned_steps")), reason),),
            (cut_step,) if isinstance(cut_step, int) else (),
        )

    def __add__(self, later: Timing) -> Timing:
        """Return what is said of the windows of both; of a window in two parts the later one says how it ended."""
        last = later if later.run_steps >= self.run_steps else self
        endings = dict(self.endings) | dict(later.endings)
        return Timing(
            self.around_ns + later.around_ns,
            _joined(self.around_steps + later.around_steps),
            last.run_steps,
            last.run_ns,
            last.untimed_steps,
            self.own_ns + later.own_ns,
            tuple((planned, reason) for planned, reason in endings.items() if reason),
            (*self.cut_steps, *later.cut_steps),
        )

    @property
    def around(self) -> tuple[int, float] | None:
        """How many steps were timed around the windows, and the median of the windows' medians in ns."""
        if not self.around_ns:
            return None
        return sum(last - first + 1 for first, last in self.around_steps), median(self.around_ns)


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return spans of the same steps that neither overlap nor touch."""
    merge_step_lengths: list[Span] = []
    for first, last in sorted(spans):
        if merge_step_lengths and first <= merge_step_lengths[-1][1] + 1:
            merge_step_lengths[-1] = merge_step_lengths[-1][0], max(merge_step_lengths[-1][1], last)
        else:
            merge_step_lengths.append((first, last))
    return tuple(merge_step_lengths)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _span(value: object) -> Span | None:
    """Return the first and the last step in a value of the manifest, which may be anything."""
    pair = _listed(value)
    if len(pair) != 2 or not all(isinstance(number, int) for number in pair) or pair[0] > pair[1]:
        return None
    return pair[0], pair[1]
