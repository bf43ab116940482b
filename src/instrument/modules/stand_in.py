"""What of ours stands for the call of one module: torch calls it where it would call what `module.compile()` made.

Nobody sees it who asks whether there are hooks: some refuse a module with hooks, others run it in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat import COMPILED_CALL


class StandIn:
    """Stands for the call of a module, or for ``compiled``; it is no part of a copy or a pickle of the module.

    It is not bound to the module, as a replica of that shares it: the one that is called is found in the frames of
    the callers, of which others that stand for the call may be the first ones.
    """

    __slots__ = ("compiled",)

    def __init__(self, compiled: Callable[..., Any] | None) -> None:
        self.compiled = compiled

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def compiled_call(module: Any) -> Any:
    """Return what `module.compile()` made; None where that was not called, whatever of ours stands there."""
    call = vars(module).get(COMPILED_CALL)
    while isinstance(call, StandIn):
        call = call.compiled
    return call
