"""Know when torch.compile or TorchScript looks at modules and methods: it must see none of our changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from .. import compat
from ..guard import guard
from ..patch import Patch, undo

FEATURE = "making way for the compiler"
Away = Callable[[], AbstractContextManager[None]]


class Compiling:
    """Takes changes away while something is compiled or scripted.

    What Dynamo sees it checks in every later call: a hook that was there in a window would be missed after it,
    and the code compiled again.
    """

    def __init__(self) -> None:
        self._away: list[Away] = []
        self._patches: list[Patch] = []

    def tell(self, away: Away, on: bool) -> None:
        """Enter ``away()`` around each compilation from now on, or no more."""
        if away in self._away:
            self._away.remove(away)
        if on:
            self._away.append(away)
        undo(self._patches)
        if self._away:
            self._patches += (Patch(owner, name, self._around) for owner, name in compat.compilers())

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def install_callbacks(*args: Any, **kwargs: Any) -> Iterator[None]:
            cleared = self._clear()
            try:
                with original(*args, **kwargs):
                    yield
            finally:
                self._restore(cleared)

        def call(*args: Any, **kwargs: Any) -> Any:
            cleared = self._clear()
            try:
                return original(*args, **kwargs)
            finally:
                self._restore(cleared)

        return install_callbacks if original.__name__ == "install_callbacks" else call

    @guard.contained(FEATURE)
    def _clear(self) -> contextlib.ExitStack | None:
        with contextlib.ExitStack() as stack:
            for away in list(self._away):
                stack.enter_context(away())
            return stack.pop_all()

    @guard.contained(FEATURE)
    def _restore(self, cleared: contextlib.ExitStack | None) -> None:
        if cleared is not None:
            cleared.close()


compiling = Compiling()
