"""``instrument doctor``: checks which installed profilers record here, and shows how to fix those that do not."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from .. import cli


def doctor(
    as_json: bool = cli.flag("--json", "Print everything as JSON."),
    out: Path = cli.option("FOLDER", "The folder for traces.", default=Path("runs")),
) -> None:
    """Check what is installed, what each profiler records here, and whether ranges arrive in its output.

    Where possible, this is proved: one range is recorded with the real tool and read back, which takes seconds.

    The exit code is 0 if everything that is installed records, 1 if something installed is broken or loses ranges,
    and 2 for wrong options.
    """
    from ...show.terminal.console import new_console
    from ..doctor.machine import Machine
    from ..doctor.report import examine, problems, render, to_json

    machine = Machine(out=out)
    if as_json:
        results = list(examine(machine))
        typer.echo(json.dumps(to_json(results), indent=2))
    else:
        console = new_console()
        results = render(examine(machine, busy=lambda name: console.status(f"{name} ...")), console=console)
    if problems(results):
        raise typer.Exit(1)


subcommand = cli.subcommand_of(doctor)
