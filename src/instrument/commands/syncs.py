"""``instrument syncs``: which lines make the CPU wait for the GPU."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console

from ..report.console import line
from ..stepping.function_calls import check_step_on
from ..syncs.baseline import Baseline
from ..syncs.early_stop import EarlyStop
from ..syncs.report import SyncReport, render
from ..syncs.sarif import to_sarif
from ..syncs.serialize import as_dict
from ..traces.ranks import TraceSet
from ..traces.read import read_trace
from .budgets import budgets
from .errors import say, unusable
from .parsing import Command

Reports = list[tuple[str, SyncReport]]
_ARGUMENTS = f"{__name__}.arguments"
_NAMED = "a function is named as FILE.py::FUNCTION: {}"


class WithArguments(Command):
    """A command that takes what follows ``--`` for the script, as it is."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Put aside what follows ``--``."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_ARGUMENTS] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


def syncs(
    ctx: typer.Context,
    targets: Annotated[list[str], typer.Argument(metavar="TARGET...", help="Functions, scripts or traces.")],
    steps: Annotated[int | None, typer.Option(min=1, help="End each script after N steps.", metavar="N")] = None,
    time_limit: Annotated[
        float | None, typer.Option(min=0.001, help="End each script after so many seconds.", metavar="SECONDS")
    ] = None,
    fake: Annotated[bool, typer.Option("--fake", help="Shapes only, for models too large to run.")] = False,
    most: Annotated[
        int | None,
        typer.Option(
            "--max",
            min=0,
            help="How many waits a step may have (default 0; no limit if --budget is given).",
            metavar="N",
        ),
    ] = None,
    budget: Annotated[
        list[str] | None, typer.Option(help="How often a step may wait in a region.", metavar="REGION=N")
    ] = None,
    step_on: Annotated[
        str | None,
        typer.Option(help="What ends a step of a script, as for instrument run.", metavar="SIGN"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, exact, as JSON.")] = False,
    sarif: Annotated[Path | None, typer.Option(help="Write SARIF, for code scanning.", metavar="FILE")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Fail only for what is not in FILE.", metavar="FILE")
    ] = None,
    write_baseline: Annotated[
        Path | None, typer.Option(help="Write what is found now; keeps the reasons in FILE.", metavar="FILE")
    ] = None,
    allowlist: Annotated[
        Path | None, typer.Option(help="Allow what is in FILE, each with its reason.", metavar="FILE")
    ] = None,
) -> None:
    """Find the lines that make the CPU wait for the GPU; no GPU is needed.

    TARGET is a script (train.py), which is run as if there were a GPU; a function of a file (train.py::step),
    which is called once in the same way; or a trace of torch.profiler or Nsight Systems, which is read. What
    follows -- are the script's arguments: instrument syncs --steps 3 train.py -- --batch-size 4

    What was found so far is printed however a script ends: by --steps or --time-limit, by an error, by Ctrl-C or
    by SIGTERM. A script leaves as by sys.exit. Where it catches that and goes on, its process ends at the next
    step, within a second of the time limit, or at the second signal.

    The exit code is 0 where no step waits more often than --max, 1 where one does or a script ends with an error,
    2 where something cannot be read, 130 after Ctrl-C and 143 after SIGTERM.
    """
    try:
        known = Baseline.read(baseline) if baseline else None
        excused = Baseline.read(allowlist, reasons=True) if allowlist else None
        limits = budgets(budget or [])
        step_on = check_step_on(step_on)
        before = Baseline.read(write_baseline) if write_baseline and write_baseline.exists() else known
        for file in (sarif, write_baseline):
            if file is not None and not file.absolute().parent.is_dir():
                raise ValueError(f"cannot write {file}: there is no folder {file.absolute().parent}")
    except (OSError, ValueError) as error:
        raise unusable(error) from None
    reports: Reports = []
    out = _reserve_stdout() if as_json else sys.stdout

    def conclude() -> int:
        """Print and write what was found; return the exit code."""
        found = [report for _, report in reports]
        if excused is not None:
            _apply(excused, found, f"allowlist {allowlist}")
        fresh = Baseline.of(found, before)
        if known is not None:
            _apply(known, found, f"baseline {baseline}")
        try:
            if sarif:
                sarif.write_text(to_sarif(found), encoding="utf-8")
            _print(reports, out, as_json)
            if write_baseline:
                _write(fresh, write_baseline, found)
        except OSError as error:
            raise unusable(error) from None
        failed = _failed(reports, most, written=write_baseline is not None)
        return _signalled(reports) or int(failed)

    def caught(target: str, report: SyncReport) -> None:
        """End the process, whose script catches what is to end it."""
        reports.append((target, report))
        _exit(conclude, out)

    for target in targets:
        try:
            reports += _look(target, limits, ctx.meta[_ARGUMENTS], fake, steps, time_limit, step_on, caught)
        except (OSError, ValueError, TypeError) as error:
            raise unusable(error) from None
        if _signalled(reports):
            break
    if code := conclude():
        raise typer.Exit(code)


def _exit(conclude: Callable[[], int], out: TextIO) -> None:
    """End the process with the exit code that ``conclude`` returns; nothing of the script runs any more."""
    code = 1
    try:
        code = conclude()
    except typer.Exit as error:
        code = error.exit_code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in filter(None, (out, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _signalled(reports: Reports) -> int:
    """The exit code after the signal that ended the last run; 0 where none did."""
    error = reports[-1][1].error if reports else None
    return int(error.code or 0) if isinstance(error, EarlyStop) else 0


def _look(
    target: str,
    budgets: dict[str, int] | None,
    args: list[str],
    fake: bool,
    steps: int | None,
    time_limit: float | None,
    step_on: str | None,
    caught: Callable[[str, SyncReport], None],
) -> Iterator[tuple[str, SyncReport]]:
    file, separator, function = ("", "", "") if Path(target).is_file() else target.rpartition("::")
    if separator or target.endswith(".py"):
        from ..dryrun.run import dry_run_file

        if separator and not file:
            raise ValueError(_NAMED.format(target))
        path, called = Path(file if separator else target), function if separator else None
        yield (
            target,
            dry_run_file(
                path, called, fake=fake, args=args, budget=budgets,
                steps=steps, time_limit=time_limit, step_on=step_on, caught=partial(caught, target),
            ),
        )  # fmt: skip
        return
    if ".py:" in target and not Path(target).exists():
        raise ValueError(_NAMED.format(target))
    if args:
        raise ValueError(f"{target} is a trace, which takes no arguments: {' '.join(args)}")
    options = {
        "--budget": budgets, "--steps": steps, "--time-limit": time_limit, "--step-on": step_on, "--fake": fake,
    }  # fmt: skip
    for option in (option for option, value in options.items() if value):
        raise ValueError(f"{option} is for scripts, and {target} is a trace")
    from ..syncs.audit import audit_syncs

    trace = read_trace(target)
    if not isinstance(trace, TraceSet):
        yield target, audit_syncs(trace)
        return
    if trace.failed:
        raise ValueError("; ".join(f"cannot read {path}: {reason}" for path, reason in trace.failed.items()))
    for rank, one in trace.items():
        yield f"{target}, rank {rank}", audit_syncs(one)


def _apply(known: Baseline, found: list[SyncReport], name: str) -> None:
    """Allow what is known, and say what the file has that is no more so."""
    for report in found:
        for place, now, most in known.allow(report, name):
            say(f"more waits than {name} has: {place}: {now} in a step, was {most}")
    for entry in known.stale(found):
        say(f"no longer found; remove it from {name}: {entry}")


def _reserve_stdout() -> TextIO:
    """Return standard output, for the JSON alone: until this process ends, all else goes to standard error.

    So does what child processes of a script print, and what its exit handlers do.
    """
    out = sys.stdout
    with contextlib.suppress(OSError, ValueError):  # one of a test has no descriptor
        if out.fileno() == 1:
            out.flush()
            out = open(os.dup(1), "w", encoding=out.encoding, errors=out.errors)  # noqa: PTH123, SIM115
            os.dup2(2, 1)
    sys.stdout = sys.stderr
    return out


def _print(reports: Reports, out: TextIO, as_json: bool) -> None:
    if as_json:
        written = [{"target": target} | as_dict(report) for target, report in reports]
        print(json.dumps(written if len(written) != 1 else written[0], indent=2), file=out, flush=True)
        return
    console = Console(file=out)
    for number, (target, report) in enumerate(reports):
        if len(reports) > 1:
            line(console, target, bold=True, space=bool(number))
        render(report, console=console)


def _write(fresh: Baseline, path: Path, found: list[SyncReport]) -> None:
    if all(report.finished for report in found):  # else it would lose what was not come to
        fresh.write(path)
        say(f"known waits written to {path}: {len(fresh.entries)}")
    else:
        say(f"{path} is not written: a run ended early")


def _failed(reports: Reports, most: int | None, written: bool) -> bool:
    """Say on standard error why the command fails, if it does."""
    failed = False
    for target, report in reports:
        reason = (None if report.finished else "the run ended early") if written else report.over(most)
        if reason is not None:
            say(f"{target}: {reason}")
            failed = True
    return failed
