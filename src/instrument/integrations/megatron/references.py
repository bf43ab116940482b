"""Functions of Megatron's that are replaced: wherever they were imported, and what their calls show."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...guard import guard
from ...modules.parts import Switch
from ...regions import dispatch
from ...regions.region import Region
from .range_stack import RangeStack

FEATURE = "following Megatron"


class ReferencesPatch:
    """Functions of ``module`` are ``makers[name](original)`` from `apply` to `undo`, also where imported by name.

    Looks at all names of all modules: 50 ms for three thousand modules.
    """

    def __init__(self, module: ModuleType, makers: dict[str, Callable[[Any], Any]]) -> None:
        known = {name: vars(module)[name] for name in makers if name in vars(module)}
        self._ours = [(original, makers[name](original)) for name, original in known.items()]

    def apply(self) -> None:
        """Replace the functions."""
        _swap({id(original): ours for original, ours in self._ours})

    def undo(self) -> None:
        """Put the originals back, also where ours was imported by name."""
        _swap({id(ours): original for original, ours in self._ours})


def _swap(values: dict[int, Any]) -> None:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            held = object.__getattribute__(module, "__dict__")  # past modules that load when asked for anything
            for name, value in list(held.items()):
                if id(value) in values:
                    held[name] = values[id(value)]


class Arguments:
    """Finds the arguments of a call by name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._places = {name: place for place, name in enumerate(inspect.signature(function).parameters)}

    def get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument ``name`` of a call; None where it was not given."""
        place = self._places.get(name, len(args))
        return args[place] if place < len(args) else kwargs.get(name)


def named(
    original: Callable[..., Any], shown: Callable[..., Region | None], switch: Switch, ranges: RangeStack
) -> Callable[..., Any]:
    """Return ``original`` with its calls as the region that ``shown(*arguments)`` returns, if any.

    What Megatron pushes inside and does not pop is closed with it.
    """

    def when() -> bool:
        return not dispatch.tracing() and switch.on and dispatch.recording

    def following(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        region = None
        with guard.contained(FEATURE):
            region = shown(*args, **kwargs)
        if region is None:
            return original(*args, **kwargs)
        with ranges.around(region, sys._getframe(1)):
            return original(*args, **kwargs)

    return functools.wraps(original)(guard.around(FEATURE, original, following, when))
