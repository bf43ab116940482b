"""What TorchScript compiles in place of `annotate` and `mark`, whose bodies it cannot compile."""

from __future__ import annotations

from typing import Any

from torch.autograd.profiler import record_function


def annotate(
    message: str, color: Any = None, domain: Any = None, category: Any = None, payload: Any = None
) -> record_function:
    """Return a range of torch.profiler: scripted code has no other regions."""
    return record_function(message)


def mark(
    message: str = "", color: Any = None, domain: Any = None, category: Any = None, payload: Any = None
) -> None:
    """Show an empty range in torch.profiler."""
    with record_function(message):
        pass
