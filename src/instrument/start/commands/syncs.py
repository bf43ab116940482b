"""``instrument syncs``: finds the lines that make the CPU wait for the GPU."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from ...explain.waits.report import SyncReport
from .. import cli
from .scripts import MODULE, WithArguments, arguments_of, exit_at_once, exit_code_of_signal, reserve_stdout

if TYPE_CHECKING:
    from ...syncs.baseline import Baseline

Reports = list[tuple[str, SyncReport]]
_ABSTAINED = 3
_FUNCTION = "a function must be FILE.py::FUNCTION: {}"


def syncs(
    ctx: typer.Context,
    targets: list[str] = cli.argument("TARGET...", "Functions, scripts or traces."),
    steps: int | None = cli.option("N", "End each script after N steps.", min=1),
    time_limit: float | None = cli.option("SECONDS", "End each script after this many seconds.", min=0.001),
    fake: bool = cli.flag("--fake", "Compute shapes only, for models that are too large to run."),
    most: int | None = cli.option(
        "N", "Synchronizations that a step may have (default 0; no limit with --budget).", "--max", min=0
    ),
    budget: list[str] | None = cli.BUDGET,
    step_on: str | None = cli.option("SIGN", "What ends a step of a script, as in instrument run."),
    as_json: bool = cli.flag("--json", "Print all findings as JSON."),
    as_html: Path | None = cli.option("FILE", "Write a page with the lines of code to this file.", "--html"),
    sarif: Path | None = cli.option("FILE", "Write the findings as SARIF, for code scanning."),
    baseline: Path | None = cli.option("FILE", "Fail only for synchronizations that are not in FILE."),
    write_baseline: Path | None = cli.option(
        "FILE", "Write the synchronizations found now; the reasons in FILE are kept."
    ),
    allowlist: Path | None = cli.option(
        "FILE", "Allow the synchronizations in FILE, each of which needs a reason."
    ),
) -> None:
    """Find the lines that make the CPU wait for the GPU; no GPU is needed.

    TARGET is a script (train.py), which runs as if there were a GPU; a function of a file (train.py::step), which
    is called once in the same way; or a trace of torch.profiler or Nsight Systems, which is read. Arguments of the
    script follow --: instrument syncs --steps 3 train.py -- --batch-size 4. After all other options, -m runs a
    module as Python does: instrument syncs --steps 3 -m package.train --batch-size 4

    The findings so far are printed however a script ends: by --steps or --time-limit, an error, Ctrl-C or SIGTERM.
    A script ends as if by sys.exit. If it catches that and continues, its process ends at the next step, within a
    second of the time limit, or at the second signal.

    The exit code is 0 if no step has more synchronizations than --max; 1 if one has, if a script ends with an
    error, or if a budget, a comment or a baseline matches nothing; 2 if something cannot be read; 3 if a trace
    does not show which calls wait; 130 after Ctrl-C and 143 after SIGTERM.
    """
    from ...base.page_file import write_page
    from ...record.stepping.explicit_steps import check_step_on
    from ...show.sections.syncs import page_of
    from ...show.text.sarif import to_sarif
    from ...syncs.baseline import Baseline
    from .options import parse_budgets

    with cli.errors_reported(unreadable=2):
        baseline_before = Baseline.read(baseline) if baseline else None
        excused = Baseline.read(allowlist, reasons=True) if allowlist else None
        limits = parse_budgets(budget or [])
        step_on = check_step_on(step_on)
        before = Baseline.read(write_baseline) if write_baseline and write_baseline.exists() else baseline_before
        for file in (sarif, as_html, write_baseline):
            if file is not None and file.is_dir():
                raise ValueError(f"cannot write {file}: it is a folder")
            if file is not None and not file.absolute().parent.is_dir():
                raise ValueError(f"cannot write {file}: folder not found: {file.absolute().parent}")
        # Absolute, because a script may change the folder.
        sarif, as_html, write_baseline = (file and file.absolute() for file in (sarif, as_html, write_baseline))
    reports: Reports = []
    out = reserve_stdout() if as_json else sys.stdout

    def conclude() -> int:
        """Print and write the findings; return the exit code."""
        all_reports = [report for _, report in reports]
        wrong = excused is not None and _apply(excused, all_reports, f"allowlist {allowlist}")
        fresh = Baseline.of(all_reports, before)
        if baseline_before is not None:
            wrong |= _apply(baseline_before, all_reports, f"baseline {baseline}") and not write_baseline
        with cli.errors_reported(unreadable=2):
            if sarif:
                sarif.write_text(to_sarif(all_reports), encoding="utf-8")
        _print(reports, out, as_json)
        if as_html:
            cli.write_html(lambda path: write_page(path, page_of(reports)), as_html)
        with cli.errors_reported(unreadable=2):
            if write_baseline:
                _write(fresh, write_baseline, all_reports)
        failed = _print_failures(reports, most, written=write_baseline is not None)
        return _exit_code_of_signal(reports) or failed or int(wrong)

    def on_caught_stop(target: str, report: SyncReport) -> None:
        """End the process, because its script caught the exception that should end it."""
        reports.append((target, report))
        exit_at_once(conclude, out)

    for target in targets:
        with cli.errors_reported(unreadable=2):
            reports += _run_or_audit(
                target, limits, arguments_of(ctx), fake, steps, time_limit, step_on, on_caught_stop
            )
        if _exit_code_of_signal(reports):
            break
    if code := conclude():
        raise typer.Exit(code)


def _exit_code_of_signal(reports: Reports) -> int:
    """Return the exit code for the signal that ended the last run; 0 if none did."""
    return exit_code_of_signal(reports[-1][1].error) if reports else 0


def _run_or_audit(
    target: str,
    budgets: dict[str, int] | None,
    args: list[str],
    fake: bool,
    steps: int | None,
    time_limit: float | None,
    step_on: str | None,
    on_caught_stop: Callable[[str, SyncReport], None],
) -> Iterator[tuple[str, SyncReport]]:
    from ...read.jobs.ranks import TraceSet
    from ...read.jobs.read import read_any

    script: Path | str | None = None  # a file, or the name of a module
    function = None
    if target.startswith(f"{MODULE} "):
        script = target.removeprefix(f"{MODULE} ")
    elif "::" in target and not Path(target).is_file():
        file, _, function = target.rpartition("::")
        if not file:
            raise ValueError(_FUNCTION.format(target))
        script = Path(file)
    elif target.endswith(".py"):
        script = Path(target)
    if script is not None:
        from ...syncs.dryrun.run import dry_run_file

        report = dry_run_file(
            script, function, fake=fake, args=args, budget=budgets, steps=steps, time_limit=time_limit,
            step_on=step_on, on_caught_stop=partial(on_caught_stop, target),
        )  # fmt: skip
        yield target, report
        return
    if ".py:" in target and not Path(target).exists():
        raise ValueError(_FUNCTION.format(target))
    if args:
        raise ValueError(f"{target} is a trace, and takes no arguments: {' '.join(args)}")
    options = {
        "--budget": budgets, "--steps": steps, "--time-limit": time_limit, "--step-on": step_on, "--fake": fake,
    }  # fmt: skip
    for name in (name for name, value in options.items() if value):
        raise ValueError(f"{name} is for scripts, and {target} is a trace")
    from ...explain.waits.audit import audit_syncs

    trace = read_any(target)
    if not isinstance(trace, TraceSet):
        yield target, audit_syncs(trace)
        return
    if trace.failed:
        raise ValueError("; ".join(f"cannot read {path}: {reason}" for path, reason in trace.failed.items()))
    for rank, one in trace.items():
        yield f"{target}, rank {rank}", audit_syncs(one)


def _apply(expected: Baseline, reports: list[SyncReport], name: str) -> bool:
    """Allow the expected synchronizations, and report entries of the file that were exceeded or not reports.

    Returns:
        Whether the file seems to be of another program: it matches none of the synchronizations that were found.
    """
    for report in reports:
        for place, now, most in expected.allow(report, name):
            cli.print_message(f"more synchronizations than in {name}: {place}: {now} in a step, was {most}")
    stale = expected.stale(reports)
    for entry in stale:
        near = expected.nearest(entry, reports)
        cli.print_message(
            f"no longer found; remove it from {name}: {entry}" + (f"; nearest: {near}" if near else "")
        )
    wrong = bool(stale) and len(stale) == len(expected.entries) and any(report.syncs for report in reports)
    if wrong:
        cli.print_message(f"no synchronization is in {name}: is it the file of another program?")
    return wrong


def _print(reports: Reports, out: TextIO, as_json: bool) -> None:
    from ...explain.waits.report import as_dict, render
    from ...show.terminal.console import new_console, print_line

    if as_json:
        written = [{"target": target} | as_dict(report) for target, report in reports]
        try:
            print(json.dumps(written if len(written) != 1 else written[0], indent=2), file=out, flush=True)
        except OSError:
            with contextlib.suppress(OSError):
                out.close()  # else Python 3.13 reports the error once more when it frees the stream
            raise
        return
    console = new_console(file=out)
    for number, (target, report) in enumerate(reports):
        if len(reports) > 1:
            print_line(console, target, bold=True, space=bool(number))
        render(report, console=console)


def _write(fresh: Baseline, path: Path, reports: list[SyncReport]) -> None:
    if all(report.finished for report in reports):  # else entries that were not reached would be lost
        fresh.write(path)
        cli.print_message(f"known synchronizations written to {path}: {len(fresh.entries)}")
    else:
        cli.print_message(f"{path} is not written: a run ended early")


def _print_failures(reports: Reports, most: int | None, written: bool) -> int:
    """Print on standard error why the command fails; return its exit code."""
    codes = {0}
    for target, report in reports:
        reason = (None if report.finished else "the run ended early") if written else report.over(most)
        if reason is not None:
            cli.print_message(f"{target}: {reason}")
            abstains = report.source == "trace" and report.unavailable_reason and not report.syncs
            codes.add(_ABSTAINED if abstains else 1)
    return 1 if 1 in codes else max(codes)


subcommand = cli.subcommand_of(syncs, WithArguments)
