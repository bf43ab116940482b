"""Wrappers around calls that wait and of which torch does not tell: those asked to, and copies of pageable memory.

Also around those that wait often to do one thing, and around copies, for their size and direction. Under
torch.compile they do nothing. While they are there, `torch.Tensor.to` and its like are not what a
`__torch_function__` is handed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol

from .. import compat, gpu
from ..findings import Direction
from ..guard import guard
from ..patch import Patch
from ..regions import dispatch
from . import operations
from .calls import Copy
from .transfer import parse_cuda, parse_to

Function = Callable[..., Any]
PAGEABLE = "a non_blocking copy of pageable memory blocks"


class SyncCallContexts(Protocol):
    """What is told of wrapped calls, by a context around each."""

    def whole(
        self, op: str, cause: str, frame: FrameType, copy: Copy | None = None
    ) -> AbstractContextManager[None]:
        """The call is a wait as a whole."""

    def gathered(self) -> AbstractContextManager[None]:
        """All waits in the call are one."""

    def copying(self, copy: Copy) -> AbstractContextManager[None]:
        """A wait in the call is for a copy."""

    def calling_backward(self, frame: FrameType) -> AbstractContextManager[None]:
        """The call is a backward pass."""


def patches(contexts: SyncCallContexts) -> Iterator[Patch]:
    """Wrap everything, one after the other."""
    import torch

    waits = [
        (torch.cuda, "synchronize", operations.DEVICE),
        (torch.cuda.Event, "synchronize", operations.EVENT),
        (torch.cuda.Stream, "synchronize", operations.STREAM),
        (torch.cuda, "empty_cache", operations.FREES),
        (getattr(torch, "accelerator", None), "synchronize", operations.DEVICE),
        (getattr(torch, "accelerator", None), "empty_cache", operations.FREES),
    ]
    for owner, name, cause in waits:
        if hasattr(owner, name):
            yield Patch(owner, name, functools.partial(_whole, contexts, name, cause))
    for name in ("to", "cuda", "cpu", "copy_"):
        yield Patch(torch.Tensor, name, functools.partial(_copy, contexts, name))
    for make, private in ((_gather, compat.tensor_text()), (_backward, compat.backward_runner())):
        if private is not None:
            yield Patch(*private, functools.partial(make, contexts))


def _whole(contexts: SyncCallContexts, op: str, cause: str, original: Function) -> Function:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if dispatch.tracing():
            return original(*args, **kwargs)
        with contexts.whole(op, cause, sys._getframe(1)):
            return original(*args, **kwargs)

    return wrapper


def _gather(contexts: SyncCallContexts, original: Function) -> Function:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if dispatch.tracing():
            return original(*args, **kwargs)
        with contexts.gathered():
            return original(*args, **kwargs)

    return wrapper


def _copy(contexts: SyncCallContexts, op: str, original: Function) -> Function:
    @functools.wraps(original)
    def wrapper(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if dispatch.tracing():
            return original(tensor, *args, **kwargs)
        moved = _pageable(op, tensor, args, kwargs)
        if moved is not None:
            with contexts.whole(op, PAGEABLE, sys._getframe(1), moved):
                return original(tensor, *args, **kwargs)
        with contexts.copying(lambda: _size(args[0] if op == "copy_" and args else tensor)):
            return original(tensor, *args, **kwargs)

    return wrapper


def _backward(contexts: SyncCallContexts, original: Function) -> Function:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if dispatch.tracing():
            return original(*args, **kwargs)
        with contexts.calling_backward(sys._getframe(1)):
            return original(*args, **kwargs)

    return wrapper


def _size(source: Any) -> tuple[Direction | None, int | None]:
    """Return where a copy between CPU and GPU from ``source`` goes, and its bytes."""
    device = getattr(getattr(source, "device", None), "type", None)
    if device is None:
        return None, None
    return ("H2D" if device == "cpu" else "D2H"), source.numel() * source.element_size()


def _pageable(op: str, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Copy | None:
    """Return the direction and size of a copy that is to be non-blocking and cannot be; None for any other."""
    if kwargs.get("non_blocking") is not True and not any(value is True for value in args):
        return None
    with guard.contained("looking at a copy"):
        route = _route(op, tensor, args, kwargs)
        if route is None:
            return None
        source, target, host = route
        if {source.device.type, target} != {"cpu", "cuda"} or compat.is_fake(tensor) or not source.numel():
            return None
        # To ask for pinned memory makes a context on the current device, if the program has none yet.
        if host is not None and gpu.in_use() is not None and not host.is_pinned():
            return lambda: _size(source)
    return None


def _route(
    op: str, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, str | None, Any] | None:
    """Return what a non-blocking call copies, the kind of device it goes to, and what holds it on the CPU.

    The last is None where torch sees to it, as for a copy to the CPU, or where the call does not mean to be
    non-blocking. All is None where torch refuses the arguments: the call itself raises the error.
    """
    if op == "copy_":
        source: Any = kwargs.get("src", args[0] if args else tensor)
        asked = kwargs.get("non_blocking", args[1] if len(args) > 1 else False)
        return source, tensor.device.type, (source if source.device.type == "cpu" else tensor) if asked else None
    try:
        transfer = parse_to(args, kwargs) if op == "to" else parse_cuda(args, kwargs)
    except (TypeError, RuntimeError):
        return None
    target = "cuda" if op == "cuda" else getattr(transfer.device, "type", None)
    return tensor, target, tensor if transfer.non_blocking and target == "cuda" else None
