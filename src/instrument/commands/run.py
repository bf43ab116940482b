"""``instrument run``: a program as it is, with its steps recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bootstrap.program import PROCESS, command, environment, excluded
from ..config import RUN, settings
from ..errors import LaunchError
from ..launch.vendor import VENDORS, Request, command_line, launch
from ..printable import shell_line
from ..stepping.function_calls import check_step_on
from ..windows.manifest import unwritable
from ..windows.steps import PLAN
from . import options
from .budgets import budgets
from .errors import say, unusable
from .parsing import Command

_PROGRAM = f"{__name__}.program"


class Profiler(str, Enum):
    """Who records."""

    auto = "auto"
    torch = "torch"
    nsys = "nsys"
    ncu = "ncu"
    rocprof = "rocprof"
    vtune = "vtune"
    none = "none"


class Names(str, Enum):
    """What modules are called."""

    class_ = "class"
    path = "path"
    both = "both"


class BeforeProgram(Command):
    """A command whose options end where the program begins: at ``--``, at ``-m``, or at the first word."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Put aside the program and what is its own."""
        at = next((at for at, word in enumerate(args) if word in ("--", "-m")), len(args))
        ctx.meta[_PROGRAM] = args[at:]
        return super().parse_args(ctx, args[:at])


def run(
    ctx: typer.Context,
    program: Annotated[
        list[str] | None, typer.Argument(metavar="-- PROGRAM", help="A script, -m MODULE, or a command.")
    ] = None,
    profiler: Annotated[
        Profiler,
        typer.Option(
            help="Who records: torch.profiler, a vendor's tool that is started here, or nobody. "
            "auto: the tool that this runs under, else torch.profiler."
        ),
    ] = Profiler.auto,
    steps: Annotated[
        str | None, typer.Option(help="Which steps: '10-12,100', or 'all' for the whole run.", metavar="STEPS")
    ] = None,
    wait: Annotated[
        int | None,
        typer.Option(
            min=0, help="Steps before each window's warm-up (default 1; not with --steps, --every).", metavar="N"
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            min=0, help="Warm-up steps of each window (default 1; with --steps or --every 0).", metavar="N"
        ),
    ] = None,
    active: Annotated[
        int | None,
        typer.Option(
            min=1, help="Recorded steps of each window (default 3; with --steps or --every 1).", metavar="N"
        ),
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How many windows, 0 for no end (default 1; with --every 0; not with --steps).",
            metavar="N",
        ),
    ] = None,
    every: Annotated[int | None, typer.Option(min=1, help="Record a window every N steps.", metavar="N")] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder for what is recorded.", metavar="FOLDER")
    ] = Path("runs/instrument"),
    modules: Annotated[
        str, typer.Option(help="Levels of modules that are regions: a number, 'all' or 'none'.", metavar="LEVELS")
    ] = "4",
    names: Annotated[Names, typer.Option(help="What the regions of modules are called.")] = Names.class_,
    syncs: Annotated[bool, typer.Option("--syncs", help="Find the lines that wait for the GPU.")] = False,
    budget: Annotated[
        list[str] | None, typer.Option(help="How often a step may wait in a region.", metavar="REGION=N")
    ] = None,
    step_on: Annotated[
        str | None,
        typer.Option(
            help="What ends a step: optimizer, backward, forward, or a function (package.module:Class.method, "
            "train.py:train_step). Detected by default.",
            metavar="SIGN",
        ),
    ] = None,
    ranks: Annotated[str | None, typer.Option(help="The ranks that record: '0,8'.", metavar="RANKS")] = None,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="Record the shapes of inputs (torch.profiler).")
    ] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Record allocations (torch.profiler).")] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="Record stacks (torch.profiler).")] = False,
    region: Annotated[
        list[str] | None, typer.Option(help="Measure the kernels in this region only (ncu).", metavar="REGION")
    ] = None,
    launches: Annotated[
        int | None, typer.Option(min=1, help="Measure at most N kernels (ncu; default 100).", metavar="N")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option for the tool that --profiler starts, as it is.", metavar="OPTION"),
    ] = None,
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Print what would be run, and do not run it.")
    ] = False,
) -> None:
    """Run a program with its steps recorded and summed up; no line of it changes.

    PROGRAM is a script (train.py), -m MODULE, or a command that starts Python, such as torchrun; its arguments
    follow it. A step is what its framework says, else a step of its first optimizer, else a backward pass, else a
    call of the model. INSTRUMENT=0 runs it as it is.
    """
    line = _command(program, ctx)
    if not settings.enabled:
        if print_command:
            typer.echo(shell_line(line))
            return
        raise typer.Exit(_become(line, dict(os.environ)))
    given = options.given(ctx)
    try:
        options.refuse_useless(given, profiler.value)
        loop: dict[str, Any] = {"out": str(out.absolute()), "names": names.value}
        loop["modules"] = options.levels(modules)
        loop |= options.plan(steps, {name: given[name] for name in PLAN if name in given})
        loop |= {argument: True for name, argument in options.TORCH_OPTIONS.items() if name in given}
        if syncs or budget:
            loop |= {"syncs": True, "budget": budgets(budget or [])}
        if ranks is not None:
            loop["ranks"] = options.numbers(ranks)
        if step_on is not None:
            loop["step_on"] = check_step_on(step_on)
        loop["typed"] = options.typed(given)
    except ValueError as error:
        raise unusable(error) from None
    if profiler in (Profiler.torch, Profiler.none):
        loop |= {"exporter": "torch_profiler"} if profiler is Profiler.torch else {"record": False}
    started = environment(loop)
    if flags := " and ".join(excluded(line)):
        lost = "no step and no region is recorded" if profiler.value in VENDORS else "nothing is recorded"
        say(f"{lost}: Python does not load instrument's start-up code with {flags}; remove {flags}")
    if profiler.value in VENDORS:
        count = options.windows(loop)
        request = Request(line, out.absolute(), count, started, region or (), launches, option or ())
        raise typer.Exit(_under(profiler.value, request, print_command))
    if profiler is not Profiler.none and (reason := unwritable(out.absolute())):
        say(f"{reason}; the program goes on, but its windows will not be saved")
    if profiler is Profiler.auto and (sentence := options.ignored(given)):
        say(sentence)
    if print_command:
        typer.echo(_shown(line, started))
        return
    raise typer.Exit(_become(line, started))


