"""`torch.cuda.make_graphed_callables`: it calls what it is given a few times, to warm up and to capture."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from .. import compat
from ..patch import Patch, apply, leave_no_frame, undo


class _ThreadState(threading.local):
    """On this thread: whether graphs are made now."""

    making = False


class GraphedCallables:
    """Knows whether this thread is inside `make_graphed_callables`, whose warm-up calls are not steps.

    It does so from `follow` to `remove`, for those who look the function up in between.
    """

    def __init__(self) -> None:
        self._here = _ThreadState()
        self._patches: list[Patch] = []

    def follow(self) -> None:
        """Begin."""
        apply((Patch(owner, name, self._following) for owner, name in compat.graph_makers()), self._patches)

    @property
    def here(self) -> bool:
        """Whether this thread makes graphs now."""
        return self._here.making

    def remove(self) -> None:
        """Put the functions back."""
        undo(self._patches)

    def _following(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make_graphed_callables(*args: Any, **kwargs: Any) -> Any:
            before = self._here.making
            try:
                self._here.making = True
                return original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                self._here.making = before

        return make_graphed_callables
