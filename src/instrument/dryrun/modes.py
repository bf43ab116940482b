"""The modes that watch a thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from . import tensor_reads, transfers
from .dispatch_mode import DispatchMode
from .function_mode import FunctionMode
from .state import RunState


@contextmanager
def modes(state: RunState) -> Iterator[None]:
    """Observe the operators of the calling thread."""
    with ExitStack() as stack:
        if state.fake is not None:
            stack.enter_context(state.fake.mode)
        stack.callback(setattr, state.thread, "functions", None)
        stack.enter_context(DispatchMode(state))
        stack.enter_context(FunctionMode(state, transfers.ANSWERS, {**transfers.CALLS, **tensor_reads.CALLS}))
        yield
