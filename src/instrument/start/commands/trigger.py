"""``instrument trigger``: opens a window in a program that runs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from ...base.printable import printable
from ...base.run_folder import entries_of, files_of
from .. import cli

_NAMED_WITHIN_S = 3.0  # how long the command waits for the window's name, if it does not wait for the files
_POLL_S = 0.2
_NO_WINDOW, _TOO_LATE, _INTERRUPTED = 1, 3, 130  # exit codes

Answer = dict[str, Any]


def trigger(
    target: str = cli.argument("PID|RUN", "The number of a process, or the folder of a run."),
    steps: int | None = cli.option("N", "The steps to record (default: as the program says).", min=1),
    ranks: str | None = cli.option("RANKS", "The ranks that record, such as '0,7'."),
    reason: str = cli.option("TEXT", "The reason, for the manifest.", default="instrument trigger"),
    wait: bool = cli.flag("--wait", "Wait until the files of the window are there, and print them."),
    timeout: float = cli.option("SECONDS", "How long --wait waits.", default=600.0, min=0),
) -> None:
    """Open a window in a program that runs, and say where its files will be.

    It opens at the next step or, in a job of several ranks, at a step about two seconds later.

    The program has the trigger "command": profile(..., triggers="command"), or instrument run --trigger command.
    With the folder of a run, each of its processes on this machine is asked. The command goes through a file in
    that folder, which only the user of the program can use.

    The exit code is 0 if a process will record, or with --wait if its files are there; 1 if none will, as there is
    none that answers, its rank is not chosen, or the window has no files; 2 for wrong arguments; 3 after
    --timeout. The request stays then, and after Ctrl-C.
    """
    from ...record.planning.command_files import commands_of
    from . import options

    request = uuid.uuid4().hex
    try:
        command: dict[str, Any] = {"steps": steps, "reason": reason, "id": request}
        if ranks is not None:
            command["ranks"] = options.numbers(ranks)
        files = commands_of(target)
    except ValueError as error:
        raise cli.exit_unusable(error) from None
    except LookupError as error:
        cli.print_message(str(error))
        raise typer.Exit(_NO_WINDOW) from None
    try:
        raise typer.Exit(_open(files, request, command, timeout if wait else None))
    except KeyboardInterrupt:
        cli.print_message("the request stays, and the window opens all the same")
        raise typer.Exit(_INTERRUPTED) from None


def _open(files: Sequence[Path], request: str, command: Answer, timeout: float | None) -> int:
    """Ask the processes, say their windows and, with a timeout, wait for the files; return the exit code."""
    answers = {path: _ask(path, command) for path in files}
    if not any(answers.values()):
        cli.print_message("no process answers")
    if not any(answer and answer["opens"] for answer in answers.values()):
        return _NO_WINDOW
    recording = {path: answer for path, answer in answers.items() if answer and answer["records"]}
    deadline = time.monotonic() + (_NAMED_WITHIN_S if timeout is None else timeout)
    windows = [_window(path, request, answer, deadline) for path, answer in recording.items()]
    if timeout is None:
        return _NO_WINDOW if windows and all(window == {} for window in windows) else 0
    return max((_print_files(window, _line_of(window, deadline)) for window in windows), default=0)


def _ask(path: Path, command: Mapping[str, Any]) -> Answer | None:
    """Ask one process, and print its answer; return the answer, None if there is none."""
    answer = _answer_of(path, command)
    if answer is None:
        return None
    if "error" in answer:
        raise cli.exit_unusable(answer["error"])
    about = ", ".join(f"{name} {answer[name]}" for name in ("process", "rank", "step"))
    typer.echo(printable(f"{about}: {_in_words(answer)}"))
    return answer


def _answer_of(path: Path, command: Mapping[str, Any]) -> Answer | None:
    from ...record.planning.command_files import ask

    try:
        return ask(path, command)
    except OSError as error:
        cli.print_message(f"{printable(path.name)}: {error}")
        return None


def _in_words(answer: Answer) -> str:
    """Return what a process that answered will do."""
    agreed = f"in about {answer['within_s']:g} s" if answer["within_s"] else ""
    if answer["records"]:
        when = f"{agreed}, at the same step on all ranks that record" if agreed else "at the next step"
        return f"a window opens {when}"
    elsewhere = f"; a window opens {agreed} on those that do" if answer["opens"] else ""
    return f"this rank does not record{elsewhere}"


def _window(path: Path, request: str, answer: Answer, deadline: float) -> Answer | None:
    """Say and return the window that serves the request in one process; None if it is not known in time.

    It is empty if the program ended before.
    """

    def named() -> Answer | None:
        window = _answer_of(path, {"window_of": request})
        if window is None:
            return {}
        return window if window.get("window") is not None else None

    window = _before(deadline, named)
    if window is None:
        still = "the window is not known yet, as the current step still runs"
        text = f"{still}; its files will be in a folder of {path.parent}"
    elif window:
        text = f"window {window['window']}, whose files will be in {window['folder']}"
    else:
        text = "the program ended before the window opened"
    typer.echo(printable(f"rank {answer['rank']}: {text}"))
    return window


def _line_of(window: Answer | None, deadline: float) -> Answer | None:
    """Wait for the line of a window in the manifest, which is written after its files; None after the deadline."""
    if not window:
        return None
    keys = ("run", "rank", "window")

    def written() -> Answer | None:
        entries = entries_of(Path(window["folder"]).parent)
        return next((each for each in entries if all(each.get(key) == window[key] for key in keys)), None)

    return _before(deadline, written)


def _before(deadline: float, read: Callable[[], Answer | None]) -> Answer | None:
    """Return what ``read()`` returns first other than None; None after the deadline."""
    while (answer := read()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return answer


def _print_files(window: Answer | None, line: Answer | None) -> int:
    """Print the files of a window, or why there are none; return the exit code."""
    if window == {}:
        return _NO_WINDOW
    if window is None or line is None:
        where = f", and the window's files will be in {window['folder']}" if window else ""
        cli.print_message(printable(f"no files within the time of --timeout; the request stays{where}"))
        return _TOO_LATE
    files = files_of(line)
    for name in files:
        typer.echo(printable(str(Path(window["folder"]).parent / name)))
    if line.get("reason"):
        cli.print_message(printable(f"window {window['window']} is {line['status']}: {line['reason']}"))
    return 0 if files else _NO_WINDOW


subcommand = cli.subcommand_of(trigger)
