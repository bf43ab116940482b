"""Keep torch.compile away from what is called while its code runs, between two of its graphs.

It takes any Python function for one to compile. Those that look at frames must run as they are, and for the others
compiling would cost seconds. Where one is inlined into a graph it does as before.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from .. import compat
from ..patch import renamed


def keep(*modules: types.ModuleType) -> None:
    """Have the functions of ``modules`` never compiled on their own."""
    skip = compat.skip_code()
    if skip is not None:
        for module in modules:
            for value in vars(module).values():
                if getattr(value, "__module__", None) == module.__name__:
                    for code in _codes(value):
                        skip(code)
                        skip(renamed(code))  # of a patch


def _codes(value: Any) -> Iterator[types.CodeType]:
    """All code in a function or class, with what is defined inside."""
    if isinstance(value, types.CodeType):
        yield value
        for inner in value.co_consts:
            if isinstance(inner, types.CodeType):
                yield from _codes(inner)
    elif isinstance(value, type):
        for part in vars(value).values():
            yield from _codes(part)
    elif isinstance(value, property):
        yield from _codes(value.fget)
    elif hasattr(value, "__wrapped__"):
        yield from _codes(value.__wrapped__)
    elif isinstance(value, types.FunctionType):
        yield from _codes(value.__code__)
