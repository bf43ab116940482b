"""The modes that watch a thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch.utils import _python_dispatch

from . import tensor_reads, transfers
from .dispatch_mode import DispatchMode
from .function_mode import FunctionMode
from .state import RunState

_OF_COMPILER = "set_is_in_mode_without_ignore_compile_internals"  # later versions of torch


@contextmanager
def modes_beside(state: RunState) -> Iterator[None]:
    """Observe the operators of the calling thread, which runs beside that of the run.

    Torch has one flag for the process, not for each thread, that a mode is on, and compiles nothing then. A thread
    that ends after the run would leave the flag as it was during the run.
    """
    kept: dict[str, bool] = {}  # empty if a mode cannot be entered
    with ExitStack() as stack:
        stack.callback(lambda: _set_flags(kept))
        stack.enter_context(modes(state))
        stack.callback(lambda: kept.update(_flags()))
        yield


def _flags() -> dict[str, bool]:
    return {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}


def _set_flags(flags: dict[str, bool]) -> None:
    vars(_python_dispatch).update(flags)
    flag = flags.get("_is_in_any_mode_without_ignore_compile_internals")
    if flag is not None and (set_compiler := getattr(_python_dispatch, _OF_COMPILER, None)) is not None:
        set_compiler(flag)


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
