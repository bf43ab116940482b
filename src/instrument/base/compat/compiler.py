"""What compiles or captures modules (torch.compile, TorchScript, CUDA graphs), and torch's log of compilation."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

from ..live_objects import live_objects


def frame_evaluation() -> Callable[[Any], Any] | None:
    """Return a function that sets how torch.compile evaluates frames of this thread, and returns the last setting.

    Called with None, the function turns evaluation off. Return None if this version of torch lacks it.
    """
    try:
        from torch._C._dynamo.eval_frame import set_eval_frame
    except ImportError:
        return None
    setter: Callable[[Any], Any] = set_eval_frame
    return setter


def skip_code() -> Callable[[CodeType], None] | None:
    """Return a function that excludes code from torch.compile, except where the code is inlined.

    Return None if this version of torch lacks it: torch.compile may then compile the library's own code.
    """
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return None
    if hasattr(eval_frame, "skip_code"):  # torch 2.6
        skip: Callable[[CodeType], None] = eval_frame.skip_code
        return skip
    try:
        action = eval_frame._FrameAction
        alone = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
        choose = eval_frame.set_code_exec_strategy
    except (AttributeError, TypeError):
        return None
    return lambda code: choose(code, alone)


_EVAL_FRAME = "torch/_dynamo/eval_frame.py".replace("/", os.sep)


def in_compiled_call(frame: FrameType | None) -> bool:
    """Return whether ``frame`` is in a call of a function that torch.compile returned."""
    while frame is not None:
        code = frame.f_code
        if (
            code.co_name in ("compile_wrapper", "_fn")
            and code.co_filename.endswith(_EVAL_FRAME)
            and not _is_of_disabled(code)
        ):
            return True
        frame = frame.f_back
    return False


def _is_of_disabled(code: CodeType) -> bool:
    """Return whether ``code`` is that of a function that torch.compile leaves alone, such as `LBFGS.step`."""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "DisableContext", None)
    return kind is not None and any(code is other for other in kind.__call__.__code__.co_consts)


def compiled_call_end() -> tuple[Any, str] | None:
    """Return the function that each compiled call ends with, as owner and name; None before Dynamo is imported."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return (module, "_maybe_set_eval_frame") if hasattr(module, "_maybe_set_eval_frame") else None


def own_name(function: str) -> str:
    """Return the name of the function that the program defines, given that of a part which torch.compile made."""
    match = _RESUMED.fullmatch(function)
    return match.group(1) if match else function


_RESUMED = re.compile(r"(?:.*\.)?torch_dynamo_resume_in_(.+)_at_\d+")


def graphs_compiled() -> bool:
    """Return whether torch.compile made any graph in this process."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("stats", {}).get("unique_graphs"))


def compilers() -> list[tuple[Any, str]]:
    """Return the context of each compilation by Dynamo, as its owner and name, once that is imported."""
    callbacks = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    return [(callbacks, "install_callbacks")] if hasattr(callbacks, "install_callbacks") else []


def scripters() -> list[tuple[Any, str]]:
    """Return the function behind `torch.jit.script` and `torch.jit.trace`, as its owner and name."""
    return _owners("create_script_module", ("torch.jit._recursive",))


def graph_makers() -> list[tuple[Any, str]]:
    """Return each imported module's ``make_graphed_callables`` as its owner and name.

    The function makes CUDA graphs of modules, and refuses modules that have hooks. Several modules import it, so
    a patch has to replace it in each.
    """
    return _owners("make_graphed_callables", GRAPH_MAKERS)


GRAPH_MAKERS = (
    "torch.cuda",
    "torch.cuda.graphs",
    "torch.xpu",
    "torch.xpu.graphs",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.graph",
)


def _owners(name: str, modules: Iterable[str]) -> list[tuple[Any, str]]:
    loaded = map(sys.modules.get, modules)
    return [(module, name) for module in loaded if hasattr(module, name)]


def compiled_module() -> Any:
    """Return the class of the result of ``torch.compile(module)``; None before Dynamo is imported."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)


COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module that torch calls instead of ``_call_impl`` if it is not None."""


def has_compiled_call() -> bool:
    """Return whether modules have the attribute `COMPILED_CALL`; without it their calls cannot be followed."""
    from torch import nn

    return COMPILED_CALL in vars(nn.Module)


def called_compiled(module: Any) -> Any:
    """Return the compiled module made by ``torch.compile(module)`` that this thread is calling, else None."""
    kind = compiled_module()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and kind is not None:
        if frame.f_code.co_name == "_wrapped_call_impl":
            called = frame.f_locals.get("self")
            if isinstance(called, kind) and called._orig_mod is module:
                return called
        frame = frame.f_back
    return None


def compiled_in_place() -> list[Any]:
    """Return the modules compiled by ``module.compile()``; with Dynamo, see `live_objects` for the time."""
    from torch import nn

    if "torch._dynamo" not in sys.modules:
        return []
    return [module for module in live_objects(nn.Module) if vars(module).get(COMPILED_CALL) is not None]


class _Handler(logging.Handler):
    """Calls ``write`` with the text of each record."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(self.format(record))


def follow_compile_trace(write: Callable[[str], None]) -> Callable[[], None] | None:
    """Have ``write`` called with the text of each record, on the thread that compiles; it must not raise.

    Returns:
        A function that ends this; None if this version of torch lacks the log.
    """
    try:
        from torch._logging._internal import TorchLogsFormatter, trace_log

        formatter = TorchLogsFormatter(trace=True)
    except (ImportError, TypeError):
        return None
    handler = _Handler(write)
    handler.setFormatter(formatter)
    trace_log.addHandler(handler)
    return lambda: trace_log.removeHandler(handler)
