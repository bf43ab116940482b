"""Every private name of torch and nvtx that the library touches, each with what happens where it is missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

_EMITTING = {"emit_nvtx": "NVTX", "emit_itt": "ITT"}  # torch's profilers that make ranges for another tool
_emitting = "NONE"  # the target of the one that is running

TOOL_FREE_INJECTION = "./."  # what NVTX_INJECTION64_PATH holds when a tool asked for "no injection"


def range_functions() -> tuple[Callable[[str], Any], Callable[[Any], None]]:
    """Return functions that open and close a torch.profiler range of category ``user_annotation``.

    The autograd pair costs a third of `torch.profiler.record_function`, which is what older or newer
    versions of torch without it fall back to.
    """
    import torch

    enter = getattr(torch.autograd, "_record_function_with_args_enter", None)
    leave = getattr(torch.autograd, "_record_function_with_args_exit", None)
    if enter is not None and leave is not None:
        return enter, leave

    def enter_record_function(name: str) -> Any:
        record = torch.profiler.record_function(name)
        record.__enter__()
        return record

    return enter_record_function, lambda record: record.__exit__(None, None, None)


def profiler_running() -> bool:
    """Tell whether a torch profiler records on this thread."""
    torch = sys.modules.get("torch")
    enabled = getattr(getattr(torch, "autograd", None), "_profiler_enabled", None)
    return bool(enabled()) if enabled is not None else False


def profiler_target() -> str:
    """Return what the running torch profiler turns its ranges into: "KINETO", "NVTX", "ITT", ... or "NONE".

    torch tells that on the thread that started the profiler alone; on others, what `on_profiler` saw is told.
    """
    torch = sys.modules.get("torch")
    kind = getattr(getattr(getattr(torch, "_C", None), "_autograd", None), "_profiler_type", None)
    target = kind().name if kind is not None else "KINETO"
    return _emitting if target == "NONE" else target


def on_profiler(started: Callable[[], None], stopped: Callable[[], None]) -> bool:
    """Call ``started`` just before any torch profiler of the process starts and ``stopped`` after it stopped.

    Where one runs already, ``started`` is called at once.

    Returns:
        False where this version of torch has no place for it: then only windows of `instrument.profile`
        are heard of, and plain ``torch.profiler.profile`` blocks hold no regions.
    """
    from torch.autograd import profiler

    try:
        start, stop = profiler._run_on_profiler_start, profiler._run_on_profiler_stop
    except AttributeError:
        return False

    def run_on_profiler_start() -> None:
        global _emitting
        caller = sys._getframe(1).f_locals.get("self")  # the profiler, in its __enter__
        _emitting = _EMITTING.get(type(caller).__name__, "NONE")
        started()
        start()

    def run_on_profiler_stop() -> None:
        global _emitting
        _emitting = "NONE"
        stop()
        stopped()

    profiler._run_on_profiler_start = run_on_profiler_start
    profiler._run_on_profiler_stop = run_on_profiler_stop
    if getattr(profiler, "_is_profiler_enabled", False):
        started()
    return True


def nvtx_injected() -> bool:
    """Tell whether a tool asked the NVTX of this process to load its library."""
    return os.environ.get("NVTX_INJECTION64_PATH", "") not in ("", TOOL_FREE_INJECTION)


def nvtx_domain(name: str) -> Any:
    """Return the `nvtx.Domain` called ``name``, or None when no tool listens.

    nvtx asks the tool whether it listens. Nsight Systems up to 2024.2 does not know the question,
    which reads as "no": every range would be lost. There, the domain is built around that check.
    """
    import nvtx

    domain = nvtx.get_domain(name)
    if type(domain).__name__ != "DummyDomain":
        return domain
    if not nvtx_injected():
        return None
    from nvtx._lib import lib

    try:
        domain = object.__new__(lib.Domain)
        domain.handle = lib.DomainHandle(name)
        domain.__init__(name)
    except (AttributeError, TypeError):
        return None
    return domain


def when_imported(name: str, call: Callable[[Any], None]) -> None:
    """Call ``call(module)`` once the module ``name`` is imported; import nothing now."""
    import wrapt

    wrapt.register_post_import_hook(call, name)
