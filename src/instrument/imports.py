"""Imports that would change what the program can see."""

from __future__ import annotations

import random
import sys


def import_rich() -> None:
    """Import rich without the number that it draws from Python's global random generator, once, when imported."""
    if "rich.style" not in sys.modules:
        state = random.getstate()
        import rich.style  # noqa: F401

        random.setstate(state)
