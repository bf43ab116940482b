"""``instrument forecast``: how long a step takes on GPUs that are not there."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .. import cli
from .syncs import ARGUMENTS, WithArguments, program_of

if TYPE_CHECKING:
    from ...forecast.forecast import Forecast
    from ...forecast.gpus import Gpu

_NO_STEP = "the program ended without an operator on the GPU"


def forecast(
    ctx: typer.Context,
    target: str = cli.argument("TARGET", "A script, or a function of a file: train.py::step."),
    gpu: str = cli.option("NAMES", "The GPUs, such as h100,a100 (default h100).", default="h100"),
    steps: int = cli.option("N", "End the script after N steps (default 2).", default=2, min=1),
    time_limit: float | None = cli.option("SECONDS", "End the script after this many seconds.", min=0.001),
    step_on: str | None = cli.option("SIGN", "What ends a step, as in instrument run."),
    with_data: bool = cli.flag("--with-data", "Compute the data too, for scripts that decide by it."),
    table: Path | None = cli.option("FILE", "Forecast from this table of measured operators."),
    as_json: bool = cli.flag("--json", "Print the forecasts as JSON."),
) -> None:
    """Forecast how long a step takes on GPUs that are not there, with the error of the forecast.

    TARGET runs as if there were a GPU, without data, so that no weights are allocated. Arguments of the script
    follow --: instrument forecast --gpu h100,l4 train.py -- --batch-size 4

    GPUs: h100, h200, b200, a100, a100-40, l4, v100, t4, mi300x. For b200 and mi300x nothing was measured: their
    times are bounds by the data sheet.

    The exit code is 0 if there is a forecast, 1 if the script ends with an error, 2 if something cannot be read.
    """
    from ...forecast.forecast import forecast_of
    from ...forecast.gpus import gpu_named
    from ...forecast.table import packaged_table, read_table
    from ...record.stepping.explicit_steps import check_step_on
    from ...syncs.dryrun.run import dry_run_file

    with cli.errors_reported(unreadable=2, names={'"gpu"': "--gpu"}):
        gpus: list[Gpu] = [gpu_named(name.strip()) for name in gpu.split(",")]
        measured = packaged_table() if table is None else read_table(table)
        script, function = program_of(target)
        if script is None:
            raise ValueError(f"TARGET must be a script or FILE.py::FUNCTION: {target}")
        with redirect_stdout(sys.stderr):
            report = dry_run_file(
                script, function, fake=not with_data, args=ctx.meta[ARGUMENTS], steps=steps,
                time_limit=time_limit, step_on=check_step_on(step_on),
            )  # fmt: skip
    counts = report.counts
    if report.error is not None:
        cli.print_message(f"{target} ended with {type(report.error).__name__}: {report.error}")
    if counts is None or not counts.step.launching:
        cli.print_message(_NO_STEP)
        raise typer.Exit(1)
    _print(forecast_of(counts.step, gpus, measured), as_json)
    if report.error is not None:
        raise typer.Exit(1)


def _print(forecasts: Sequence[Forecast], as_json: bool) -> None:
    from ...forecast.text import lines

    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in forecasts], indent=2))
    else:
        typer.echo("\n".join(lines(forecasts)))


subcommand = cli.subcommand_of(forecast, WithArguments)
