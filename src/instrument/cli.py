"""The command ``instrument``."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from . import __version__
from .commands.doctor import doctor
from .commands.parsing import Command, Group
from .commands.run import BeforeProgram, run
from .commands.summarize import summarize
from .commands.syncs import WithArguments, syncs

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command(cls=BeforeProgram, context_settings={"allow_interspersed_args": False})(run)
app.command(cls=Command)(summarize)
app.command(cls=WithArguments)(syncs)
app.command(cls=Command)(doctor)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[bool, typer.Option("--version", callback=_version, help="Print the version.")] = False,
) -> None:
    """Record the steps of a program, summarize traces, and find the lines that make the CPU wait for the GPU."""


def main() -> None:
    """Run the command line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may lack characters of a name
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
