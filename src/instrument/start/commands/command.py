"""What every subcommand is made of: its class, the options that several share, its messages and its page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from ...base.errors import TraceError
from ...base.printable import printable


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


def describe(error: Exception) -> str:
    """Return the message of ``error``, with the file if one cannot be read."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read {error.filename}: {error.strerror}"
    return str(error)


def describe_unwritten(error: OSError, file: object = "the output") -> str:
    """Return the message of an error that occurred as output, or a file, was written."""
    return f"cannot write {file}: {error.strerror or error}"


def print_message(text: str) -> None:
    """Print a message of the command on standard error."""
    typer.echo(f"instrument: {printable(text)}", err=True)


def exit_unusable(error: Exception) -> typer.Exit:
    """Print the message of ``error``; return the exception that ends the command with code 2."""
    print_message(describe(error))
    return typer.Exit(2)


@contextmanager
def errors_reported(unreadable: int = 1, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """End the command with a message where the body fails.

    Args:
        unreadable: the exit code if a file cannot be read; it is 2 for wrong arguments.
        names: the options by the names that the library's messages have for them.

    Raises:
        typer.Exit: the body failed.
    """
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        message = describe(error)
        for name, option_name in (names or {}).items():
            message = message.replace(name, option_name)
        print_message(message)
        raise typer.Exit(unreadable if isinstance(error, (OSError, TraceError)) else 2) from None


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
