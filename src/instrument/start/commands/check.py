"""``instrument check``: counts what a training step does, and compares that with files that a project holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import typer

from ...base.units import counted
from .. import cli
from .scripts import ScriptCommand, arguments_of, exit_at_once, exit_code_of_signal, program_of, reserve_stdout

if TYPE_CHECKING:
    from ...explain.contract.numbers import Numbers
    from ...explain.contract.region_tree import RegionTree
    from ...show.text.contract import Checked
    from ...syncs.dryrun.report import DryRunReport

Format = Literal["terminal", "markdown", "sarif", "json"]


def check(
    ctx: typer.Context,
    script: str = cli.argument("SCRIPT", "A script, or FILE.py::FUNCTION."),
    steps: int | None = cli.option("N", "End the script after N steps.", min=1),
    time_limit: float | None = cli.option("SECONDS", "End the script after this many seconds.", min=0.001),
    fake: bool = cli.flag("--fake", "Compute shapes only, for models that are too large to run."),
    step_on: str | None = cli.option("SIGN", "What ends a step of a script, as in instrument run."),
    gpus: int = cli.option("N", "Run as rank 0 of N, as torchrun starts it, but alone.", default=1, min=1),
    baseline: Path | None = cli.option("FILE", "Fail if a number is not the one in this file."),
    regions: Path | None = cli.option("FILE", "Fail if the regions and their calls are not those in this file."),
    update: bool = cli.flag("--update", "Write what is found now to the files; reasons are kept."),
    as_format: Format = cli.option("FORMAT", "terminal, markdown, sarif or json.", "--format", default="terminal"),
    as_json: bool = cli.flag("--json", "Print JSON, as --format json."),
) -> None:
    """Count what a step of a script does on a GPU: kernels, operations, bytes, copies; no GPU is needed.

    The script runs as it is, as if there were a GPU, and its arguments follow it:
    instrument check --steps 2 -- train.py --batch-size 4. Run at least two steps: the first includes work that is
    done once.

    With --baseline and --regions, what is found must be what the files have. A table says what moved, by region
    and line. A smaller number fails, too, until --update records it. --update also creates a missing file.

    The exit code is 0 if everything is as in the files; 1 if something moved, or the script ends with an error;
    2 if something cannot be read; 130 after Ctrl-C and 143 after SIGTERM.
    """
    from ...record.stepping.explicit_steps import check_step_on
    from ...syncs.dryrun.run import dry_run_file

    as_format = "json" if as_json else as_format
    with cli.errors_reported(unreadable=2):
        held = Held(baseline, regions, update)
        step_on = check_step_on(step_on)
        program, function = program_of(script)
    out = reserve_stdout() if as_format != "terminal" else sys.stdout

    def conclude(report: DryRunReport) -> int:
        """Compare or write, and print; return the exit code."""
        with cli.errors_reported(unreadable=2):
            checked = held.check(report)
            _print(script, report, checked, as_format, out)
        if checked.failure:
            cli.print_message(f"{script}: {checked.failure}")
        return exit_code_of_signal(report.error) or int(not checked.passed)

    with cli.errors_reported(unreadable=2):
        report = dry_run_file(
            program, function, fake=fake, args=arguments_of(ctx), steps=steps, time_limit=time_limit,
            step_on=step_on, ranks=gpus, on_caught_stop=lambda report: exit_at_once(lambda: conclude(report), out),
        )  # fmt: skip
    if code := conclude(report):
        raise typer.Exit(code)


class Held:
    """The files that a project holds.

    Args:
        baseline: the file of numbers.
        regions: the file of regions.
        update: whether they are written.

    Raises:
        ValueError, OSError: a file cannot be read, or is missing.
    """

    def __init__(self, baseline: Path | None, regions: Path | None, update: bool) -> None:
        from ...explain.contract.number_file import NumberFile
        from ...explain.contract.region_tree import RegionTree

        files = [file for file in (baseline, regions) if file is not None]
        if update and not files:
            raise ValueError("--update has no effect without --baseline or --regions")
        for file in files:
            if not update and not file.exists():
                raise ValueError(f"there is no {file}; --update writes it")
            if not file.absolute().parent.is_dir():
                raise ValueError(f"cannot write {file}: folder not found: {file.absolute().parent}")
        self._update = update
        self.baseline, self.regions = baseline, regions
        self._numbers = NumberFile.read(baseline, conflicts=update) if baseline and baseline.exists() else None
        if self._numbers is not None and not (self._numbers.held or update):
            raise ValueError(f"{baseline} contains no numbers; --update writes them")
        self._tree = RegionTree.read(regions) if regions and not update else None
        self._folder = Path.cwd()  # a script may change it

    def check(self, report: DryRunReport) -> Checked:
        """Compare what was found with the files, or write them.

        Raises:
            ValueError: a file has a number that there is not, or there are no regions.
            OSError: a file cannot be written.
        """
        from ...explain.contract.region_tree import RegionTree
        from ...show.text.contract import Checked

        checked = Checked(failure=report.failure, folder=self._folder)
        if checked.failure:
            return checked
        regions = report.regions or RegionTree()
        if self._update:
            checked.notes = [*self._write(report.numbers, regions)]
            return checked
        checked.numbers_file, checked.regions_file = self.baseline, self.regions
        if self._numbers is not None:
            checked.changes = self._numbers.changes(report.numbers)
            missing = self._numbers.missing(report.numbers)
            if missing:
                checked.notes.append(f"Not in {self.baseline}, and not compared: {', '.join(missing)}.")
        if self._tree is not None:
            checked.regions = self._tree.changes(regions)
            if regions.of_modules and not self._tree.of_modules:
                checked.notes.append(f"The step has no regions; its modules are compared with {self.regions}.")
        return checked

    def _write(self, numbers: Numbers, tree: RegionTree) -> Iterator[str]:
        from ...explain.contract.number_file import NumberFile

        if self.baseline is not None:
            fresh = NumberFile.of(numbers, self._numbers)
            fresh.write(self._folder / self.baseline)
            yield f"{counted(len(fresh.held), 'number')} written to {self.baseline}."
        if self.regions is not None:
            if not tree.calls:
                raise ValueError(
                    "the step has no regions and calls no modules: name them with instrument.annotate"
                )
            tree.write(self._folder / self.regions)
            what = "module" if tree.of_modules else "region"
            yield f"{counted(len(tree.calls), what)} written to {self.regions}."


def _print(script: str, report: DryRunReport, checked: Checked, as_format: Format, out: TextIO) -> None:
    from ...show.terminal.console import new_console, show
    from ...show.terminal.contract import check_report
    from ...show.text.contract import to_markdown
    from ...show.text.contract_sarif import to_sarif
    from ...show.text.lines import line

    counts = ""
    if not (checked.failure or checked.numbers_file or checked.regions_file or checked.notes):
        counts = f"{report.counts}\n"
        if report.memory is not None:
            counts += f"\nMemory: {report.memory}\n"
    if as_format == "terminal":
        show(new_console(file=out), [*map(line, counts.splitlines()), *check_report(checked)])
        return
    if as_format == "json":
        text = json.dumps({"target": script} | as_dict(report, checked), indent=2)
    elif as_format == "markdown":
        text = f"```\n{counts}```" if counts else to_markdown(checked)
    else:
        text = to_sarif(checked)
    print(text, file=out, flush=True)


def as_dict(report: DryRunReport, checked: Checked) -> dict[str, Any]:
    """Return the outcome as a dict of JSON values; while ``version`` is 1, keys are only added.

    ``counts`` (as `Counts.as_dict` has them), ``memory`` (as `MemoryUse.as_dict` has it), ``finished``, ``error``
    (null, or what ended the run), ``failure`` (null, or why there is nothing to compare), ``numbers`` (as
    `Numbers.to_dict` has them), ``regions`` (the tree, as text), ``changed`` (of each number that moved: name,
    was, now, places), ``changed_regions`` (sentences) and ``notes`` (sentences).
    """
    return {
        "version": 1,
        "counts": report.counts.as_dict() if report.counts is not None else None,
        "memory": report.memory.as_dict() if report.memory is not None else None,
        "finished": report.finished,
        "error": report.ended,
        "failure": checked.failure or None,
        "numbers": report.numbers.to_dict(),
        "regions": str(report.regions or ""),
        "changed": [
            {
                "name": change.name,
                "was": change.was,
                "now": change.now,
                "places": [{"place": str(part), "was": part.was, "now": part.now} for part in change.parts],
            }
            for change in checked.changes
        ],
        "changed_regions": checked.regions,
        "notes": checked.notes,
    }


subcommand = cli.subcommand_of(check, ScriptCommand)
