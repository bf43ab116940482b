"""Writes the page of ``--html``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from .errors import describe_unwritten, print_message


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
