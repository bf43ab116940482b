"""``instrument run``: runs an unchanged program and records its steps."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...base.config import PROCESS, RUN, settings
from ...base.errors import LaunchError
from ...base.printable import shell_line
from .. import cli

if TYPE_CHECKING:
    from ..launch import LaunchRequest

_PROGRAM = f"{__name__}.program"
_AFTER_MEMORY = f"{__name__}.after_memory"
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*t?(?:\.exe)?", re.IGNORECASE)
_LONG_WITH_VALUE = "--check-hash-based-pycs"
_SITE = Path(__file__).parents[1] / "bootstrap" / "site"


class Profiler(str, Enum):
    """The profilers that ``--profiler`` accepts."""

    auto = "auto"
    torch = "torch"
    nsys = "nsys"
    ncu = "ncu"
    rocprof = "rocprof"
    vtune = "vtune"
    none = "none"


class RecordedDetail(str, Enum):
    """What ``--detail`` accepts, as `instrument.record.exporters.torch_profiler.DETAILS`."""

    regions = "regions"
    operators = "operators"
    full = "full"


class Names(str, Enum):
    """The names of modules that ``--names`` accepts."""

    class_ = "class"
    path = "path"
    both = "both"


class BeforeProgram(cli.Command):
    """A command whose options end where the program begins: at ``--``, ``-m``, or the first other word.

    ``--memory`` alone means ``--memory events``: the word after it may be the program.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Set the program and its arguments aside."""
        at = next((at for at, word in enumerate(args) if word in ("--", "-m")), len(args))
        ctx.meta[_PROGRAM] = args[at:]
        own = args[:at]
        if "--memory" in own:
            from . import options

            value = own.index("--memory") + 1
            word = "".join(own[value : value + 1])
            if not options.is_memory(word):
                own.insert(value, options.MEMORY_EVENTS)
                ctx.meta[_AFTER_MEMORY] = word
        return super().parse_args(ctx, own)


def run(
    ctx: typer.Context,
    program: list[str] | None = typer.Argument(
        None, metavar="-- PROGRAM", help="A script, -m MODULE or a command, and its arguments."
    ),
    profiler: Profiler = cli.option(
        None,
        "The profiler: torch.profiler, a vendor's tool that this command starts, or none. "
        "auto is the tool that this command runs under, or else torch.profiler.",
        default=Profiler.auto,
    ),
    steps: str | None = cli.option(
        "STEPS", "The steps to record, such as '10-12,100'; 'all' records the whole run."
    ),
    wait: int | None = cli.option(
        "N", "Steps before the warm-up of each window (default 1; not with --steps or --every).", min=0
    ),
    warmup: int | None = cli.option(
        "N", "Warm-up steps of each window (default 1; 0 with --steps or --every).", min=0
    ),
    active: int | None = cli.option(
        "N", "Recorded steps of each window (default 3; 1 with --steps or --every).", min=1
    ),
    repeat: int | None = cli.option(
        "N", "Number of windows, 0 is endless (default 1; 0 with --every; not with --steps).", min=0
    ),
    every: int | None = cli.option("N", "Record a window every N steps.", min=1),
    trigger: list[str] | None = cli.option(
        "TRIGGER",
        "What opens further windows: command (instrument trigger), file (FOLDER/trigger is touched), "
        "file=PATH, signal=SIGUSR2, every=30m or at=02:30.",
    ),
    black_box: bool = cli.flag(
        "--black-box", "Time all steps; a slow one opens a window, and the summary names the worst."
    ),
    diagnose: bool = cli.flag(
        "--diagnose", "Write what is slow in each window beside its trace (torch.profiler), and print the last."
    ),
    out: Path = cli.option(
        "FOLDER", "The folder for the recorded windows.", "--out", "-o", default=Path("runs/instrument")
    ),
    modules: str = cli.option(
        "LEVELS", "Levels of modules that become regions: a number, 'all' or 'none'.", default="4"
    ),
    names: Names = cli.option(None, "The names of the modules' regions.", default=Names.class_),
    syncs: bool = cli.flag("--syncs", "Find the lines that make the CPU wait for the GPU."),
    budget: list[str] | None = cli.BUDGET,
    step_on: str | None = cli.option(
        "SIGN",
        "What ends a step: optimizer, backward, grad, forward, or a function "
        "(train.py:train_step, or pkg.mod:Class.method); detected by default.",
    ),
    ranks: str | None = cli.option(
        "RANKS", "The ranks that record, such as '0,8', node=0, local=0 (one a node) or sample=4."
    ),
    detail: RecordedDetail = cli.option(
        None,
        "What torch.profiler records: regions and the GPU's work, also operators, or also shapes, "
        "memory, stacks and FLOPs.",
        default=RecordedDetail.operators,
    ),
    compile_log: bool = cli.flag(
        "--compile-log", "Write torch's log of what is compiled in a window beside its trace."
    ),
    keep: str | None = cli.option(
        "LIMITS",
        "How long the files of windows stay: windows=20, age=7d or total=50G, or several of these with "
        "commas between them (torch.profiler).",
    ),
    upload: str | None = cli.option(
        "URL", "The remote folder that windows are copied to, such as s3://bucket/runs/x (torch.profiler)."
    ),
    upload_timeout: float | None = cli.option(
        "SECONDS", "How long the end of the run waits for uploads (default 60)."
    ),
    shapes: bool = cli.flag("--shapes", "Record the shapes of inputs (torch.profiler)."),
    memory: str | None = cli.option(
        "[events|snapshot]",
        "Record the GPU's memory. 'snapshot' writes torch's history of it in a window; options follow "
        "after commas, as in 'snapshot,every=10m': stacks=all, entries=50000, size=1GB. 'events', or "
        "--memory alone, records allocations in the trace (torch.profiler).",
    ),
    stacks: bool = cli.flag("--stacks", "Record Python call stacks (torch.profiler)."),
    region: list[str] | None = cli.option("REGION", "Measure only the kernels in this region (ncu)."),
    launches: int | None = cli.option("N", "Measure at most N kernels (ncu; default 100).", min=1),
    option: list[str] | None = cli.option("OPTION", "An option to pass to the tool that --profiler starts."),
    print_command: bool = cli.flag("--print-command", "Print the command line instead of running it."),
) -> None:
    """Run a program, record its steps and print a summary; the program needs no change.

    PROGRAM is a script (train.py), -m MODULE, or a command that starts Python, such as torchrun, followed by its
    arguments. A step is what the program's framework counts as one, or else a step of its first optimizer, a
    backward pass, or a call of the model. With INSTRUMENT=0 the program just runs.
    """
    from ...base.disk import unwritable
    from ...record.stepping.explicit_steps import check_step_on
    from ...record.windows.steps import SCHEDULE_OPTIONS
    from ..launch import VENDORS, LaunchRequest
    from . import options

    line = _command(program, ctx)
    if not settings.enabled:
        if print_command:
            typer.echo(shell_line(line))
            return
        raise typer.Exit(_replace_process(line, dict(os.environ)))
    given = options.given(ctx)
    with cli.errors_reported(names=options.NAMES):
        options.reject_useless(given, profiler.value)
        loop: dict[str, Any] = {"out": str(out.absolute()), "names": names.value}
        loop["modules"] = options.levels(modules)
        loop |= options.schedule_arguments(
            steps, {name: given[name] for name in SCHEDULE_OPTIONS if name in given}
        )
        loop |= {argument: True for name, argument in options.TORCH_OPTIONS.items() if name in given}
        if memory is not None:
            loop |= options.memory(memory)
        chosen = {"compile_log": compile_log, "black_box": black_box, "diagnose": diagnose}
        loop |= {name: True for name, flag in chosen.items() if flag}
        if "detail" in given:
            loop["detail"] = detail.value
        loop |= options.storage(given)
        if syncs or budget:
            loop |= {"syncs": True, "budget": options.parse_budgets(budget or [])}
        if trigger:
            loop["triggers"] = options.triggers(trigger, out.absolute())
        if ranks is not None:
            loop["ranks"] = options.ranks(ranks)
        if step_on is not None:
            loop["step_on"] = check_step_on(step_on)
        loop["run_options"] = options.as_typed(given)
    if profiler is Profiler.torch:
        loop["exporter"] = "torch_profiler"
    elif profiler is Profiler.none:
        loop |= {"exporter": "none"} if "memory" in loop else {"record": False}
    started = environment(loop)
    if flags := " and ".join(excluding_options(line)):
        lost = "no step and no region is recorded" if profiler.value in VENDORS else "nothing is recorded"
        cli.print_message(f"{lost}: Python does not load instrument's start-up code with {flags}; remove {flags}")
    if profiler.value in VENDORS:
        count = options.windows(loop)
        request = LaunchRequest(line, out.absolute(), count, started, region or (), launches, option or ())
        raise typer.Exit(_run_under_tool(profiler.value, request, print_command))
    if loop.get("record", True) and (reason := unwritable(out.absolute())):
        cli.print_message(f"{reason}; the program runs, but its windows will not be saved")
    if profiler is Profiler.auto and (sentence := options.ignored_options(given)):
        cli.print_message(sentence)
    if print_command:
        typer.echo(_printable_command(line, started))
        return
    raise typer.Exit(_replace_process(line, started))


def _command(program: Sequence[str] | None, ctx: typer.Context) -> list[str]:
    """Return the command line of a Python script, of ``-m`` and a module, or of a command such as torchrun.

    Raises:
        typer.Exit: the program does not exist.
    """
    from . import options

    rest = ctx.meta[_PROGRAM]
    if not program and rest[:1] == ["--"]:
        rest = rest[1:]
    words = [*(program or []), *rest]
    if words:
        first = words[0]
        is_python = first.startswith("-") or first.endswith((".py", ".pyc", ".pyz")) or Path(first).is_dir()
        if not is_python and shutil.which(first):
            return words
        if is_python or Path(first).is_file():
            return [sys.executable, *words]
        reason = f"program not found: {first}"
    else:
        reason = "nothing to run: instrument run [options] -- train.py arguments..."
    if words[:1] == [ctx.meta.get(_AFTER_MEMORY)]:
        reason += f"; if this is for --memory, it must be {options.MEMORY_ACCEPTED}"
    raise cli.exit_unusable(reason)


def excluding_options(line: Sequence[str]) -> list[str]:
    """Return the options of Python in a command line that disable what `environment` adds.

    These are ``-E``, ``-I`` and ``-S``, also combined as in ``-IB``. Commands that start Python
    themselves, such as torchrun, have none.
    """
    if not _PYTHON.fullmatch(Path(line[0]).name):
        return []
    excluding: set[str] = set()
    words = iter(line[1:])
    for word in words:
        if word.startswith("--"):
            if word == _LONG_WITH_VALUE:
                next(words, None)
            continue
        if not word.startswith("-") or word == "-":
            break  # the script
        for place, flag in enumerate(word[1:], 2):
            if flag in "cm":
                return sorted(excluding)
            if flag in "WX":
                if place == len(word):
                    next(words, None)
                break
            excluding |= {f"-{flag}"} & {"-E", "-I", "-S"}
    return sorted(excluding)


def environment(loop: Mapping[str, Any], before: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment in which each Python process of a program makes a `Loop` of arguments ``loop``."""
    given = before.get("PYTHONPATH")
    paths = [path for path in given.split(os.pathsep) if path != str(_SITE)] if given else []
    return {**before, RUN: json.dumps(loop), "PYTHONPATH": os.pathsep.join([str(_SITE), *paths])}


