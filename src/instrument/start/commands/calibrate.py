"""``instrument calibrate``: measures the GPU of this machine, for forecasts of it."""

from __future__ import annotations

from pathlib import Path

import typer

from .. import cli


def calibrate(
    out: Path = cli.argument("FILE", "Where to write the table, such as table.json.gz."),
    seconds: float = cli.option("SECONDS", "The time to measure (default 120).", default=120.0, min=0.1),
) -> None:
    """Measure operators on the GPU of this machine, and write a table for forecasts.

    Nothing else may use the GPU meanwhile. instrument forecast --table FILE uses the table.

    The exit code is 0; 1 if there is no GPU or the file cannot be written; 2 if forecasts do not know this GPU.
    """
    from ...forecast.calibrate import calibrate as measure
    from ...forecast.table import write_table

    with cli.errors_reported():
        try:
            gpu, data = measure(seconds)
        except RuntimeError as error:
            cli.print_message(cli.describe(error))
            raise typer.Exit(1) from None
    with cli.writing(out):
        write_table(data, out)
    families = data["gpus"][gpu.name]["families"]
    for row in families:
        typer.echo(
            f"{row['family']:<22}{row['type']:<6}{len(row['ns']):>5} measured, mean error {row['error']:.0%}"
        )
    cli.print_message(f"{out} has the table: instrument forecast --table {out} --gpu {gpu.name} -- train.py")


subcommand = cli.subcommand_of(calibrate)
