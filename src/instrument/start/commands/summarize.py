"""``instrument summarize``: shows where the time of the recorded steps went."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...base.errors import TimeSumsError, TraceError
from ...base.run_folder import (
    count_snapshots,
    entry_of,
    how_to_show_snapshots,
    last_window,
    without_files,
    without_line,
)
from ...base.units import counted
from .. import cli

if TYPE_CHECKING:
    from rich.console import Console

    from ...read.jobs.ranks import TraceSet
    from ...read.measures.timing import Timing
    from ...read.tables.trace import Trace
    from ...read.tables.work_classes import Collectives
    from ...show.terminal.summarize import RecordedRun

    Windows = Iterable[tuple[Trace, Timing | None]]

_TRACE, _LANES = "TRACE", "--add-gpu-lanes"
_NO_LINE = "without a line in manifest.jsonl: the window is being finished, or the program was just killed"


def summarize(
    traces: list[str] = cli.argument("TRACE...", "Files, '-', or folders or patterns of the ranks' files."),
    as_json: bool = cli.flag("--json", "Print all numbers as JSON, unrounded."),
    collectives: str = cli.COLLECTIVES,
    steps_from: str | None = cli.option(
        "REGEX",
        "Names of the regions that are the steps. Without it, a trace without steps takes the one "
        "outermost region that repeats and takes most of the time.",
    ),
    expand: bool = cli.flag("--expand", "Show regions whose names differ only in numbers one by one."),
    rank: int | None = cli.option(
        "N", "The rank to print below the table of ranks, of several: by default the lowest.", min=0
    ),
    phase: str | None = cli.option(
        "NAME", "The phase to summarize, of a run that recorded phases beside its steps: --phase eval"
    ),
    lanes: Path | None = cli.option(
        "OUT",
        "Write a copy of a torch.profiler trace with lanes that show, for each GPU stream, which region "
        "its work belongs to.",
        _LANES,
    ),
) -> None:
    """Show where the time of the recorded steps went, by region and by operator.

    TRACE is a trace of torch.profiler (.json, .json.gz), a report of Nsight Systems (.sqlite, .nsys-rep) or of
    rocprofv3 (.json, .db). A folder or a pattern contains the traces of the ranks of one job; for the folder of a
    run, all windows of the last run are summarized, and --json has the numbers of each under "windows".
    """
    from ...read.jobs.ranks import TraceSet
    from ...read.jobs.read import read_any
    from ...read.tables.trace import Trace
    from ...read.tables.work_classes import compile_collectives
    from ...show.terminal.console import new_console, print_line, show
    from ...show.terminal.summarize import find_recorded_run, time_sums

    with cli.value_of("--collectives"):
        pattern = compile_collectives(collectives)
    if lanes is not None:
        _check_lanes(traces, lanes)
    console, failed = new_console(), False
    numbers: list[dict[str, Any]] = []
    for path in traces:
        snapshots = count_snapshots(Path(path))
        if unfinished := without_line(Path(path)):
            files = f"{counted(len(unfinished), 'trace')} of {path}"
            cli.print_message(f"{files} {_NO_LINE} ({', '.join(map(str, unfinished[:3]))})")
        try:
            with cli.errors_reported(names={'"phase"': "--phase"}):
                window = last_window(path, phase=phase)
            read = read_any(window)
        except TimeSumsError as error:
            if as_json:
                numbers.append({"path": path, "time_sums": [each._asdict() for each in error.sums]})
            else:
                show(console, time_sums(error))
            continue
        except (TraceError, OSError) as error:
            cli.print_message(cli.describe(error))
            if snapshots:
                cli.print_message(how_to_show_snapshots(snapshots, Path(path)))
            failed = True
            continue
        for failure in without_files(Path(path), "failed")[-3:]:
            cli.print_message(f"{path}, {failure}")
        with_steps = partial(_with_steps, pattern=steps_from)
        trace = read.map(with_steps) if isinstance(read, TraceSet) else with_steps(read)
        if lanes is not None and isinstance(trace, Trace):
            _add_lanes(trace, lanes)
        ranks = trace.ranks if isinstance(trace, TraceSet) else [trace.rank or 0]
        with cli.value_of("--rank"):
            if rank is not None and rank not in ranks:
                raise ValueError(f"{path} has no trace of rank {rank}; it has: {', '.join(map(str, ranks))}")
        run = find_recorded_run(path, trace, rank) if isinstance(trace, TraceSet) else None
        failed = failed or (isinstance(trace, TraceSet) and bool(trace.failed))
        if as_json:
            unread: list[Path] = []
            numbers.append(_numbers(trace, pattern))
            if isinstance(trace, TraceSet):
                windows = _numbers_of_windows(path, trace, numbers[-1]["ranks"], pattern, with_steps, unread)
                numbers[-1]["left_out"] = _as_text(trace.left_out)  # less what was read
                numbers[-1]["windows"] = windows
            failed = failed or bool(unread)
            continue
        if len(traces) > 1:
            print_line(console, path, bold=True, space=True)
        failed = not _print(trace, path, run, pattern, steps_from, expand, rank, console) or failed
        if snapshots:
            print_line(console, how_to_show_snapshots(snapshots, Path(path)))
    if numbers:
        typer.echo(json.dumps(numbers if len(traces) > 1 else numbers[0], indent=2))
    if failed:
        raise typer.Exit(1)


def _with_steps(trace: Trace, pattern: str | None) -> Trace:
    """Return the trace with steps from the regions with such names or, without a pattern, from what repeats."""
    from ...read.measures.region_steps import with_steps

    with cli.value_of("--steps-from"):
        try:
            return with_steps(trace, pattern)
        except ValueError as error:
            raise ValueError(str(error).removeprefix('"steps_from" ')) from None


def _check_lanes(traces: list[str], lanes: Path) -> None:
    """Check, before anything is read, that a copy with lanes can be written."""
    from ...read.kineto.insert_events import check_out, check_source

    with cli.value_of(_TRACE):
        if len(traces) > 1:
            raise ValueError(f"with --add-gpu-lanes one TRACE is accepted, not {len(traces)}")
        source = check_source(Path(traces[0]))
    with cli.value_of(_LANES):
        check_out(source, lanes)


def _add_lanes(trace: Trace, lanes: Path) -> None:
    from ...read.kineto.insert_events import add_gpu_lanes

    try:
        added = add_gpu_lanes(trace, lanes)
    except OSError as error:
        raise typer.BadParameter(cli.describe_unwritten(error, lanes), param_hint=_LANES) from None
    except ValueError as error:
        raise typer.BadParameter(f"no lanes can be added: {error}", param_hint=_TRACE) from None
    more = f"; {added.left_out:,} more overlap too many others" if added.left_out else ""
    ranges, streams = counted(added.spans, "range"), counted(added.streams, "stream")
    cli.print_message(f"{lanes} has {ranges} of regions and steps on {streams} of the GPU{more}")


def _numbers(trace: Trace | TraceSet, collectives: Collectives) -> dict[str, Any]:
    from ...explain.metrics.job import job_of
    from ...explain.metrics.metrics import metrics
    from ...explain.metrics.pipelines import as_dict
    from ...read.tables.trace import Trace

    if isinstance(trace, Trace):
        about: dict[str, Any] = {"path": str(trace.path), "format": trace.format, "rank": trace.rank}
        about["timing"] = (entry_of(trace.path) or {}).get("timing")
        coverage = {link: vars(part) for link, part in trace.coverage.items()}
        about["steps_from"] = trace.steps_from
        about["unread_devices"] = {name: vars(left) for name, left in trace.unread_devices.items()}
        known = {"coverage": coverage, "lost": vars(trace.lost), "unplaced": trace.unplaced}
        return about | metrics(trace, collectives) | known
    return {
        "world_size": trace.world_size,
        "missing": trace.missing,
        "failed": _as_text(trace.failed),
        "left_out": _as_text(trace.left_out),
        "guessed": trace.guessed,
        "clocks": {rank: vars(clock) for rank, clock in trace.clocks.items()},
        "pipelines": [as_dict(each) for each in job_of(trace, collectives).pipelines.pipelines],
        "ranks": [_numbers(one, collectives) | {"rank": rank} for rank, one in trace.items()],
    }


def _as_text(files: Mapping[Path, str]) -> dict[str, str]:
    return {str(path): text for path, text in files.items()}


def _numbers_of_windows(
    path: str,
    traces: TraceSet,
    last: Sequence[Mapping[str, Any]],
    collectives: Collectives,
    with_steps: Callable[[Trace], Trace],
    unread: list[Path],
) -> list[dict[str, Any]]:
    """Return the numbers of each window of a run, and of its phases, in order of time; empty for other folders.

    Args:
        path: the folder.
        traces: the last window of each rank.
        last: their numbers.
        collectives: which kernels communicate.
        with_steps: gives a trace its steps.
        unread: gets the files that cannot be read, which are reported.
    """
    from ...show.terminal.summarize import find_recorded_run

    runs = [find_recorded_run(path, traces, rank) for rank in traces]
    recorded = [each for run in runs if run is not None for each in (*run.windows, *run.others)]
    known = {each["path"]: each for each in last}
    numbers = []
    for file, entry in sorted(recorded, key=lambda each: (each[1].get("end_ns") or 0, each[0])):
        own = known.get(str(file))
        if own is None:
            trace = _read_window(file, with_steps, unread)
            own = None if trace is None else _numbers(trace, collectives)
        if own is not None:
            about = {"window": entry.get("window"), "phase": entry.get("phase"), "step_numbers": entry["steps"]}
            numbers.append(about | dict(own) | {"rank": entry.get("rank")})
    return numbers


def _print(
    trace: Trace | TraceSet,
    path: str,
    run: RecordedRun | None,
    collectives: Collectives,
    steps_from: str | None,
    expand: bool,
    rank: int | None,
    console: Console,
) -> bool:
    """Print the summary of a trace, a set or a run; return whether every trace could be read."""
    from ...read.jobs.ranks import TraceSet
    from ...read.measures.timing import Timing
    from ...read.tables.trace import Trace
    from ...show.terminal.console import show
    from ...show.terminal.summarize import phase_table
    from ...show.terminal.summary import print_files
    from ...show.terminal.trace_report import print_trace_set, print_windows

    first = trace if isinstance(trace, Trace) else trace[next(iter(trace)) if rank is None else rank]
    windows: Windows = [(first, Timing.from_manifest(entry_of(first.path)))]
    files, folder, title, unread = [first.path], first.path.parent, "", list[Path]()
    if run is not None and len(run.windows) > 1:
        files, folder, title = [file for file, _ in run.windows], run.folder, run.title
        windows = _read_windows(run, first, steps_from, unread)
    if isinstance(trace, TraceSet):
        print_trace_set(
            trace, collectives, windows=windows, title=title, hidden=run.hidden if run else (), expand=expand,
            rank=rank, console=console,
        )  # fmt: skip
    else:
        print_windows(windows, collectives, expand=expand, console=console)
    if run is not None:
        show(console, phase_table(run))
    if first.format == "kineto" and path != "-":
        print_files(files, folder, console=console)
    return not unread


def _read_windows(run: RecordedRun, held: Trace, steps_from: str | None, unread: list[Path]) -> Windows:
    """Yield the windows of a run one by one, except ``held``, which is read already.

    Those that cannot be read are reported, and added to ``unread``.
    """
    from ...read.measures.timing import Timing

    for file, entry in run.windows:
        with_steps = partial(_with_steps, pattern=steps_from)
        trace = held if file == held.path else _read_window(file, with_steps, unread)
        if trace is not None:
            yield trace, Timing.from_manifest(entry)


def _read_window(file: Path, with_steps: Callable[[Trace], Trace], unread: list[Path]) -> Trace | None:
    """Return the trace of a window; None if it cannot be read, which is reported and added to ``unread``."""
    from ...read.jobs.read import read_file

    try:
        return with_steps(read_file(file))
    except (TraceError, OSError) as error:
        cli.print_message(cli.describe(error))
        unread.append(file)
        return None


subcommand = cli.subcommand_of(summarize)
