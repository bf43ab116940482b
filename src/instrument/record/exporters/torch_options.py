"""The options of `torch.profiler.profile` for a window: the defaults that `Detail` names, and early checks."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Literal, get_args

from ...base.compat import profilers
from ...base.interrupts import is_interrupt
from ..planning.schedule import SCHEDULE_OPTIONS

Detail = Literal["regions", "operators", "full"]
DETAILS = get_args(Detail)
_FULL = ("record_shapes", "profile_memory", "with_stack", "with_flops")
_OWN_ARGUMENTS = ("schedule", "on_trace_ready")
# Names that users may have meant by an option that torch does not know.
_PROFILE_ARGUMENTS = (
    "out",
    "schedule",
    "on_trace_ready",
    "exporter",
    "ranks",
    "first_step",
    "detail",
    "keep",
    "upload",
)


def options_for(detail: Detail, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that ``detail`` stands for, replaced by those in ``options``.

    Raises:
        TypeError: an option that torch.profiler does not know.
    """
    from torch.profiler import profile

    accepted = [name for name in inspect.signature(profile).parameters if name not in _OWN_ARGUMENTS]
    for name, value in options.items():
        if name not in accepted:
            raise TypeError(f'unknown option "{name}" (value {value!r}); {_hint(name, accepted)}')
    chosen = {**dict.fromkeys(_FULL if detail == "full" else (), True), **options}
    if hasattr(options.get("activities"), "__iter__"):
        chosen["activities"] = list(options["activities"])  # an iterator would serve one window only
    return chosen


def _hint(name: str, accepted: list[str]) -> str:
    if name in SCHEDULE_OPTIONS:
        return f"give a schedule: schedule=instrument.schedule({name}=...)"
    close = difflib.get_close_matches(name, [*accepted, *SCHEDULE_OPTIONS, *_PROFILE_ARGUMENTS], 1)
    return f'did you mean "{close[0]}"?' if close else f"torch.profiler takes {', '.join(accepted)}"


def check_values(given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise now for options that torch would refuse in the middle of a run, or never.

    Args:
        given: the options as the user gave them, for the message.
        options: those of all windows.

    Raises:
        TypeError, ValueError: a value is refused.
    """
    _check(given)
    try:
        if given:
            profilers.check_options(options)
    except Exception as error:  # torch's error does not name the argument
        if is_interrupt(error) or isinstance(error, (MemoryError, RecursionError)):
            raise
        shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(f"torch.profiler refuses {shown}: {error}") from error


def _check(options: Mapping[str, Any]) -> None:
    """Raise now for ``options`` that torch would refuse in the middle of a run, or never."""
    for name in ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules", "acc_events"):
        value = options.get(name, False)
        if value is None or not hasattr(value, "__bool__"):
            raise TypeError(f'"{name}" must be True or False: {value!r}')
    callback = options.get("custom_trace_id_callback")
    if callback is not None and not callable(callback):
        raise TypeError(f'"custom_trace_id_callback" must be a function without arguments: {callback!r}')
    observer = options.get("execution_trace_observer")
    missing = [name for name in ("start", "stop", "cleanup") if not callable(getattr(observer, name, None))]
    if observer is not None and missing:
        raise TypeError(f'"execution_trace_observer" must have the methods start, stop and cleanup: {observer!r}')
    timeout = options.get("post_processing_timeout_s")
    if timeout is not None and (isinstance(timeout, (bool, str)) or not hasattr(timeout, "__float__")):
        raise TypeError(f'"post_processing_timeout_s" must be a number of seconds >= 0: {timeout!r}')
