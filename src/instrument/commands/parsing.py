"""The classes of the commands, by which their arguments are parsed and shown."""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup


def _without_types(parameters: list[Any]) -> list[Any]:
    """Have flags and arguments shown by their names alone, which typer follows by a type such as ``<bool>``."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif isinstance(parameter, TyperArgument):
            parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign, attr-defined, unused-ignore]
    return parameters


class Command(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its parameters, with ``--help``."""
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """The command that has the others."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its parameters, with ``--help``."""
        return _without_types(super().get_params(ctx))
