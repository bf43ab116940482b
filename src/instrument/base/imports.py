"""Imports packages and reads loaded modules without changing the program's state; calls functions at imports."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


class ImportHook:
    """From `apply` to `undo`, calls ``call(module)`` once the program imports the module ``name``.

    If the module is imported already, `apply` calls it at once. An `instrument.base.patch.Change`.
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


def loaded_modules() -> Iterator[tuple[str, ModuleType, dict[str, Any]]]:
    """Yield the name, the module and the namespace of each loaded module, without running code of the program.

    ``getattr`` would load a lazy module, or raise what its ``__getattr__`` raises. Other objects in `sys.modules`
    are left out, also those that pass for modules, such as a library of cffi.
    """
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType):
            yield name, module, object.__getattribute__(module, "__dict__")


def import_without_drawing(name: str) -> Any:
    """Import a module, and restore Python's global random generator: rich draws from it where it is imported."""
    import random

    if name in sys.modules:
        return importlib.import_module(name)  # waits for another thread that is importing it
    state = random.getstate()
    try:
        return importlib.import_module(name)
    finally:
        random.setstate(state)