def _command(program: Sequence[str] | None, ctx: typer.Context) -> list[str]:
    rest = ctx.meta[_PROGRAM]
    if not program and rest[:1] == ["--"]:
        rest = rest[1:]
    try:
        return command([*(program or []), *rest])
    except ValueError as error:
        raise unusable(error) from None


def _under(profiler: str, request: Request, only_print: bool) -> int:
    """Run a program under a vendor's tool, which this process waits for."""
    try:
        if only_print:
            folder = shell_line(["mkdir", "-p", str(request.out)])  # which the tool does not make
            typer.echo(f"{folder} && {_shown(command_line(profiler, request), request.environment)}")
            return 0
        return launch(profiler, request)
    except LaunchError as error:
        raise unusable(error) from None
    except OSError as error:
        raise unusable(ValueError(f"cannot write to {request.out}: {error.strerror}")) from None


def _shown(line: list[str], given: Mapping[str, str]) -> str:
    changed = [f"{name}={given[name]}" for name in ("PYTHONPATH", RUN)]
    return shell_line(["env", *changed, *line])


def _become(line: list[str], given: dict[str, str]) -> int:
    """Be the program from here on: its signals, its exit code and its output are nobody else's."""
    if sys.stdout is not None:
        sys.stdout.flush()
    if os.name == "nt":  # where a process cannot become another
        return subprocess.call(line, env=given)
    try:
        os.execvpe(line[0], line, {**given, PROCESS: str(os.getpid())})
    except OSError as error:
        raise unusable(ValueError(f"cannot run {line[0]}: {error.strerror}")) from None
