"""Checks the options of the commands, alone and in combination, and converts them to arguments of the library."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import typer

from ...record.allocator_history.options import MemoryHistory
from ...record.exporters.exporter import exporter_of_tool
from ...record.handover.storage import Keep, Storage, masked
from ...record.planning.ranks import check_text
from ...record.planning.schedule import Schedule
from ...record.planning.triggers import Triggers
from ...record.windows.steps import CYCLE, SCHEDULE_OPTIONS, schedule_of
from ..launch import VENDORS

T = TypeVar("T")
NAMES = {
    '"ranks"': "--ranks",
    '"triggers"': "--trigger",
    '"upload"': "--upload",
    '"upload_timeout"': "--upload-timeout",
}
"""The options behind arguments of the library, which its errors name."""
TORCH_OPTIONS = {"shapes": "record_shapes", "stacks": "with_stack"}
MEMORY_EVENTS = "events"  # what --memory means alone
MEMORY_ACCEPTED = (
    "events, or snapshot with options such as snapshot,stacks=all,entries=50000,size=1GB,every=10m, each once"
)
_SNAPSHOT = "snapshot"
_STORAGE = ("keep", "upload", "upload_timeout")
# Options that choose windows, and their content.
_ONLY_TORCH = ("detail", "diagnose", *_STORAGE, *TORCH_OPTIONS, "memory")
_WINDOWS = ("steps", *SCHEDULE_OPTIONS, "trigger", "black_box", "out", "ranks", "compile_log", *_ONLY_TORCH)
_NEEDS = {
    "region": ("ncu",),
    "launches": ("ncu",),
    "option": tuple(VENDORS),
    **dict.fromkeys(_ONLY_TORCH, ("torch", "auto")),
}


def given(ctx: typer.Context) -> dict[str, Any]:
    """Return the options given on the command line, by the names of their parameters."""
    sources = ((name, ctx.get_parameter_source(name)) for name in ctx.params)
    return {
        name: ctx.params[name] for name, source in sources if source is not None and source.name == "COMMANDLINE"
    }


def as_typed(options: Mapping[str, Any]) -> list[str]:
    """Return the options that choose windows, as they were typed."""
    given = [(_typed(name), options[name]) for name in _WINDOWS if name in options]
    return [
        name if value is True else f"{name} {masked(str(value))}"
        for name, values in given
        for value in (values if isinstance(values, list) else [values])
    ]


def _typed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def reject_useless(options: Mapping[str, Any], profiler: str) -> None:
    """Reject options that have no effect with ``profiler`` or with another option.

    Raises:
        ValueError: the first of them, with the profilers that it needs.
    """
    if "names" in options and options.get("modules") == "none":
        raise ValueError("--names has no effect with --modules none")
    snapshot = options.get("memory", MEMORY_EVENTS) != MEMORY_EVENTS
    for name in options:
        needed = _NEEDS.get(name)
        if name == "memory" and snapshot:
            needed = ("torch", "none", "auto")
        if needed is not None and profiler not in needed:
            which = " or ".join(filter(None, (", ".join(needed[:-1]), needed[-1])))
            raise ValueError(
                f"{_typed(name)} has no effect with --profiler {profiler}: it needs --profiler {which}"
            )
        if profiler == "none" and name in _WINDOWS and not snapshot:
            opens = "which opens windows with --memory snapshot alone"
            raise ValueError(f"{_typed(name)} has no effect with --profiler none, {opens}")
    if profiler in VENDORS and "ranks" in options and options.get("steps") == "all":
        raise ValueError(
            f"--ranks has no effect with --steps all and --profiler {profiler}, which then records every rank"
        )


def ignored_options(options: Mapping[str, Any]) -> str | None:
    """Return a message about options that only torch.profiler has, if another tool records this process."""
    names = [_typed(name) for name in _ONLY_TORCH if name in options]
    tool = exporter_of_tool() if names else None
    if tool is None:
        return None
    return f"ignored under {tool.replace('_', ' ')}, as only torch.profiler has them: {', '.join(names)}"


def storage(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``--keep``, ``--upload`` and ``--upload-timeout`` as `loop_from_environment` takes them.

    Args:
        options: the options that were given.

    Raises:
        ValueError: one of them is not accepted, or has no effect.
    """
    if "upload_timeout" in options and "upload" not in options:
        raise ValueError("--upload-timeout has no effect without --upload")
    made = {name: options[name] for name in _STORAGE if name in options}
    if "keep" in made:
        text, accepted = made["keep"], "limits such as windows=20,age=7d,total=50G, each once"
        made["keep"] = _made(Keep, text.split(","), "--keep", text, accepted)
    Storage(**made)
    return made | {"keep": asdict(made["keep"])} if "keep" in made else made


