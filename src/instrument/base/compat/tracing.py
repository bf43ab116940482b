"""How Dynamo, which traces the functions of torch.compile, can be followed and given other tensors.

Each function has a fallback for versions of torch that lack what it uses: compiled functions then run as Dynamo
runs them, and nothing is known of them.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from . import operators

Change = tuple[Any, str, Callable[[Any], Any]]  # owner, name, and the function that makes the replacement


@functools.cache
def can_follow() -> bool:
    """Return whether this version of torch has all that is needed."""
    try:
        from torch._dynamo import eval_frame, guards, output_graph, types, utils
        from torch._dynamo.variables.tensor import TensorVariable
        from torch.utils import _python_dispatch
    except ImportError:
        return False
    return (
        hasattr(eval_frame, "_callback_from_stance")
        and hasattr(types, "ConvertFrameReturn")
        and hasattr(guards.GuardBuilder, "TORCH_FUNCTION_STATE")
        and hasattr(output_graph.OutputGraph, "call_user_compiler")
        and hasattr(utils, "graph_break_reasons")
        and hasattr(utils, "set_torch_function_mode_stack")
        and hasattr(TensorVariable, "specialize")
        and hasattr(_python_dispatch, "_get_current_dispatch_mode_stack")
        and hasattr(_python_dispatch, "is_in_any_mode_without_ignore_compile_internals")
    )


def stance_applier() -> list[tuple[Any, str]]:
    """Return the function that chooses what compiled functions call for each frame, as owner and name."""
    from torch._dynamo import eval_frame

    return [(eval_frame, "_callback_from_stance")] if hasattr(eval_frame, "_callback_from_stance") else []


def left_alone() -> Any:
    """Return the answer that leaves a frame as it is."""
    from torch._dynamo.types import ConvertFrameReturn

    return ConvertFrameReturn()


def user_errors() -> tuple[type[BaseException], ...]:
    """Return the errors of tracing that a program is meant to see, such as those of ``fullgraph=True``."""
    from torch._dynamo import exc

    names = ("Unsupported", "UserError", "RecompileError", "RecompileLimitExceeded", "FailOnRecompileLimitHit")
    return tuple(getattr(exc, name) for name in names if hasattr(exc, name))


def graph_breaks() -> list[Any]:
    """Return torch's list of graph breaks, each with ``reason`` and ``user_stack``, which grows."""
    from torch._dynamo import utils

    reasons: list[Any] = utils.graph_break_reasons
    return reasons


def break_reason(broken: Any) -> str:
    """Return the reason of a graph break in a line."""
    reason = str(broken.reason).partition("\n")[0]
    return "a branch on the value of a tensor" if reason.startswith("generic_jump") else reason


def recompilation_reason(code: CodeType) -> str:
    """Return why ``code`` was compiled once more, in a line: the check that failed; empty if it is not known."""
    reasons = getattr(sys.modules.get("torch._dynamo.utils"), "guard_failures", {}).get(code)
    match = re.match(r"(?:\d+/\d+: )?(.*?)\s*(?:  #|\n|$)", str(reasons[-1])) if reasons else None
    return match.group(1) if match else ""


def warm_up() -> str:
    """Have Dynamo fill its tables of torch's functions, and forget what it compiled; its counters stay.

    Return why Dynamo cannot be followed; empty if it can.
    """
    if not can_follow():
        return "this version of torch is not known"
    import torch
    from torch._dynamo import utils

    counters: Any = utils.counters
    before = {name: Counter(counter) for name, counter in counters.items()}
    function = eval("lambda x: torch.relu(x) + 1", {"torch": torch})  # code of this package would be skipped
    compiled: Any = torch.compile(function, backend="eager")
    try:
        compiled(torch.ones(2))
    except Exception as error:  # torch's own: compiling needs a compiler, or packages, that are not there
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    finally:
        reset()
        counters.clear()
        counters.update(before)
    return ""


def reset() -> None:
    """Have torch.compile forget what it compiled."""
    import torch

    forget: Any = torch.compiler.reset
    forget()


def changes(
    fakes: Any, run_graph: Callable[[Any], Any], pretending: dict[str, Callable[[Any], Any]]
) -> list[Change]:
    """Return what must be changed while Dynamo traces.

    Args:
        fakes: torch's class of modes of fake tensors.
        run_graph: makes the function that compiles a graph.
        pretending: the makers of ``from_tensor`` and ``dispatch`` of that class, and of ``specialize``, which
            returns what is known of a fake tensor.
    """
    from torch._dynamo import guards, output_graph
    from torch._dynamo.variables.tensor import TensorVariable

    return [
        (fakes, "from_tensor", pretending["from_tensor"]),
        (fakes, "dispatch", pretending["dispatch"]),
        (fakes, "avoid_device_init", lambda _: property(lambda mode: True)),
        (TensorVariable, "specialize", pretending["specialize"]),
        (output_graph.OutputGraph, "call_user_compiler", run_graph),
        (guards.GuardBuilder, "TORCH_FUNCTION_STATE", _guard_of_modes),
    ]


def _guard_of_modes(original: Any) -> Any:
    """Return the maker of a guard on the function modes that are on, which are others when the code runs."""

    def guard(builder: Any, made: Any) -> None:
        if operators.function_modes():
            original(builder, made)

    return guard


@contextmanager
def without_modes(functions: tuple[type, ...], dispatch: tuple[type, ...]) -> Iterator[None]:
    """Run the block without the modes of these classes."""
    from torch._dynamo.utils import set_torch_function_mode_stack
    from torch.utils import _python_dispatch

    above = operators.function_modes()
    below = _python_dispatch._get_current_dispatch_mode_stack()
    try:
        set_torch_function_mode_stack([mode for mode in above if not isinstance(mode, functions)])
        _set_dispatch_modes([mode for mode in below if not isinstance(mode, dispatch)])
        yield
    finally:
        _set_dispatch_modes(below)
        set_torch_function_mode_stack(above)


def _set_dispatch_modes(modes: list[Any]) -> None:
    from torch.utils import _python_dispatch

    for _ in _python_dispatch._get_current_dispatch_mode_stack():
        _python_dispatch._pop_mode()
    for mode in modes:
        _python_dispatch._push_mode(mode)
