"""Waits for the GPUs that the program uses."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from . import gpu
from .compat.cuda import devices_in_use
from .interrupts import is_interrupt

_LAST_WAIT_S = 5
_ends: ContextVar[bool] = ContextVar("instrument_process_ends", default=False)


@contextmanager
def process_ends() -> Iterator[None]:
    """Let `synchronize` give up after 5 s, as the process is to end: a kernel may wait for a dead peer."""
    token = _ends.set(True)
    try:
        yield
    finally:
        _ends.reset(token)


def synchronize(*, captured: bool = False) -> list[str]:
    """Wait for all work of the GPUs that this process uses, if no CUDA graph is captured.

    An error of the GPU is not raised; the program gets it at its next call.

    Args:
        captured: whether any thread captures a graph.

    Returns:
        The reason why the synchronization was not possible, as a list of one; empty if it was done.
    """
    module = gpu.in_use()
    if module is None:
        return []
    try:
        if captured or gpu.current_stream_capturing():
            return ["a CUDA graph was captured when the window ended: kernels that still ran may be missing"]
        if _ends.get():
            return _synchronize_in_time(module)
        _synchronize_all(module)
    except Exception as error:
        if is_interrupt(error):
            raise
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        return [f"the GPU could not be synchronized when the window ended, so kernels may be missing: {what}"]
    return []


def _synchronize_all(module: Any) -> None:
    """Wait for each GPU on which this process has a context; a wait for another one would create one there."""
    devices = devices_in_use() if module is sys.modules.get("torch.cuda") else None
    if devices is None:
        module.synchronize()
    for device in devices or ():
        module.synchronize(device)


def _synchronize_in_time(module: Any) -> list[str]:
    """Wait on a thread of its own, which stays behind if a kernel does not end."""
    errors: list[Exception] = []

    def wait() -> None:
        try:
            _synchronize_all(module)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait, name="instrument-gpu", daemon=True)
    thread.start()
    thread.join(_LAST_WAIT_S)
    if thread.is_alive():
        return [f"work of the GPU did not end within {_LAST_WAIT_S} s of the end of the process, and is missing"]
    if errors:
        raise errors[0]
    return []
