"""`ReferencesPatch`: replaces functions of Megatron in every module that imported them by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...imports import loaded_modules

FEATURE = "following Megatron"


class ReferencesPatch:
    """Replaces functions of ``module`` by ``makers[name](original)``, also in modules that imported them by name.

    `apply` and `undo` search all names of all modules, which takes 50 ms for three thousand modules.
    """

    def __init__(self, module: ModuleType, makers: dict[str, Callable[[Any], Any]]) -> None:
        known = {name: vars(module)[name] for name in makers if name in vars(module)}
        self._pairs = [(original, makers[name](original)) for name, original in known.items()]

    def apply(self) -> None:
        """Replace the functions."""
        _swap({id(original): replacement for original, replacement in self._pairs})

    def undo(self) -> None:
        """Restore the functions, also in modules that imported a replacement by name."""
        _swap({id(replacement): original for original, replacement in self._pairs})


def _swap(values: dict[int, Any]) -> None:
    for _, _, held in loaded_modules():
        for name, value in list(held.items()):
            if id(value) in values:
                held[name] = values[id(value)]


class CallArguments:
    """Finds an argument of a call of ``function`` by name, whether it was passed by position or by keyword."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._places = {name: place for place, name in enumerate(inspect.signature(function).parameters)}

    def get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument ``name`` of a call; None if it was not passed."""
        place = self._places.get(name, len(args))
        return args[place] if place < len(args) else kwargs.get(name)
