"""Messages of the commands on standard error."""

from __future__ import annotations

import typer

from ..printable import printable


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
