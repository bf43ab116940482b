"""Imports packages without changing state that the program can see."""

from __future__ import annotations

import random
import sys


def import_rich() -> None:
    """Import rich, and restore Python's global random generator, from which rich draws a number at its import."""
    if "rich.style" not in sys.modules:
        state = random.getstate()
        import rich.style  # noqa: F401

        random.setstate(state)
