"""``instrument whatif``: predicts how long a step would be with a change."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path

import typer

from .. import cli


def whatif_command(
    trace: str = cli.TRACE,
    without: list[str] | None = cli.option(
        "CAUSE", "What costs nothing: dataloader, copies, sync, sync:FILE:LINE or region:NAME."
    ),
    speed: list[str] | None = cli.option(
        "WHAT=Nx",
        "What becomes faster: kernels, by a regular expression for their names, or a region: "
        "--speed kernel:gemm=2x, --speed region:optimizer=2x",
    ),
    launch: str | None = cli.option(
        "PART", "The part that the CPU's work still takes, as with CUDA graphs or a compiled step: 0.1x"
    ),
    replace: list[str] | None = cli.option(
        "kernel:REGEX=DURATION", "How long each kernel of such a name takes: --replace kernel:gemm=50us"
    ),
    overlap: list[str] | None = cli.option(
        "WORK", "'communication': no other work waits for kernels that communicate."
    ),
    workers: str | None = cli.option(
        "N", "How many workers load batches, or how many times as many: --workers 4, --workers 2x"
    ),
    fuse: list[str] | None = cli.option("WHAT", "'optimizer': one kernel updates all parameters."),
    fix: list[str] | None = cli.option(
        "RULE", "Without what a rule finds, as 'instrument diagnose' names it: --fix fp32-matmuls"
    ),
    as_json: bool = cli.flag("--json", "Print the whole prediction as JSON."),
    lane: Path | None = cli.option(
        "OUT",
        "Write a copy of a torch.profiler trace with a lane that shows the critical path of the recorded "
        "steps in Perfetto.",
        "--add-critical-path",
    ),
    steps_from: str | None = cli.STEPS_FROM,
    rank: int | None = cli.RANK,
    collectives: str = cli.COLLECTIVES,
) -> None:
    """Predict how long a step would be with a change, and show the critical path.

    The trace is replayed: each event happens as soon as what it waits for is done. It is first replayed without a
    change, and the error of that is printed; over 5 %, the prediction abstains. Several changes apply together.
    Without any, the critical path of the steps as they are is shown.
    """
    from ...explain.diagnosis.chosen_trace import reject_snapshot
    from ...explain.diagnosis.diagnose import read_facts
    from ...explain.replay.critical_path import CATEGORY, add_critical_path, critical_path
    from ...explain.replay.requests import Request
    from ...explain.replay.what_if import what_if
    from ...explain.rules.rule import fix_of
    from ...read.kineto.insert_events import check_copy
    from ...show.terminal.changes import what_if_report
    from ...show.terminal.console import new_console, show

    with cli.errors_reported(names={f'"{each.name}"': f"--{each.name}" for each in fields(Request)}):
        read = read_facts(trace, collectives=collectives, steps_from=steps_from, rank=rank)
        reject_snapshot(read.facts.trace)
        replayer = read.facts.replayer
        if lane is not None:
            check_copy(replayer.trace, lane, CATEGORY)
        request = Request(
            without or (), speed or (), overlap or (), launch, replace or (), workers, fuse or (), fix or ()
        )
        guess = what_if(replayer, request, partial(fix_of, read.facts))
        if lane is not None and guess.abstained:
            raise ValueError(f"no critical path can be added: {guess.abstained}")
    if as_json:
        typer.echo(guess.to_json())
    else:
        console = new_console()
        show(console, what_if_report(guess))
        if read.source:
            show(console, [f"Replayed: {read.source}."])
        if read.facts.job is not None and read.facts.job.even is not None:
            show(console, [f"The whole job: {read.facts.job.even.text}"])
    if lane is not None:
        with cli.writing(lane):
            parts = add_critical_path(replayer.trace, critical_path(replayer), lane)
        cli.print_message(f"{lane} has the critical path in {parts:,} parts")


subcommand = cli.subcommand_of(whatif_command)
