"""Settings: `configure` and the ``INSTRUMENT_*`` environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from . import log as events

EMITTERS = ("torch", "nvtx", "roctx", "itt", "jax", "proton")
RUN = "INSTRUMENT_RUN"
"""The environment variable by which ``instrument run`` requests a loop; holds the arguments of `Loop` as JSON."""
LAUNCHED = "INSTRUMENT_LAUNCHED"
"""Set if ``instrument run`` waits for the program, to print what the vendor's tool wrote."""
PROCESS = "INSTRUMENT_RUN_PROCESS"
"""The environment variable with the id of the process that ``instrument run`` becomes."""
NVTX_START_END = "INSTRUMENT_NVTX_START_END"
"""Set if the tool filters push/pop ranges by thread: every range is then a start/end range."""
_FALSE = ("0", "false", "no", "off")


class Settings:
    """The settings, each with its environment variable.

    Attributes:
        enabled: ``INSTRUMENT=0`` turns everything off; read once, when ``instrument`` is first used.
        emitters: ``INSTRUMENT_EMITTERS``: "auto" (each profiler that is attached), or the named ones, attached
            or not.
        summary: ``INSTRUMENT_SUMMARY=0``: print no summary after the last window.
        strict: ``INSTRUMENT_STRICT=1``: raise internal errors instead of containing them; for tests.
        dry_run: a dry run is in progress: no window opens, and live detection finds nothing.

    ``INSTRUMENT_LOG`` chooses how events are logged, as the argument ``log`` of `configure` does.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.enabled = environ.get("INSTRUMENT", "1").lower() not in _FALSE
        self.summary = environ.get("INSTRUMENT_SUMMARY", "1").lower() not in _FALSE
        self.strict = environ.get("INSTRUMENT_STRICT", "0").lower() not in ("", *_FALSE)
        self.dry_run = False
        self.listeners: list[Callable[[], None]] = []  # called after `configure` changed something
        events.output.format = _read(environ, "INSTRUMENT_LOG", parse_log, events.output.format)
        self.emitters: str | tuple[str, ...] = _read(environ, "INSTRUMENT_EMITTERS", parse_emitters, "auto")


def _read(environ: Mapping[str, str], variable: str, parse: Callable[[str], Any], default: str) -> Any:
    """Return the parsed value of an environment variable; ``default`` if it is not set, or not accepted."""
    value = environ.get(variable)
    try:
        return parse(value) if value else default
    except ValueError as error:  # an environment variable must not stop a training job
        events.warning(f"{variable} is ignored", reason=str(error))
        return default


def parse_log(value: str) -> str:
    """Return ``value`` if it is a format of the log.

    Raises:
        ValueError: it is not.
    """
    if value not in events.FORMATS:
        raise ValueError(f'"log" must be one of {", ".join(events.FORMATS)}: {value!r}')
    return value


def parse_emitters(value: Any) -> str | tuple[str, ...]:
    """Return "auto" or the names of emitters in ``value`` ("torch,nvtx" or an iterable of names).

    Raises:
        TypeError: neither a string nor an iterable.
        ValueError: an unknown name.
    """
    if value == "auto":
        return "auto"
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise TypeError(f'"emitters" must be a string or an iterable of names: {value!r}')
    names: tuple[str, ...] = tuple(value.split(",") if isinstance(value, str) else value)
    names = tuple(name.strip() if isinstance(name, str) else name for name in names if name != "")
    for name in names:
        if name not in EMITTERS:
            raise ValueError(f'"emitters" must be "auto" or names out of {", ".join(EMITTERS)}: {name!r}')
    return names


settings = Settings(os.environ)


def configure(
    *,
    emitters: str | Iterable[str] | None = None,
    summary: bool | None = None,
    strict: bool | None = None,
    log: Literal["quiet", "console", "json"] | None = None,
) -> None:
    """Change settings for this process; settings without an argument stay unchanged.

    Args:
        emitters: "auto", or the profilers that regions go to: names out of "torch", "nvtx", "roctx", "itt",
            "jax", "proton". Named emitters are used whether or not their tool is attached.
        summary: print the summary after the last window.
        strict: raise internal errors instead of logging them once and skipping the feature.
        log: how events such as ``window.closed`` go to the logger "instrument": as sentences ("quiet", the
            default, and "console") or each as a JSON object ("json"). "console" and "json" also write events at
            level INFO to standard error if the program configures no logging.

    Raises:
        TypeError, ValueError: ``emitters`` or ``log`` is not accepted.
    """
    if log is not None:
        events.output.format = parse_log(log)
    if emitters is not None:
        settings.emitters = parse_emitters(emitters)
    if summary is not None:
        settings.summary = bool(summary)
    if strict is not None:
        settings.strict = bool(strict)
    for listener in settings.listeners:
        listener()
