"""Replaces the call of one module without a hook.

It is in the attribute that `module.compile()` sets and torch reads. Some callers refuse a module with hooks,
others run it differently; neither notices a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from ..compat.compiler import COMPILED_CALL
from ..patch import TRANSPARENT


class StandIn:
    """Replaces a module's call, or ``compiled``; copies and pickles of the module leave it out.

    It is not bound to the module, as replicas of the module share it: the called module is found in the frames of
    the callers. The first frames may belong to other wrappers of the call.
    """

    __slots__ = ("compiled",)

    def __init__(self, compiled: Callable[..., Any] | None) -> None:
        self.compiled = compiled

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def called_module(caller: FrameType | None, expected: Any) -> Any:
    """Return the module that torch calls in ``caller`` or, past wrappers of this package, in a caller of that.

    If something else called the stand-in, return ``expected``, the module that it was put on; or, inside the call
    of a replica that shares the stand-in, that replica.
    """
    while caller is not None and caller.f_code.co_filename == TRANSPARENT:
        caller = caller.f_back
    if caller is not None and caller.f_code.co_name == "_wrapped_call_impl":
        return caller.f_locals.get("self", expected)
    while caller is not None and caller.f_code.co_name != "_wrapped_call_impl":
        caller = caller.f_back
    around = caller.f_locals.get("self") if caller is not None else None
    call = _own_call(expected)
    return around if call is not None and _own_call(around) is call else expected


def _own_call(module: Any) -> Any:
    return getattr(module, "__dict__", {}).get(COMPILED_CALL)


def compiled_call(module: Any) -> Any:
    """Return the compiled call that `module.compile()` made, or None."""
    call = vars(module).get(COMPILED_CALL)
    while isinstance(call, StandIn):
        call = call.compiled
    return call
