"""``instrument diagnose``: says what is slow in a trace, why, and what a fix would win."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...base.errors import TraceError
from .. import cli

if TYPE_CHECKING:
    from ...explain.diagnosis.diagnose import Diagnosis

_TABLE = "tool.instrument.diagnose"


def diagnose_command(
    traces: list[str] = cli.argument("TRACE...", "Files, or folders of a run or of the ranks' files."),
    as_json: bool = cli.flag("--json", "Print the whole diagnosis as JSON."),
    as_markdown: bool = cli.flag("--markdown", "Print Markdown, for a pull request."),
    as_html: Path | None = cli.HTML,
    ignore: list[str] | None = cli.option("RULE", "Leave out a rule."),
    change: list[str] | None = cli.option(
        "RULE.NAME=N", "Change a threshold of a rule: --set input-wait.share=0.1", "--set"
    ),
    steps_from: str | None = cli.STEPS_FROM,
    rank: int | None = cli.RANK,
    compile_log: Path | None = cli.option(
        "PATH",
        "The log of torch.compile that TORCH_TRACE=FOLDER writes: a file or the folder. By default, the "
        "logs beside the trace.",
    ),
    collectives: str = cli.COLLECTIVES,
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

    with cli.errors_reported(unreadable=2):
        if as_json + as_markdown + (as_html is not None) > 1:
            raise ValueError("--json, --markdown and --html exclude each other")
        if as_html is not None and len(traces) > 1:
            raise ValueError(f"--html writes one page: give one TRACE, not {len(traces)}")
        ignored, thresholds = rule_settings(ignore or [], change or [])
        compile_collectives(collectives)
    diagnoses, failed = [], False
    for path in traces:
        with cli.errors_reported():  # of an option that this trace shows to be wrong
            try:
                diagnoses.append(
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
                cli.print_message(cli.describe(error))
                failed = True
    if as_json:
        dicts = [as_dict(each) for each in diagnoses]
        typer.echo(as_text(dicts if len(traces) > 1 or not dicts else dicts[0]))
    elif as_html is not None:
        for diagnosis in diagnoses:
            cli.write_html(diagnosis.to_html, as_html)
    else:
        _print(diagnoses, as_markdown, several=len(traces) > 1)
    ranks = {each.rank for each in diagnoses if each.rank is not None}
    if len(ranks) > 1:
        cli.print_message(
            f"the files of ranks {', '.join(map(str, sorted(ranks)))} were diagnosed apart: give their folder, or "
            "a pattern in quotes, to diagnose them as one job"
        )
    if failed:
        raise typer.Exit(1)


def _print(diagnoses: list[Diagnosis], as_markdown: bool, *, several: bool) -> None:
    from ...show.terminal.console import new_console, print_line

    console = new_console()
    for diagnosis in diagnoses:
        if as_markdown:
            typer.echo((f"## {diagnosis.path}\n\n" if several else "") + diagnosis.to_markdown())
            continue
        if several:
            print_line(console, diagnosis.path, bold=True, space=True)
        console.print(diagnosis, soft_wrap=True)


def rule_settings(ignore: list[str], change: list[str]) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Return the rules to ignore and the thresholds: those of pyproject.toml, then those of the command line.

    Args:
        ignore: the rules that the command line leaves out.
        change: its thresholds, each ``RULE.NAME=NUMBER``.

    Raises:
        ValueError: a rule or a threshold that does not exist, or a threshold that is not a number.
    """
    from ...explain.diagnosis.diagnose import chosen_rules
    from ...explain.rules.rule import load_rules

    for name, error in load_rules():
        cli.print_message(f"the rules of the entry point {name} cannot be imported: {error!r}")
    table = _pyproject()
    ignored = table.pop("ignore", [])
    if not isinstance(ignored, list):
        raise ValueError(f'"ignore" in [{_TABLE}] must be a list of rules: {ignored!r}')
    thresholds: dict[str, dict[str, float]] = {}
    for name, values in table.items():
        if not isinstance(values, Mapping):
            raise ValueError(f'"{name}" in [{_TABLE}] must be a table of thresholds: {values!r}')
        thresholds[name] = dict(values)
    for text in change:
        place, _, value = text.partition("=")
        name, _, threshold = place.rpartition(".")
        try:
            thresholds.setdefault(name, {})[threshold] = float(value)
        except ValueError:
            raise ValueError(f"--set must be RULE.NAME=NUMBER: {text!r}") from None
    chosen_rules([*ignored, *ignore], thresholds)
    return [*ignored, *ignore], thresholds


def _pyproject() -> dict[str, Any]:
    """Return the table of this command in the nearest pyproject.toml; empty without one."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    for folder in (Path.cwd(), *Path.cwd().parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            try:
                read = tomllib.loads(file.read_text(encoding="utf-8"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"cannot read {file}: {error}") from None
            return _table_of(read)
    return {}


def _table_of(read: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table `_TABLE` of what a pyproject.toml holds; empty without one."""
    table: Any = read
    for place, name in enumerate(names := _TABLE.split("."), 1):
        table = table.get(name, {})
        if not isinstance(table, Mapping):
            raise ValueError(f"[{'.'.join(names[:place])}] in pyproject.toml must be a table: {table!r}")
    return dict(table)


subcommand = cli.subcommand_of(diagnose_command)
