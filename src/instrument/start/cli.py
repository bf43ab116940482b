"""The command ``instrument``, and what its subcommands are made of: shared options, messages, pages."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from .. import __version__
from ..base.errors import TraceError
from ..base.printable import printable

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
    "check": "Count what a step of a script does on a GPU: kernels, operations, bytes, copies; no GPU is needed.",
    "bisect": "Find the commit that moved a number of instrument check.",
    "forecast": "Forecast how long a step takes on GPUs that are not there, with the error of the forecast.",
    "calibrate": "Measure operators on the GPU of this machine, and write a table for forecasts.",
    "mcp": "Answer the questions of agents about recordings, over the Model Context Protocol.",
    "doctor": "Check what is installed, what each profiler records here, and whether ranges arrive in its output.",
}
"""The commands in the order of the help, each with the first sentence of its docstring."""


class _WithoutTypes:
    """Shows no types in the help, such as ``<bool>`` after flags and arguments."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with ``--help``."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
            elif isinstance(parameter, TyperArgument):
                parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign, attr-defined, unused-ignore]
        return parameters


class Command(_WithoutTypes, TyperCommand):
    """A command whose help shows no types."""


class Group(_WithoutTypes, TyperGroup):
    """A command with subcommands, whose help shows no types."""


def subcommand_of(function: Callable[..., None], cls: type[Command] = Command, **settings: Any) -> Any:
    """Return the subcommand that calls ``function``, whose parameters are its options.

    Args:
        function: its docstring is the help, and its name without ``_command`` that of the subcommand.
        cls: how the arguments are parsed.
        settings: the settings of typer's context.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    app.command(function.__name__.removesuffix("_command"), cls=cls, context_settings=settings)(function)
    return typer.main.get_command(app)


def argument(metavar: str, help: str) -> Any:
    """Return a required argument; this and the next two are defaults of a command's parameters."""
    return typer.Argument(..., metavar=metavar, help=help)


def option(metavar: str | None, help: str, *names: str, default: Any = None, **checks: Any) -> Any:
    """Return an option with a value, called ``names`` or, without these, as its parameter."""
    return typer.Option(default, *names, help=help, metavar=metavar, **checks)


def flag(name: str, help: str) -> Any:
    """Return an option without a value."""
    return typer.Option(False, name, help=help)


TRACE = argument("TRACE", "A file, or the folder of a run or of the ranks' files.")
HTML = option("FILE", "Write a page with charts to this file.", "--html")
STEPS_FROM = option("REGEX", "Names of the regions that are the steps, as in instrument summarize.")
RANK = option("N", "The rank, of several: by default the one that the others wait for.", min=0)
COLLECTIVES = option(
    "REGEX", "The kernels that communicate: 'auto', or a regular expression for their names.", default="auto"
)
BUDGET = option("REGION=N", "Synchronizations that a step may have in a region.")


def describe(error: object) -> str:
    """Return the message of an error, with the file if one cannot be read."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read {error.filename}: {error.strerror}"
    return str(error)


def describe_unwritten(error: OSError, file: object = "the output") -> str:
    """Return the message of an error that occurred as output, or a file, was written."""
    return f"cannot write {file}: {error.strerror or error}"


def print_message(text: str) -> None:
    """Print a message of the command on standard error."""
    typer.echo(f"instrument: {printable(text)}", err=True)


def exit_unusable(reason: object) -> typer.Exit:
    """Print the reason, a text or an error; return the exception that ends the command with code 2."""
    print_message(describe(reason))
    return typer.Exit(2)


_NAMES = {'"rank"': "--rank", '"steps_from"': "--steps-from", '"collectives"': "--collectives"}


@contextmanager
def errors_reported(unreadable: int = 1, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """End the command with a message where the body fails.

    Args:
        unreadable: the exit code if a file cannot be read; it is 2 for wrong arguments.
        names: the options by the names that the library's messages have for them, besides `_NAMES`.

    Raises:
        typer.Exit: the body failed.
    """
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        message = describe(error)
        for name, option_name in {**_NAMES, **(names or {})}.items():
            message = message.replace(name, option_name)
        print_message(message)
        raise typer.Exit(unreadable if isinstance(error, (OSError, TraceError)) else 2) from None


@contextmanager
def value_of(name: str) -> Iterator[None]:
    """Raise an error of the body as a wrong value of the option or argument ``name``.

    Raises:
        typer.BadParameter: the body failed.
    """
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(f"{error.filename}: {error.strerror}", param_hint=name) from None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=name) from None


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """End the command with a message, and code 1, where the body cannot write the file ``out``.

    Raises:
        typer.Exit: it cannot.
    """
    try:
        yield
    except OSError as error:
        print_message(describe_unwritten(error, out))
        raise typer.Exit(1) from None


def write_html(to_html: Callable[[Path], object], out: Path) -> None:
    """Write a page and print where it is, as `writing` says."""
    with writing(out):
        to_html(out)
    print_message(f"{out} has the page")


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


_MAY_BE_ABSENT = ("torch", "nvtx", "numpy", "msgspec", "rich", "jinja2", "wrapt", "mcp")


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
    except ModuleNotFoundError as error:  # reading works where torch is absent, recording does not
        if error.name not in _MAY_BE_ABSENT:
            raise
        print_message(f"this needs {error.name}, which is not installed here: pip install {error.name}")
        sys.exit(1)
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
