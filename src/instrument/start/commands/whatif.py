"""``instrument whatif``: predicts how long a step would be with a change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...base.errors import TraceError
from .command import (
    CollectivesOption,
    RankOption,
    StepsFromOption,
    describe,
    describe_unwritten,
    exit_unusable,
    print_message,
    subcommand_of,
)

if TYPE_CHECKING:
    from ...explain.replay.replayer import Replayer


def whatif_command(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="A file, or the folder of a run or of the ranks' files.")
    ],
    without: Annotated[
        list[str] | None,
        typer.Option(
            help="What costs nothing: dataloader, copies, sync, sync:FILE:LINE or region:NAME.", metavar="CAUSE"
        ),
    ] = None,
    speed: Annotated[
        list[str] | None,
        typer.Option(
            help="Kernels that become faster, by a regular expression for their names: --speed kernel:gemm=2x",
            metavar="kernel:REGEX=Nx",
        ),
    ] = None,
    overlap: Annotated[
        list[str] | None,
        typer.Option(help="'communication': no other work waits for kernels that communicate.", metavar="WORK"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole prediction as JSON.")] = False,
    lane: Annotated[
        Path | None,
        typer.Option(
            "--add-critical-path",
            help="Write a copy of a torch.profiler trace with a lane that shows the critical path of the recorded "
            "steps in Perfetto.",
            metavar="OUT",
        ),
    ] = None,
    steps_from: StepsFromOption = None,
    rank: RankOption = None,
    collectives: CollectivesOption = "auto",
) -> None:
    """Predict how long a step would be with a change, and show the critical path.

    The trace is replayed: each event happens as soon as what it waits for is done. It is first replayed without a
    change, and the error of that is printed; over 5 %, the prediction abstains. Several changes apply together.
    Without any, the critical path of the steps as they are is shown.
    """
    from ...explain.diagnosis.chosen_trace import chosen_trace, reject_snapshot
    from ...explain.replay.critical_path import CATEGORY
    from ...explain.replay.replayer import Replayer
    from ...explain.replay.what_if import what_if
    from ...read.kineto.insert_events import check_copy
    from ...read.measures.region_steps import with_steps
    from ...read.tables.work_classes import compile_collectives
    from ...show.terminal.console import new_console, show
    from ...show.terminal.what_if import what_if_report

    try:
        pattern = compile_collectives(collectives)
        chosen = chosen_trace(trace, rank, pattern, None, steps_from)
        reject_snapshot(chosen.trace)
        replayer = Replayer(with_steps(chosen.trace, steps_from), pattern)
        if lane is not None:
            check_copy(replayer.trace, lane, CATEGORY)
        guess = what_if(replayer, without=without or [], speed=speed or [], overlap=overlap or [])
        if lane is not None and guess.abstained:
            raise ValueError(f"no critical path can be added: {guess.abstained}")
    except (TraceError, OSError) as error:
        print_message(describe(error))
        raise typer.Exit(1) from None
    except ValueError as error:
        raise exit_unusable(error) from None
    if as_json:
        typer.echo(guess.to_json())
    else:
        console = new_console()
        show(console, what_if_report(guess))
        if chosen.text:
            show(console, [f"Replayed: {chosen.text}."])
    if lane is not None:
        _add_lane(replayer, lane)


def _add_lane(replayer: Replayer, out: Path) -> None:
    from ...explain.replay.critical_path import add_critical_path

    try:
        parts = add_critical_path(replayer.trace, replayer.recorded_path, out)
    except OSError as error:
        print_message(describe_unwritten(error, out))
        raise typer.Exit(1) from None
    print_message(f"{out} has the critical path in {parts:,} parts")


subcommand = subcommand_of(whatif_command, name="whatif")
