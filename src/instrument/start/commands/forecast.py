"""``instrument forecast``: how long a step takes on GPUs that are not there."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .. import cli
from .batch_option import BatchOption
from .scripts import ScriptCommand, arguments_of, exit_at_once, exit_code_of_signal, program_of, reserve_stdout

if TYPE_CHECKING:
    from ...forecast.wanted import Wanted
    from ...syncs.dryrun.report import DryRunReport


def forecast(
    ctx: typer.Context,
    script: str = cli.argument("SCRIPT", "A script, or FILE.py::FUNCTION."),
    gpu: str = cli.option("NAMES", "The GPUs, such as h100,a100 (default h100).", default="h100"),
    gpus: int = cli.option("N", "The number of such GPUs, 1 to 8 in one machine (default 1).", default=1),
    parallel: str | None = cli.option("HOW", "What a script for one GPU does on them: dp or fsdp."),
    batch: str | None = cli.option("OPTION", "The script's option of the batch, for the largest that fits."),
    steps: int = cli.option("N", "End the script after N steps (default 2).", default=2, min=1),
    time_limit: float | None = cli.option("SECONDS", "End the script after this many seconds.", min=0.001),
    with_data: bool = cli.flag("--with-data", "Run with real data, for scripts that branch on values of tensors."),
    step_on: str | None = cli.option("SIGN", "What ends a step of the script, as in instrument run."),
    table: Path | None = cli.option("FILE", "Forecast from this table of measured operators."),
    as_json: bool = cli.flag("--json", "Print the forecasts as JSON."),
) -> None:
    """Forecast how long a step takes on GPUs that are not there, with the error of the forecast.

    The script runs as it is, as if there were a GPU, but without data, so that no weights are allocated. Its
    arguments follow it: instrument forecast --gpu h100,l4 -- train.py --batch-size 4

    GPUs: h100, h200, b200, a100, a100-40, l4, v100, t4, mi300x. On b200 and mi300x nothing was measured: their
    times are bounds by the data sheet.

    With --gpus 4 the script is rank 0 of 4, as torchrun starts it, and its collectives are counted. One that uses
    a single GPU needs --parallel.

    --batch names the option with which the script takes its batch: batch-size, or batch_size=. The script runs
    again with other numbers, until it fits into each GPU and would not with one more.

    The exit code is 0; 1 if the script ends with an error, or nothing was on the GPU; 2 if something cannot be
    read.
    """
    from ...forecast.table import packaged_table, read_table
    from ...forecast.text import lines
    from ...forecast.wanted import Wanted
    from ...record.stepping.explicit_steps import check_step_on
    from ...syncs.dryrun.run import dry_run_file

    with cli.errors_reported(unreadable=2, names=_NAMES):
        measured = packaged_table() if table is None else read_table(table)
        wanted = Wanted.of(gpu, measured, gpus, parallel)
        step_on = check_step_on(step_on)
        program, function = program_of(script)
        arguments = arguments_of(ctx)
        option = BatchOption(batch) if batch is not None else None
        start = (option.value(arguments) or 1) if option is not None else 1
    out = reserve_stdout() if as_json else sys.stdout

    def run(arguments: list[str], conclude: Callable[[DryRunReport], int]) -> DryRunReport:
        return dry_run_file(
            program, function, fake=not with_data, args=arguments, steps=steps, time_limit=time_limit,
            step_on=step_on, ranks=gpus, on_caught_stop=lambda report: exit_at_once(lambda: conclude(report), out),
        )  # fmt: skip

    def conclude(report: DryRunReport, batches: Sequence[int | None] | None = None) -> int:
        if report.counts is not None and report.counts.step.launching:
            with cli.errors_reported(unreadable=2, names=_NAMES):
                found = wanted.forecasts(report, batches)
            text = json.dumps([each.as_dict() for each in found], indent=2) if as_json else "\n".join(lines(found))
            print(text, file=out, flush=True)
        wrong = report.failure
        if not wrong and not (report.counts and report.counts.step.launching):
            wrong = "the step does nothing on the GPU"
        if wrong:
            cli.print_message(f"{script}: {wrong}")
        return exit_code_of_signal(report.error) or int(bool(wrong))

    with cli.errors_reported(unreadable=2, names=_NAMES):
        report = run(arguments, conclude)
        batches = None
        if option is not None and report.finished and report.counts is not None:
            batches = _largest_batches(
                wanted, lambda batch: run(option.given(arguments, batch), _cannot_rerun), start
            )
    if code := conclude(report, batches):
        raise typer.Exit(code)


_NAMES = {'"gpu"': "--gpu", '"gpus"': "--gpus", '"parallel"': "--parallel", '"batch"': "--batch"}
_USUAL_RUNS = 7
_LONG_S = 30


def _largest_batches(wanted: Wanted, run: Callable[[int], DryRunReport], start: int) -> list[int | None]:
    """Find the largest batches; say how long it takes if it takes long, and drop what the script prints again."""
    from ...forecast.wanted import MOST_RUNS

    begun, said = time.perf_counter(), False

    def announce() -> None:
        nonlocal said
        seconds = time.perf_counter() - begun
        if not said and seconds * _USUAL_RUNS > _LONG_S:
            cli.print_message(
                f"to find the largest batch, the script runs about {_USUAL_RUNS} times, {seconds:.0f} s each"
            )
        said = True

    with Path(os.devnull).open("w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
        found = wanted.largest_batches(run, start, announce)
    for each, number in zip(wanted.gpus, found, strict=True):
        if number is None:
            cli.print_message(f"{each.name}: more than {MOST_RUNS} runs would be needed to find the largest batch")
    return found


def _cannot_rerun(report: DryRunReport) -> int:
    cli.print_message(
        "the script caught the exception that ends it, so that it cannot run again with another batch"
    )
    return 1


subcommand = cli.subcommand_of(forecast, ScriptCommand)
