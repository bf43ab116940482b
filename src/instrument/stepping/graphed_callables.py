"""`GraphedCallables`: detects the warm-up and capture calls of `torch.cuda.make_graphed_callables`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from ..compat import compiler
from ..patch import Patch, apply, leave_no_frame, undo


class _ThreadState(threading.local):
    """Whether the thread is inside `make_graphed_callables`."""

    making = False


class GraphedCallables:
    """Tracks from `follow` to `remove` whether a thread is inside `make_graphed_callables`.

    Its warm-up calls are not steps. Code that got the function before `follow` is not tracked.
    """

    def __init__(self) -> None:
        self._thread = _ThreadState()
        self._patches: list[Patch] = []

    def follow(self) -> None:
        """Start tracking."""
        apply((Patch(owner, name, self._make_wrapper) for owner, name in compiler.graph_makers()), self._patches)

    @property
    def active(self) -> bool:
        """Whether this thread is inside `make_graphed_callables`."""
        return self._thread.making

    def remove(self) -> None:
        """Stop tracking, and restore the functions."""
        undo(self._patches)

    def _make_wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make_graphed_callables(*args: Any, **kwargs: Any) -> Any:
            before = self._thread.making
            try:
                self._thread.making = True
                return original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                self._thread.making = before

        return make_graphed_callables
