"""What went wrong, in one sentence."""

from __future__ import annotations

import typer

from ..printable import printable


def describe(error: Exception) -> str:
    """Return what went wrong, for a person."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read {error.filename}: {error.strerror}"
    return str(error)


def print_message(text: str) -> None:
    """Print a line about the command itself on standard error."""
    typer.echo(f"instrument: {printable(text)}", err=True)


def exit_unusable(error: Exception) -> typer.Exit:
    """Print what went wrong; return the end of a command that could not do what it was told."""
    print_message(describe(error))
    return typer.Exit(2)
