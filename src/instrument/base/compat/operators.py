"""Operators on tensors, and what intercepts them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


@contextmanager
def without_modes() -> Iterator[None]:
    """Run operators in the body without the program's ``__torch_function__`` and ``__torch_dispatch__``."""
    import torch

    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def torch_function_controls() -> tuple[Callable[[], bool], Callable[[], AbstractContextManager[None]]]:
    """Return a predicate for an active ``TorchFunctionMode``, and a context manager that disables overrides.

    If torch lacks these names, the predicate is always true, and the program's ``__torch_function__`` sees the
    library's own operators.
    """
    import torch

    active = getattr(torch._C, "_is_torch_function_mode_enabled", None)
    return active or (lambda: True), getattr(torch._C, "DisableTorchFunction", nullcontext)


def function_modes() -> list[Any]:
    """Return the torch function modes that are on, outermost first; empty if torch cannot list them."""
    from torch import overrides

    stack = getattr(overrides, "_get_current_function_mode_stack", None)
    return list(stack()) if stack is not None else []


def is_fake(tensor: Any) -> bool:
    """Return whether ``tensor`` is a fake tensor, which has a shape and a device but no data."""
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return fake is not None and isinstance(tensor, fake)


def parse_to(*args: Any, **kwargs: Any) -> tuple[Any, Any, bool, Any]:
    """Return the device, type, ``non_blocking`` and memory format that the arguments of `Module.to` mean.

    `Module.to` calls the same function, so it needs no fallback.
    """
    import torch

    parsed: tuple[Any, Any, bool, Any] = torch._C._nn._parse_to(*args, **kwargs)
    return parsed


def tensor_text() -> tuple[Any, str] | None:
    """Return the owner and the name of the function behind ``repr(tensor)``.

    None without it: each value in the text is then a synchronization of its own. `Tensor.__repr__` itself must not
    be replaced, as the compiler traces it.
    """
    import torch

    module = getattr(torch, "_tensor_str", None)
    return (module, "_str") if hasattr(module, "_str") else None
