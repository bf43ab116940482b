"""Describes how a loop ended, for the manifest and the summary."""

from __future__ import annotations

from ..interrupts import Suppressed


def loop_ended(
    step: int, *, begun: bool = False, complete: bool = False, error: BaseException | None = None
) -> str:
    """Return how the loop ended: "the loop ended in step 7: ValueError: too large".

    Args:
        step: the number of the current step.
        begun: `step` announced the current step, which may never have run.
        complete: the current step ran to its end.
        error: what ended the loop; None if it ended otherwise.
    """
    where = "before" if begun else "after" if complete else "in"
    return f"the loop ended {where} step {step}{f': {first_line(error)}' if error is not None else ''}"


def first_line(error: BaseException) -> str:
    """Return the type of ``error`` and the first line of its message: "ValueError: too large"."""
    name, message = type(error).__name__, ""
    with Suppressed(Exception):  # the program's own `__str__` may raise
        message = str(error).strip().partition("\n")[0]
    return f"{name}: {message}" if message else name
