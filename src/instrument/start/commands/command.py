"""What every subcommand is made of: its class, the options that several share, its messages and its page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from ...base.printable import printable


def _without_types(parameters: list[Any]) -> list[Any]:
    """Remove the types that typer shows after flags and arguments, such as ``<bool>``."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif isinstance(parameter, TyperArgument):
            parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign, attr-defined, unused-ignore]
    return parameters


class Command(TyperCommand):
    """A command whose help shows no types."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with ``--help``."""
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """A command with subcommands, whose help shows no types."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with ``--help``."""
        return _without_types(super().get_params(ctx))


def subcommand_of(
    function: Callable[..., None], cls: type[Command] = Command, name: str | None = None, **settings: Any
) -> Any:
    """Return the subcommand that calls ``function``, whose parameters are its options.

    Args:
        function: its docstring is the help.
        cls: how the arguments are parsed.
        name: its name in the help; by default that of the function.
        settings: the settings of typer's context.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    app.command(name, cls=cls, context_settings=settings)(function)
    return typer.main.get_command(app)


StepsFromOption = Annotated[
    str | None,
    typer.Option(help="Names of the regions that are the steps, as in instrument summarize.", metavar="REGEX"),
]
RankOption = Annotated[
    int | None,
    typer.Option(min=0, help="The rank, of several: by default the one that the others wait for.", metavar="N"),
]
CollectivesOption = Annotated[
    str,
    typer.Option(
        help="The kernels that communicate: 'auto', or a regular expression for their names.", metavar="REGEX"
    ),
]


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


def write_html(to_html: Callable[[Path], object], out: Path) -> None:
    """Write a page and print where it is.

    Raises:
        typer.Exit: with code 1 if it cannot be written.
    """
    try:
        to_html(out)
    except OSError as error:
        print_message(describe_unwritten(error, out))
        raise typer.Exit(1) from None
    print_message(f"{out} has the page")
