"""The command ``instrument``."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer

from . import __version__
from .commands.errors import describe_unwritten, print_message
from .commands.parsing import Group

SUBCOMMANDS = (
    "run",
    "trigger",
    "summarize",
    "diagnose",
    "open",
    "whatif",
    "compare",
    "slim",
    "merge",
    "memory",
    "syncs",
    "doctor",
)


class Subcommands(Group):
    """Imports the module of a subcommand when it is used: ``instrument run`` needs no reader of traces."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help."""
        return list(SUBCOMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a subcommand; None if there is none of this name, for which typer suggests one."""
        for name in (cmd_name,) if cmd_name in SUBCOMMANDS else SUBCOMMANDS:
            self.commands[name] = import_module(f".commands.{name}", __package__).subcommand
        return self.commands.get(cmd_name)


app = typer.Typer(
    cls=Subcommands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[bool, typer.Option("--version", callback=_version, help="Print the version.")] = False,
) -> None:
    """Record the steps of a program, summarize and diagnose traces, and find lines that wait for the GPU."""


def main() -> None:
    """Run the command line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may lack characters of a name
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.filename is not None:  # not of a stream
            raise
        _discard_output()
        if error.errno == errno.EPIPE:  # its reader has read enough
            sys.exit(1)
        print_message(describe_unwritten(error))
        sys.exit(1)


def _discard_output() -> None:
    """Send what the buffer of standard output holds nowhere, so that Python does not fail again as it exits."""
    if sys.__stdout__ is not None:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
