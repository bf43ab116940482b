"""The classes of the commands, by which their arguments are parsed and shown."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


def _flags_without_a_type(parameters: list[Any]) -> list[Any]:
    """Have flags shown by their names alone, which typer follows by ``<bool>``."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class Command(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its parameters, with ``--help``."""
        return _flags_without_a_type(super().get_params(ctx))


class Group(TyperGroup):
    """The command that has the others."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its parameters, with ``--help``."""
        return _flags_without_a_type(super().get_params(ctx))
