"""How much longer a step takes while it is recorded: the steps to compare with, and the verdict's sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..run_folder import entries_of, entry_of
from ..traces.timing import Timing
from .trace_facts import TraceFacts
from .verdict import verdict_of


def timing_of(path: Path) -> Timing | None:
    """Return the timing of the window in this file, from the manifest beside it; None if there is none."""
    return with_steps_of_run(Timing.from_manifest(entry_of(path)), path)


def with_steps_of_run(timing: Timing | None, path: Path) -> Timing | None:
    """Return the timing of the window in this file, with the steps outside it.

    A window without a timed step around it, as the first of a run often is, has the steps around the other windows
    of the same run and rank.
    """
    if timing is None or timing.around_ns or (entry := entry_of(path)) is None:
        return timing
    for other in entries_of(path.absolute().parent.parent):
        same = all(other.get(key) == entry.get(key) for key in ("run", "rank"))
        if same and (known := Timing.from_manifest(other)) and known.around_ns:
            around = timing + known
            timing = replace(
                timing,
                around_ns=around.around_ns,
                around_steps=around.around_steps,
                around_each_ns=around.around_each_ns,
            )
    return timing


def verdict_text(facts: TraceFacts, text: str | None = None) -> str:
    """Return a verdict, by default that of `verdict_of`, with how long recording made the steps, if it did."""
    text = verdict_of(facts).text if text is None else text
    stretch = facts.stretch
    if stretch is None or not stretch.differs:
        return text
    if stretch.ratio < 1:
        return f"{text} A recorded step took {stretch:.2f} times as long as the steps outside the window."
    return f"{text} Recording made a step {stretch:.2f} times as long."
