"""Wraps `torch.autograd.backward`, which `torch.Tensor.backward` calls as well, and `torch.autograd.grad`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...base.compat import autograd
from ...base.guard import guard
from ...base.patch import Patch, leave_no_frame
from ..regions import dispatch

FEATURE = "following backward passes"
_CREATE_GRAPH = 4  # the place of ``create_graph`` in the arguments of `torch.autograd.grad`
T = TypeVar("T")


class _ThreadState(threading.local):
    """Per thread: the number of running wrappers, and the callbacks after the outermost one."""

    depth = 0
    callbacks: tuple[Callable[[], None], ...] = ()


_thread_state = _ThreadState()


def _nothing(*_: Any) -> None:
    pass


def wrap_backward(
    begin: Callable[[], T | None], end: Callable[[T], None] = _nothing, then: Callable[[], None] | None = None
) -> Patch:
    """Return a patch that calls functions around `torch.autograd.backward`, unless torch.compile traces it.

    Args:
        begin: called before; its errors are contained.
        end: called with what ``begin`` returned, unless that is None, after any call; must not raise.
        then: called after a successful call outside any backward pass, once no other wrapper of these functions
            runs on the thread; its errors are contained.
    """
    return _wrap("backward", begin, end, then)


def wrap_grad(begin: Callable[[], None], then: Callable[[], None]) -> Patch:
    """Return a patch that calls functions around `torch.autograd.grad` as `wrap_backward` does.

    ``then`` is not called where a graph of the gradients is created, as another pass goes through that.
    """
    return _wrap("grad", begin, _nothing, then)


def _wrap(
    name: str,
    begin: Callable[[], T | None],
    end: Callable[[T], None],
    then: Callable[[], None] | None,
) -> Patch:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            begun, outermost = None, False
            try:
                if not dispatch.tracing():
                    outermost = not autograd.in_backward()
                    begun = begin()
            except Exception as error:
                guard.failed(FEATURE, error)
            _thread_state.depth += 1
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                _thread_state.callbacks = ()
                raise
            finally:
                _thread_state.depth -= 1
                if begun is not None:
                    end(begun)
            if outermost:
                _end_call(then, name == "grad", args, kwargs)
            return result

        return backward

    return Patch(torch.autograd, name, make)


@guard.contained(FEATURE)
def _end_call(
    then: Callable[[], None] | None, is_grad: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Add ``then`` to the callbacks if the call ended a pass; after the outermost wrapper, call all of them."""
    try:
        creates_graph = is_grad and (kwargs.get("create_graph") or any(args[_CREATE_GRAPH : _CREATE_GRAPH + 1]))
        if then is not None and not creates_graph:
            _thread_state.callbacks = (*_thread_state.callbacks, then)
    finally:
        if not _thread_state.depth:
            calls, _thread_state.callbacks = _thread_state.callbacks, ()
            for call in calls:
                call()
