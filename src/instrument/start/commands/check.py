"""``instrument check``: counts what a step of a script does on a GPU, without one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from .. import cli
from .scripts import MODULE, WithArguments, arguments_of, exit_at_once, reserve_stdout


class _Script(WithArguments):
    """A command whose script, with its arguments, follows ``--``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Set the script and its arguments aside."""
        if "--" in args:
            at = args.index("--")
            args = [*args[:at], *args[at + 1 : at + 2], "--", *args[at + 2 :]]
        return super().parse_args(ctx, args)


def check(
    ctx: typer.Context,
    script: str = cli.argument("SCRIPT", "A script, or FILE.py::FUNCTION."),
    steps: int | None = cli.option("N", "End the script after N steps.", min=1),
    time_limit: float | None = cli.option("SECONDS", "End the script after this many seconds.", min=0.001),
    fake: bool = cli.flag("--fake", "Compute shapes only, for models that are too large to run."),
    step_on: str | None = cli.option("SIGN", "What ends a step of the script, as in instrument run."),
    as_json: bool = cli.flag("--json", "Print the counts as JSON."),
) -> None:
    """Count what a step of a script does on a GPU: kernels, operations, bytes, copies; no GPU is needed.

    The script runs as it is, as if there were a GPU, and its arguments follow it:
    instrument check --steps 2 -- train.py --batch-size 4. Two steps show what every step does; the first one
    also prepares.

    The exit code is 0; 1 if the script ends with an error, or nothing was on the GPU; 2 if the script cannot be
    read.
    """
    from ...record.stepping.explicit_steps import check_step_on
    from ...syncs.dryrun.run import DryRunReport, dry_run_file

    file, _, function = script.rpartition("::") if "::" in script else (script, "", "")
    module = file.removeprefix(f"{MODULE} ") if file.startswith(f"{MODULE} ") else None
    out = reserve_stdout() if as_json else sys.stdout

    def conclude(report: DryRunReport) -> int:
        if as_json:
            counts = report.counts.as_dict() if report.counts is not None else None
            written = {"target": script, "counts": counts, "finished": report.finished, "error": report.ended}
            print(json.dumps(written, indent=2), file=out, flush=True)
        elif report.counts is not None:
            print(report.counts, file=out, flush=True)
        wrong = report.unavailable_reason or ("" if report.finished else f"the script ended with {report.ended}")
        if wrong:
            cli.print_message(f"{script}: {wrong}")
        return int(bool(wrong))

    with cli.errors_reported(unreadable=2):
        report = dry_run_file(
            module or Path(file), function or None, fake=fake, args=arguments_of(ctx), steps=steps,
            time_limit=time_limit, step_on=check_step_on(step_on),
            on_caught_stop=lambda stopped: exit_at_once(lambda: conclude(stopped), out),
        )  # fmt: skip
    if code := conclude(report):
        raise typer.Exit(code)


subcommand = cli.subcommand_of(check, _Script)