def _run_under_tool(profiler: str, request: LaunchRequest, only_print: bool) -> int:
    """Run a program under a vendor's tool until it ends; return the exit code."""
    from ..launch import command_line, launch

    try:
        if only_print:
            folder = shell_line(["mkdir", "-p", str(request.out)])  # the tool does not create it
            typer.echo(f"{folder} && {_printable_command(command_line(profiler, request), request.environment)}")
            return 0
        return launch(profiler, request)
    except LaunchError as error:
        raise cli.exit_unusable(error) from None
    except OSError as error:
        raise cli.exit_unusable(f"cannot write to {request.out}: {error.strerror}") from None


def _printable_command(line: list[str], given: Mapping[str, str]) -> str:
    changed = [f"{name}={given[name]}" for name in ("PYTHONPATH", RUN)]
    return shell_line(["env", *changed, *line])


def _replace_process(line: list[str], given: dict[str, str]) -> int:
    """Replace this process by the program, which then gets its own signals and has its own exit code."""
    if sys.stdout is not None:
        sys.stdout.flush()
    if os.name == "nt":  # cannot replace a process
        return subprocess.call(line, env=given)
    try:
        os.execvpe(line[0], line, {**given, PROCESS: str(os.getpid())})
    except OSError as error:
        raise cli.exit_unusable(f"cannot run {line[0]}: {error.strerror}") from None


subcommand = cli.subcommand_of(run, BeforeProgram, allow_interspersed_args=False)
