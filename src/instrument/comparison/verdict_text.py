"""Says the verdict of a comparison, and what it rests on, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from ..units import duration
from .comparison_data import ComparisonData


def headline(change: ComparisonData) -> str:
    """Return the verdict in one sentence."""
    what = "a step takes" if change.have_steps else "the whole trace takes"
    medians = f"{what} {duration(change.after_ns)} instead of {duration(change.before_ns)} ({change_text(change)}"
    if change.have_steps:
        medians += f"; medians of {change.steps[0]} steps before and {change.steps[1]} after"
    medians += ")"
    if change.verdict == "not comparable":
        return f"Not comparable: {'; '.join(change.reasons)}; {medians}."
    if change.verdict == "no change seen" and change.reasons:
        return f"Cannot tell whether it changed: {'; '.join(change.reasons)}; {medians}."
    if change.verdict == "no change seen":
        seen = "" if change.detectable is None else f" ({100 * change.detectable:.1f} % would have been)"
        return f"No change seen{seen}: {medians}."
    return f"{change.verdict.capitalize()}: {medians}."


def change_text(change: ComparisonData) -> str:
    """Return the relative change in words."""
    return "from nothing" if change.relative is None else f"{100 * change.relative:+.1f} %"


def details(change: ComparisonData) -> Iterator[str]:
    """Yield sentences on what the verdict rests on, and on other differences between the recordings."""
    if change.p_value is not None and change.detectable is not None:
        yield (
            f"p = {change.p_value:.4f} against a change of at most 0.5 %; a change of "
            f"{100 * change.detectable:.1f} % would be seen in 80 % of cases."
        )
    for note in change.notes:
        yield f"Note: {note}."
