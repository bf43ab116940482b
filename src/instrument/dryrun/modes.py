"""The modes that watch a thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from . import moves, tensor_reads
from .dispatch import Dispatch
from .functions import Functions
from .state import State


@contextmanager
def modes(state: State) -> Iterator[None]:
    """Observe the operators of the calling thread."""
    with ExitStack() as stack:
        if state.fake is not None:
            stack.enter_context(state.fake.mode)
        stack.callback(setattr, state.thread, "functions", None)
        stack.enter_context(Dispatch(state))
        stack.enter_context(Functions(state, moves.ANSWERS, {**moves.CALLS, **tensor_reads.CALLS}))
        yield
