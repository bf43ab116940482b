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
from typer.core import TyperCommand

from .. import __version__
from .commands.command import Group, describe_unwritten, print_message

SUBCOMMANDS = {
    "run": "Run a program, record its steps and print a summary; the program needs no change.",
    "trigger": "Open a window in a program that runs, and say where its files will be.",
    "summarize": "Show where the time of the recorded steps went, by region and by operator.",
    "diagnose": "Say what is slow in a trace, why, and what a fix would win.",
    "open": "Show the diagnosis of a trace in the browser, and its findings in Perfetto.",
    "whatif": "Predict how long a step would be with a change, and show the critical path.",
    "compare": "Say whether the steps of a program became faster or slower, and which parts of a step changed.",
    "slim": "Write a smaller trace that gives the same metrics and findings.",
    "merge": "Write one trace of several ranks, on one clock, for Perfetto and chrome://tracing.",
    "memory": "Show what used the memory of a GPU at its peak: by category, line, module and region.",
    "syncs": "Find the lines that make the CPU wait for the GPU; no GPU is needed.",
    "doctor": "Check what is installed, what each profiler records here, and whether ranges arrive in its output.",
}
"""The commands in the order of the help, each with the first sentence of its docstring."""


class Subcommands(Group):
    """Imports the module of a subcommand when it is used: ``instrument run`` needs no reader of traces."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help."""
        self.commands = {name: TyperCommand(name, help=text) for name, text in SUBCOMMANDS.items()}
        return list(SUBCOMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of the subcommand, the subcommand and the rest of ``args``."""
        self.list_commands(ctx)
        name, _, rest = super().resolve_command(ctx, args)
        return name, import_module(f".commands.{name}", __package__).subcommand, rest


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
