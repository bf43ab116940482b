"""Keeps torch.compile from compiling functions of this library, which it does between two graphs.

Functions that inspect frames must run uncompiled, and compiling the others would cost seconds. A function that is
inlined into a graph works as before.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from ...base.compat import compiler
from ...base.patch import renamed

_PACKAGE = __package__.partition(".")[0]


def skip_package() -> None:
    """Make torch.compile skip the functions of this package imported so far: 70 ms, then 1 ms at each call.

    Wrappers around functions of the program stay a part of the compiled code.
    """
    skip = compiler.skip_code()
    if skip is not None:
        wrapping_modules = [f"{_PACKAGE}.record.regions.{name}" for name in ("annotation", "wrap")]
        names = [name for name in sys.modules if name.split(".")[0] == _PACKAGE and name not in wrapping_modules]
        for name in names:
            for code in _codes_in(name, len(vars(sys.modules[name]))):
                skip(code)


@functools.cache
def _codes_in(name: str, _: int) -> list[types.CodeType]:
    """Return the codes of the functions of a module, whose number of attributes grows while it is imported."""
    values = [
        value for value in list(vars(sys.modules[name]).values()) if getattr(value, "__module__", None) == name
    ]
    codes = [code for value in values for code in _codes(value)]
    in_patches = [renamed(code) for code in codes if code.co_flags & inspect.CO_NESTED]
    return codes + in_patches


def _codes(value: Any) -> Iterator[types.CodeType]:
    """Yield the code objects of a function or class, also those defined inside."""
    if isinstance(value, types.CodeType):
        yield value
        for inner in value.co_consts:
            if isinstance(inner, types.CodeType):
                yield from _codes(inner)
    elif isinstance(value, type):
        for part in vars(value).values():
            if not isinstance(part, type) or part.__qualname__.startswith(f"{value.__qualname__}."):
                yield from _codes(part)  # an autograd.Function and its backward class hold each other
    elif isinstance(value, property):
        yield from _codes(value.fget)
    elif hasattr(value, "__wrapped__"):
        yield from _codes(value.__wrapped__)
    elif isinstance(value, types.FunctionType):
        yield from _codes(value.__code__)
