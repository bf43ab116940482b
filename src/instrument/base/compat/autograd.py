"""Autograd: whether a backward pass runs, its nodes, and hooks on them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from .operators import without_modes


def autograd_functions() -> tuple[Callable[[], int], Callable[[], int], Callable[[Any], None]] | None:
    """Return functions for the number of the next autograd node, the number of the backward pass, and its end.

    The third registers a callback for the end of the backward pass. Each thread numbers nodes in the order in
    which its forward makes them; backward runs those that are ready in the reverse order. Outside a backward
    pass, the number of the pass is -1.

    Returns:
        The functions, or None if this version of torch lacks one of them; backward regions are then missing.
    """
    import torch

    number = getattr(torch.autograd, "_get_sequence_nr", None)
    task = getattr(torch._C, "_current_graph_task_id", None)
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if number is None or task is None or not hasattr(engine, "queue_callback"):
        return None
    return number, task, engine.queue_callback


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread."""
    task = getattr(getattr(sys.modules.get("torch"), "_C", None), "_current_graph_task_id", None)
    return task is not None and task() != -1


def autograd_node() -> str | None:
    """Return the name of the autograd node that runs on this thread, as "MulBackward0"; None outside any."""
    node = getattr(getattr(sys.modules.get("torch"), "_C", None), "_current_autograd_node", None)
    running = node() if node is not None else None
    return running.name() if running is not None else None


def node_functions() -> tuple[Callable[[], Any], Callable[[], int]] | None:
    """Return functions for the autograd node that runs on this thread, if any, and the number of the next one.

    ``node._sequence_nr()`` is the number of a node, in the order of `autograd_functions`. The result is None if
    this version of torch lacks one of the names; operators of the backward pass then have no place.
    """
    import torch

    node = getattr(torch._C, "_current_autograd_node", None)
    number = getattr(torch.autograd, "_get_sequence_nr", None)
    return None if node is None or number is None else (node, number)


def backward_runner() -> tuple[Any, str] | None:
    """Return the owner and the name of the function that runs every backward pass; None without it."""
    import torch

    return (torch.autograd, "_engine_run_backward") if hasattr(torch.autograd, "_engine_run_backward") else None


def before_node() -> Callable[[Any, Callable[[Any], None]], Any]:
    """Return a function ``attach(node, hook)``: the hook is called before the autograd node runs.

    `Node.register_prehook` makes a handle for each hook. `Node._register_hook_dict`, which `Tensor.register_hook`
    calls, makes none and costs a third. It takes the hooks of a tensor, so each thread keeps an empty tensor.
    """
    import torch
    from torch.autograd.graph import Node

    if not hasattr(Node, "_register_hook_dict"):
        return lambda node, hook: node.register_prehook(hook)

    unused: list[torch.Tensor] = []

    class _Carrier:
        def __init__(self) -> None:
            try:
                self.tensor = unused.pop()
            except IndexError:
                with without_modes():  # selective checkpointing keeps a list of the operators of its forward
                    self.tensor = torch.empty(0, device="cpu")  # the program may have set another default device

        def __del__(self) -> None:
            # CPython up to 3.12.3 crashes if the end of a thread of C code frees a tensor.
            unused.append(self.tensor)

    class _ThreadState(threading.local):
        def __init__(self) -> None:
            self.carrier = _Carrier()

    state = _ThreadState()

    def attach(node: Any, hook: Callable[[Any], None]) -> None:
        carrier = state.carrier.tensor
        carrier._backward_hooks = {0: hook}
        node._register_hook_dict(carrier)

    return attach


# Files of torch that call operators, custom functions, backward passes and compiled functions
_CALLERS = tuple(
    f"torch/{path}".replace("/", os.sep)
    for path in ("autograd/function.py", "autograd/graph.py", "_ops.py", "_dynamo/eval_frame.py")
)


def in_operator() -> bool:
    """Return whether this thread is inside an operator, a backward node or a compiled function.

    torch opens and closes the profiler's ranges of these in C++.
    """
    if in_backward():
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__torch_dispatch__" or code.co_filename.endswith(_CALLERS):
            return True
        frame = frame.f_back
    return False
