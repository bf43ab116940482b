"""Keep torch.compile away from what is called while its code runs, between two of its graphs.

It takes any Python function for one to compile. Those that look at frames must run as they are, and for the others
compiling would cost seconds. Where one is inlined into a graph it does as before.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from .. import compat
from ..patch import renamed

F = TypeVar("F", bound=Callable[..., Any])
_PACKAGE = __package__.partition(".")[0]


def without_compiler(function: F) -> F:
    """Have torch.compile leave alone all that ``function`` calls. It must not be a part of a graph itself."""
    set_eval_frame = compat.frame_evaluation()
    if set_eval_frame is None:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(before)

    return cast(F, call)


def skip_package() -> None:
    """Have no function of this package compiled on its own that is imported by now: 10 ms.

    Those around functions of the program stay a part of what is compiled.
    """
    skip = compat.skip_code()
    if skip is not None:
        around = [f"{_PACKAGE}.regions.annotation", f"{_PACKAGE}.regions.wrap"]
        names = [name for name in sys.modules if name.split(".")[0] == _PACKAGE and name not in around]
        for name in names:
            for value in list(vars(sys.modules[name]).values()):
                if getattr(value, "__module__", None) == name:
                    for code in _codes(value):
                        skip(code)
                        if code.co_flags & inspect.CO_NESTED:
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
