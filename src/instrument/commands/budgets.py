"""How often a step may wait in a region, as written on a command line."""

from __future__ import annotations


def budgets(given: list[str]) -> dict[str, int] | None:
    """Return the budgets of regions that ``given`` are, each as ``REGION=N``; None if there are none.

    Raises:
        ValueError: one that is written in another way.
    """
    found = {}
    for text in given:
        region, _, number = text.rpartition("=")
        if not region or not number.isdecimal():
            raise ValueError(f"a budget is written as REGION=N: {text}")
        found[region] = int(number)
    return found or None
