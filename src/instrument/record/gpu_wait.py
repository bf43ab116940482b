"""Waits for the GPUs that the program uses."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..base.compat import gpu
from ..base.compat.gpu import devices_in_use
from ..base.guard import uncaught_error
from ..base.interrupts import is_interrupt
from .cuda_graphs import cuda_graphs

_THREAD = "instrument-gpu"
_limit_s: ContextVar[int] = ContextVar("instrument_gpu_wait_s", default=30)


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Let `synchronize` give up sooner, as the process has to end."""
    token = _limit_s.set(seconds)
    try:
        yield
    finally:
        _limit_s.reset(token)


def synchronize() -> list[str]:
    """Wait for all work of the GPUs that this process uses, if no CUDA graph is captured, for at most 30 s.

    A kernel may wait for a dead peer for ever. An error of the GPU is not raised; the program gets it at its next
    call.

    Returns:
        The reason why the synchronization was not possible, as a list of one; empty if it was done.
    """
    module = gpu.in_use()
    if module is None:
        return []
    try:
        if cuda_graphs.capturing:
            return ["a CUDA graph was captured when the window ended: kernels that still ran may be missing"]
        return _synchronize_in_time(module)
    except Exception as error:
        if is_interrupt(error):
            raise
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        return [f"the GPU could not be synchronized when the window ended, so kernels may be missing: {what}"]


def _synchronize_all(module: Any) -> None:
    """Wait for each GPU on which this process has a context; a wait for another one would create one there."""
    devices = devices_in_use() if module is sys.modules.get("torch.cuda") else None
    if devices is None:
        module.synchronize()
    for device in devices or ():
        module.synchronize(device)


def _synchronize_in_time(module: Any) -> list[str]:
    """Wait on a thread of its own, which stays behind if a kernel does not end; Ctrl-C ends the wait."""
    if any(thread.name == _THREAD for thread in threading.enumerate()):
        return ["work of the GPU that ran at the end of an earlier window still runs, so kernels may be missing"]
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            _synchronize_all(module)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait, name=_THREAD, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started, as at exit since Python 3.12
        if uncaught_error() is not None:  # a kernel may have hung
            return ["the GPU was not waited for, as the program ended with an error, so kernels may be missing"]
        _synchronize_all(module)
        return []
    thread.join(limit_s := _limit_s.get())
    if thread.is_alive():
        return [f"work of the GPU did not end within {limit_s} s of the end of the window, and is missing"]
    if errors:
        raise errors[0]
    return []
