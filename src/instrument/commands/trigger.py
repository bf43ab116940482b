"""``instrument trigger``: opens a window in a program that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..printable import printable
from .errors import exit_unusable, print_message
from .parsing import subcommand_of


def trigger(
    target: Annotated[
        str, typer.Argument(metavar="PID|RUN", help="The number of a process, or the folder of a run.")
    ],
    steps: Annotated[
        int | None, typer.Option(min=1, help="The steps to record (default: as the program says).", metavar="N")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="The ranks that record, such as '0,7'.", metavar="RANKS")
    ] = None,
    reason: Annotated[
        str, typer.Option(help="The reason, for the manifest.", metavar="TEXT")
    ] = "instrument trigger",
) -> None:
    """Open a window in a program that runs.

    It opens at the next step or, in a job of several ranks, at a step about two seconds later.

    The program has the trigger "command": profile(..., triggers="command"), or instrument run --trigger command.
    With the folder of a run, each of its processes on this machine is asked. The command goes through a socket in
    that folder, which only the user of the program can use.

    The exit code is 0 if a process will record, 1 if none will, as there is none that answers or its rank is not
    chosen, and 2 for wrong arguments.
    """
    from ..windows.command_socket import sockets_of
    from . import options

    try:
        command: dict[str, Any] = {"steps": steps, "reason": reason}
        if ranks is not None:
            command["ranks"] = options.numbers(ranks)
        found = sockets_of(target)
    except ValueError as error:
        raise exit_unusable(error) from None
    except LookupError as error:
        print_message(str(error))
        raise typer.Exit(1) from None
    answers = [_ask(path, command) for path in found]
    if not any(answers):
        print_message("no process answers")
    if not any(answer and answer["opens"] for answer in answers):
        raise typer.Exit(1)


def _ask(path: Path, command: dict[str, Any]) -> dict[str, Any] | None:
    """Ask one process, and print its answer; return the answer, None if there is none."""
    from ..windows.command_socket import ask

    try:
        answer = ask(path, command)
    except (OSError, ValueError) as error:
        print_message(f"{printable(path.name)}: {error}")
        return None
    if answer is None:
        return None
    if "error" in answer:
        raise exit_unusable(ValueError(str(answer["error"])))
    about = ", ".join(f"{name} {answer[name]}" for name in ("process", "rank", "step"))
    typer.echo(printable(f"{about}: {_in_words(answer)}"))
    return answer


def _in_words(answer: dict[str, Any]) -> str:
    """Return what a process that answered will do."""
    agreed = f"in about {answer['within_s']:g} s" if answer["within_s"] else ""
    if answer["records"]:
        when = f"{agreed}, at the same step on all ranks that record" if agreed else "at the next step"
        return f"a window opens {when}"
    elsewhere = f"; a window opens {agreed} on those that do" if answer["opens"] else ""
    return f"this rank does not record{elsewhere}"


subcommand = subcommand_of(trigger)
