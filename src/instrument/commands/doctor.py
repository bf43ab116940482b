"""``instrument doctor``: whether what is installed here records, and how to cure what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..launch.doctor.examine import examine
from ..launch.doctor.machine import Machine
from ..launch.doctor.page import failed, numbers, render


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    out: Annotated[Path, typer.Option(help="The folder that traces are to go to.", metavar="FOLDER")] = Path(
        "runs"
    ),
) -> None:
    """Say what is installed, what each profiler records here, and whether ranges arrive.

    Where it can be, that is proved: one range is recorded with the real tool and read back. Takes some seconds.

    The exit code is 0 where all that is installed records, 1 where something installed is broken or loses ranges,
    and 2 for options that are wrong.
    """
    machine = Machine(out=out)
    if as_json:
        found = list(examine(machine))
        typer.echo(json.dumps(numbers(found), indent=2))
    else:
        console = Console()
        found = render(examine(machine, busy=lambda name: console.status(f"{name} ...")), console=console)
    if failed(found):
        raise typer.Exit(1)
