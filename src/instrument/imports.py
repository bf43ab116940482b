"""Imports packages without changing state that the program can see; calls functions at imports of the program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class ImportHook:
    """From `apply` to `undo`, calls ``call(module)`` once the program imports the module ``name``.

    If the module is imported already, `apply` calls it at once. An `instrument.patch.Change`.
    """

    def __init__(self, name: str, call: Callable[[Any], object]) -> None:
        self._name = name
        self._call: Callable[[Any], object] | None = call

    def apply(self) -> None:
        """Register the call; has no effect after `undo`."""
        import wrapt

        if self._call is not None:
            wrapt.register_post_import_hook(self._imported, self._name)

    def undo(self) -> None:
        """Cancel the call, and let go of the function. wrapt keeps an empty registration until the import."""
        self._call = None

    def _imported(self, module: Any) -> None:
        call = self._call
        if call is not None:
            call(module)


def import_rich() -> None:
    """Import rich, and restore Python's global random generator, from which rich draws a number at its import."""
    import random

    if "rich.style" not in sys.modules:
        state = random.getstate()
        import rich.style  # noqa: F401

        random.setstate(state)
