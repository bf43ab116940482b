"""What went wrong, in one sentence."""

from __future__ import annotations

import typer


def sentence(error: Exception) -> str:
    """Return what went wrong, for a person."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read {error.filename}: {error.strerror}"
    return str(error)


def unusable(error: Exception) -> typer.Exit:
    """Print what went wrong; return the end of a command that could not do what it was told."""
    typer.echo(f"instrument: {sentence(error)}", err=True)
    return typer.Exit(2)
