"""Classes of commands, which parse and show their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup


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
