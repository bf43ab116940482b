"""Wraps synchronizing calls that torch gives no hook for: explicit synchronization and copies of pageable memory.

Calls that synchronize several times for one purpose are wrapped as well, so that they count once; and copies, to
learn their size and direction. Under torch.compile the wrappers do nothing. While they are installed, a
`__torch_function__` receives the wrappers in place of `torch.Tensor.to` and the like.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple, Protocol

from ..base.compat import autograd, gpu, operators
from ..base.findings import Direction
from ..base.guard import guard
from ..base.patch import Patch
from ..explain.waits import operations
from ..record.regions import dispatch
from .calls import Copy
from .transfer import COPIED_AT_ONCE_BYTES, is_gathered, parse_copy, parse_cuda, parse_to

PAGEABLE = "a non_blocking copy of pageable memory blocks"


class SyncCallContexts(Protocol):
    """Context managers for wrapped calls; each is entered around one call."""

    def one_synchronization(
        self, op: str, cause: str, frame: FrameType, copy: Copy | None = None
    ) -> AbstractContextManager[None]:
        """Return the context of a call that synchronizes, and counts once."""

    def counted_once(self) -> AbstractContextManager[None]:
        """Return the context of a call whose synchronizations count once."""

    def possible_copy(self, copy: Copy) -> AbstractContextManager[None]:
        """Return the context of a call that may synchronize for a copy."""

    def backward_pass(self, frame: FrameType) -> AbstractContextManager[None]:
        """Return the context of a backward pass."""


def patches(contexts: SyncCallContexts) -> Iterator[Patch]:
    """Yield a patch for each call to wrap."""
    import torch

    synchronizing = [
        (torch.cuda, "synchronize", operations.DEVICE),
        (torch.cuda.Event, "synchronize", operations.EVENT),
        (torch.cuda.Stream, "synchronize", operations.STREAM),
        (torch.cuda, "empty_cache", operations.FREES),
        (getattr(torch, "accelerator", None), "synchronize", operations.DEVICE),
        (getattr(torch, "accelerator", None), "empty_cache", operations.FREES),
    ]
    for owner, name, cause in synchronizing:
        if hasattr(owner, name):
            yield _within(owner, name, functools.partial(_synchronizing, contexts, name, cause))
    for name in ("to", "cuda", "cpu", "copy_"):
        yield _within(torch.Tensor, name, functools.partial(_copying, contexts, name))
    if (text := operators.tensor_text()) is not None:
        yield _within(*text, lambda *_, **__: contexts.counted_once())
    if (backward := autograd.backward_runner()) is not None:
        yield _within(*backward, lambda frame, *_, **__: contexts.backward_pass(frame))


def _within(owner: Any, name: str, context_of: Callable[..., AbstractContextManager[None]]) -> Patch:
    """Return a patch of ``owner.name``, each call of which is then inside ``context_of(frame, *arguments)``."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if dispatch.tracing():
                return original(*args, **kwargs)
            with context_of(sys._getframe(1), *args, **kwargs):
                return original(*args, **kwargs)

        return wrapper

    return Patch(owner, name, make)


def _synchronizing(
    contexts: SyncCallContexts, op: str, cause: str, frame: FrameType, *_: Any, **__: Any
) -> AbstractContextManager[None]:
    return contexts.one_synchronization(op, cause, frame)


def _copying(
    contexts: SyncCallContexts, op: str, frame: FrameType, tensor: Any, *args: Any, **kwargs: Any
) -> AbstractContextManager[None]:
    """Return the context of a call of a method of ``tensor`` that copies."""
    blocking = _blocking_copy(op, tensor, args, kwargs)
    if blocking is not None:
        cause, copy = blocking
        return contexts.one_synchronization(op, cause, frame, copy)
    return contexts.possible_copy(lambda: _direction_and_bytes(args[0] if op == "copy_" and args else tensor))


def _direction_and_bytes(source: Any) -> tuple[Direction | None, int | None]:
    """Return the direction and the bytes of a copy between CPU and GPU from ``source``."""
    device = getattr(getattr(source, "device", None), "type", None)
    if device is None:
        return None, None
    return ("H2D" if device == "cpu" else "D2H"), source.numel() * source.element_size()


def _blocking_copy(op: str, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Copy] | None:
    """Return why a non_blocking copy blocks, and describe it; None for other calls."""
    if kwargs.get("non_blocking") is not True and not any(value is True for value in args):
        return None
    with guard.contained("checking a copy"):
        route = _route(op, tensor, args, kwargs)
        if route is None or route.host is None or operators.is_fake(tensor):
            return None
        size, devices = tensor.numel() * route.source.element_size(), (route.source.device.type, route.target)
        waits = size > COPIED_AT_ONCE_BYTES if devices == ("cpu", "cuda") else size and devices == ("cuda", "cpu")
        # is_pinned() creates a context on the current device if the program has none yet
        if not waits or gpu.in_use() is None:
            return None
        cause = PAGEABLE if not route.host.is_pinned() else operations.GATHERED if route.gathered() else None
        if cause is not None:
            return cause, lambda: ("H2D" if route.target == "cuda" else "D2H", size)
    return None


class _Route(NamedTuple):
    """What is copied to where.

    Attributes:
        source: the tensor that is copied.
        target: the type of the target device.
        host: the tensor on the CPU that must be pinned; None if the copy is blocking, or if torch pins memory
            itself, as for a copy to the CPU.
        gathered: returns `is_gathered`.
    """

    source: Any
    target: str | None
    host: Any
    gathered: Callable[[], bool]


def _route(op: str, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Route | None:
    """Return what a call copies; None if torch refuses the arguments: the call itself raises the error."""
    if op == "copy_":
        source, non_blocking = parse_copy(args, kwargs)
        source = tensor if source is None else source
        host, other = (source, tensor) if source.device.type == "cpu" else (tensor, source)
        gathered = functools.partial(is_gathered, host, other.dtype, other)
        return _Route(source, tensor.device.type, host if non_blocking else None, gathered)
    try:
        transfer = parse_to(args, kwargs) if op == "to" else parse_cuda(args, kwargs)
    except (TypeError, RuntimeError):
        return None
    target = "cuda" if op == "cuda" else getattr(transfer.device, "type", None)
    host = tensor if transfer.non_blocking and target == "cuda" else None
    gathered = functools.partial(is_gathered, tensor, transfer.dtype, memory_format=transfer.memory_format)
    return _Route(tensor, target, host, gathered)
