"""The command ``instrument``."""

from __future__ import annotations

import io
import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from . import __version__
from .commands.parsing import Group

SUBCOMMANDS = ("run", "summarize", "diagnose", "whatif", "compare", "syncs", "doctor")


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
        app()
    except KeyboardInterrupt:
        sys.exit(130)
