"""``instrument forecast``: how long a step takes on GPUs that are not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .. import cli
from .scripts import ScriptCommand, arguments_of, exit_at_once, program_of, reserve_stdout

if TYPE_CHECKING:
    from ...syncs.dryrun.run import DryRunReport


def forecast(
    ctx: typer.Context,
    script: str = cli.argument("SCRIPT", "A script, or FILE.py::FUNCTION."),
    gpu: str = cli.option("NAMES", "The GPUs, such as h100,a100 (default h100).", default="h100"),
    steps: int = cli.option("N", "End the script after N steps (default 2).", default=2, min=1),
    time_limit: float | None = cli.option("SECONDS", "End the script after this many seconds.", min=0.001),
    with_data: bool = cli.flag("--with-data", "Compute the data too, for scripts that decide by it."),
    step_on: str | None = cli.option("SIGN", "What ends a step of the script, as in instrument run."),
    table: Path | None = cli.option("FILE", "Forecast from this table of measured operators."),
    as_json: bool = cli.flag("--json", "Print the forecasts as JSON."),
) -> None:
    """Forecast how long a step takes on GPUs that are not there, with the error of the forecast.

    The script runs as it is, as if there were a GPU, but without data, so that no weights are allocated. Its
    arguments follow it: instrument forecast --gpu h100,l4 -- train.py --batch-size 4

    GPUs: h100, h200, b200, a100, a100-40, l4, v100, t4, mi300x. On b200 and mi300x nothing was measured: their
    times are bounds by the data sheet.

    The exit code is 0; 1 if the script ends with an error, or nothing was on the GPU; 2 if something cannot be
    read.
    """
    from ...forecast.forecast import forecast_of
    from ...forecast.gpus import gpu_named
    from ...forecast.table import packaged_table, read_table
    from ...forecast.text import lines
    from ...record.stepping.explicit_steps import check_step_on
    from ...syncs.dryrun.run import dry_run_file

    with cli.errors_reported(unreadable=2, names={'"gpu"': "--gpu"}):
        gpus = [gpu_named(name.strip()) for name in gpu.split(",")]
        measured = packaged_table() if table is None else read_table(table)
        step_on = check_step_on(step_on)
        program, function = program_of(script)
    out = reserve_stdout() if as_json else sys.stdout

    def conclude(report: DryRunReport) -> int:
        if report.counts is not None and report.counts.step.launching:
            peak = report.memory.peak_bytes if report.memory is not None else None
            found = forecast_of(report.counts.step, gpus, measured, peak)
            text = json.dumps([each.as_dict() for each in found], indent=2) if as_json else "\n".join(lines(found))
            print(text, file=out, flush=True)
        wrong = report.unavailable_reason or ("" if report.finished else f"the script ended with {report.ended}")
        if wrong:
            cli.print_message(f"{script}: {wrong}")
        return int(bool(wrong))

    with cli.errors_reported(unreadable=2):
        report = dry_run_file(
            program, function, fake=not with_data, args=arguments_of(ctx), steps=steps, time_limit=time_limit,
            step_on=step_on, on_caught_stop=lambda stopped: exit_at_once(lambda: conclude(stopped), out),
        )  # fmt: skip
    if code := conclude(report):
        raise typer.Exit(code)


subcommand = cli.subcommand_of(forecast, ScriptCommand)
