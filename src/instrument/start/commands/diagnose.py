"""``instrument diagnose``: says what is slow in a trace, why, and what a fix would win."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...base.errors import TraceError
from .command import (
    COLLECTIVES,
    HTML,
    RANK,
    STEPS_FROM,
    argument,
    describe,
    errors_reported,
    flag,
    option,
    print_message,
    subcommand_of,
    write_html,
)

if TYPE_CHECKING:
    from ...explain.diagnosis.diagnose import Diagnosis


def diagnose_command(
    traces: list[str] = argument("TRACE...", "Files, or folders of a run or of the ranks' files."),
    as_json: bool = flag("--json", "Print the whole diagnosis as JSON."),
    as_markdown: bool = flag("--markdown", "Print Markdown, for a pull request."),
    as_html: Path | None = HTML,
    ignore: list[str] | None = option("RULE", "Leave out a rule."),
    change: list[str] | None = option(
        "RULE.NAME=N", "Change a threshold of a rule: --set input-wait.share=0.1", "--set"
    ),
    steps_from: str | None = STEPS_FROM,
    rank: int | None = RANK,
    compile_log: Path | None = option(
        "PATH",
        "The log of torch.compile that TORCH_TRACE=FOLDER writes: a file or the folder. By default, the "
        "logs beside the trace.",
    ),
    collectives: str = COLLECTIVES,
) -> None:
    """Say what is slow in a trace, why, and what a fix would win.

    The verdict is what bounds a step. The findings follow, those with the most time to win first, each with its
    place, the numbers that it rests on, and a fix. TRACE is a trace of torch.profiler (.json, .json.gz), a report
    of Nsight Systems (.sqlite, .nsys-rep) or of rocprofv3 (.json, .db), a memory snapshot (.pickle), or the folder
    of a run, of which the trace and the memory snapshot are read. The ranks of a job are one folder, or one
    pattern in quotes; several TRACEs are diagnosed one after the other.

    Rules are left out and tuned by --ignore and --set, or in pyproject.toml, in the current folder or above it:

    [tool.instrument.diagnose]

    ignore = ["memsets"]

    input-wait = {share = 0.1}

    docs/rules.md lists the rules. --html writes one file with charts and tables, which needs no network. The exit
    code is 0 if every trace was diagnosed, 1 if one cannot be read or the page cannot be written, and 2 for
    options that are wrong or do not fit a trace.
    """
    from ...explain.diagnosis.diagnose import diagnose
    from ...explain.diagnosis.diagnosis import as_dict, as_text
    from ...read.tables.work_classes import compile_collectives
    from .rule_settings import rule_settings

    with errors_reported(unreadable=2):
        if as_json + as_markdown + (as_html is not None) > 1:
            raise ValueError("--json, --markdown and --html exclude each other")
        if as_html is not None and len(traces) > 1:
            raise ValueError(f"--html writes one page: give one TRACE, not {len(traces)}")
        ignored, thresholds = rule_settings(ignore or [], change or [])
        compile_collectives(collectives)
    found, failed = [], False
    for path in traces:
        with errors_reported():  # of an option that this trace shows to be wrong
            try:
                found.append(
                    diagnose(
                        path,
                        ignore=ignored,
                        thresholds=thresholds,
                        collectives=collectives,
                        steps_from=steps_from,
                        rank=rank,
                        compile_log=compile_log,
                    )
                )
            except (TraceError, OSError) as error:
                print_message(describe(error))
                failed = True
    if as_json:
        dicts = [as_dict(each) for each in found]
        typer.echo(as_text(dicts if len(traces) > 1 or not dicts else dicts[0]))
    elif as_html is not None:
        for diagnosis in found:
            write_html(diagnosis.to_html, as_html)
    else:
        _print(found, as_markdown, several=len(traces) > 1)
    ranks = {each.rank for each in found if each.rank is not None}
    if len(ranks) > 1:
        print_message(
            f"the files of ranks {', '.join(map(str, sorted(ranks)))} were diagnosed apart: give their folder, or "
            "a pattern in quotes, to diagnose them as one job"
        )
    if failed:
        raise typer.Exit(1)


def _print(found: list[Diagnosis], as_markdown: bool, *, several: bool) -> None:
    from ...show.terminal.console import new_console, print_line

    console = new_console()
    for diagnosis in found:
        if as_markdown:
            typer.echo((f"## {diagnosis.path}\n\n" if several else "") + diagnosis.to_markdown())
            continue
        if several:
            print_line(console, diagnosis.path, bold=True, space=True)
        console.print(diagnosis, soft_wrap=True)


subcommand = subcommand_of(diagnose_command)