def _made(kind: type[T], parts: list[str], option: str, text: str, accepted: str) -> T:
    """Return the dataclass ``kind`` with the arguments in ``parts``, each ``name=value``.

    Args:
        kind: the dataclass.
        parts: the arguments.
        option: the option, for the error.
        text: its whole value.
        accepted: what it accepts.

    Raises:
        ValueError: the text has another form, or an argument is not accepted.
    """
    given = [part.strip().partition("=") for part in parts]
    arguments: dict[str, Any] = {name: int(value) if value.isdecimal() else value for name, _, value in given}
    if len(arguments) != len(given) or not arguments.keys() <= signature(kind).parameters.keys():
        raise ValueError(f"{option} must be {accepted}: {text}")
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{option} {text}: {error}") from None


def is_memory(text: str) -> bool:
    """Return whether ``text`` is a value of ``--memory``, rather than the program after it."""
    return text == MEMORY_EVENTS or text.partition(",")[0] == _SNAPSHOT


def memory(text: str) -> dict[str, Any]:
    """Return ``--memory`` as `loop_from_environment` takes it.

    Raises:
        ValueError: the text has another form, or an option in it is not accepted.
    """
    if text == MEMORY_EVENTS:
        return {"profile_memory": True}
    what, _, rest = text.partition(",")
    if what != _SNAPSHOT:
        raise ValueError(f"--memory must be {MEMORY_ACCEPTED}: {text}")
    parts = rest.split(",") if rest else []
    return {"memory": asdict(_made(MemoryHistory, parts, "--memory", text, MEMORY_ACCEPTED))}


def schedule_arguments(steps: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the schedule, as `instrument.steps` takes them.

    Without ``--steps`` and ``--every``, options that are not given have the defaults of `CYCLE`.

    Args:
        steps: the value of ``--steps``.
        options: those of `SCHEDULE_OPTIONS` that were given.

    Raises:
        ValueError: the options cannot be combined; the message names them.
    """
    if steps == "all":
        if options:
            names = ", ".join(f"--{name}" for name in options)
            raise ValueError(f"{names} cannot be combined with --steps all, which records the whole run")
        return {"at": 0, "active": sys.maxsize}
    refused: dict[str, tuple[str, ...]] = {"--every": ("wait",)} if "every" in options else {}
    if steps is not None:
        refused = {"a range in --steps": ("active",)} if "-" in steps else {}
        refused["--steps"] = ("wait", "repeat", "every")
    for option, others in refused.items():
        for name in others:
            if name in options:
                raise ValueError(f"--{name} cannot be combined with {option}")
    if steps is not None:
        made = {**options, "at": steps}
    elif options and "every" not in options:
        made = {**CYCLE, **options}
    else:
        made = dict(options)
    try:
        schedule_of(None, made)
    except ValueError as error:
        raise ValueError(_as_options(str(error))) from None
    return made


def _as_options(message: str) -> str:
    """Return an error of `instrument.schedule` with the names of the command line's options."""
    message = re.sub(rf"\b({'|'.join(SCHEDULE_OPTIONS)})=(\d+)", r"--\1 \2", message)
    return re.sub(rf'"({"|".join(SCHEDULE_OPTIONS)})"', r"--\1", message.replace('"at"', "--steps"))


def triggers(texts: list[str], folder: Path) -> list[str]:
    """Return the values of ``--trigger``, once they are checked.

    Raises:
        ValueError: one of them is not accepted.
    """
    Triggers(texts, folder, 1)
    return texts


def levels(modules: str) -> int | bool | None:
    """Return ``--modules`` as `instrument.annotate_modules` takes it: None for all, False for none.

    Raises:
        ValueError: ``modules`` is neither a number nor one of these.
    """
    if modules in ("all", "none"):
        return None if modules == "all" else False
    if not modules.isdecimal():
        raise ValueError(f'--modules must be a number of levels, "all" or "none": {modules}')
    return int(modules)


def ranks(text: str) -> list[int] | str:
    """Return ``--ranks`` as `instrument.profile` takes it; the ranks of the job are known to its processes alone.

    Raises:
        ValueError: the text is not accepted.
    """
    if "=" not in text:
        return numbers(text)
    check_text(text)
    return text


def numbers(ranks: str) -> list[int]:
    """Return the ranks that ``--ranks`` lists.

    Raises:
        ValueError: the text is not a list of integers.
    """
    if not all(rank.strip().isdecimal() for rank in ranks.split(",")):
        raise ValueError(f"--ranks must be numbers such as 0,8: {ranks}")
    return [int(rank) for rank in ranks.split(",")]


def windows(loop: Mapping[str, Any]) -> int | None:
    """Return the number of windows; None if endless, 0 for the whole run."""
    if loop.get("active") == sys.maxsize:
        return 0
    if loop.get("triggers") or loop.get("black_box"):
        return None
    named = {name: loop[name] for name in SCHEDULE_OPTIONS if name in loop}
    made = schedule_of(None, named)
    return made.count if isinstance(made, Schedule) else None


def parse_budgets(given: list[str]) -> dict[str, int] | None:
    """Return the budget of each region, from texts ``REGION=N``; None if there are none.

    Raises:
        ValueError: a text has another form.
    """
    budgets = {}
    for text in given:
        region, _, number = text.rpartition("=")
        if not region or not number.isdecimal():
            raise ValueError(f"--budget must be REGION=N: {text}")
        budgets[region] = int(number)
    return budgets or None
