"""``instrument run``: a program as it is, with its steps recorded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..automatic.program import PROCESS, command, environment, excluded
from ..config import RUN, settings
from ..errors import LaunchError
from ..launch.vendor import VENDORS, Request, command_line, launch
from ..printable import shell_line
from ..syncs.function import check
from ..windows.schedule import Schedule
from ..windows.steps import PLAN, planned
from .budgets import budgets
from .parsing import Command
from .sentence import say, unusable

_PROGRAM = f"{__name__}.program"
_WINDOWS = ("steps", *PLAN, "out", "ranks", "shapes", "memory", "stacks")


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
        int | None, typer.Option(min=0, help="Steps before each window's warm-up (default 1).")
    ] = None,
    warmup: Annotated[int | None, typer.Option(min=0, help="Warm-up steps of each window (default 1).")] = None,
    active: Annotated[int | None, typer.Option(min=1, help="Recorded steps of each window (default 3).")] = None,
    repeat: Annotated[int | None, typer.Option(min=0, help="How many windows (default 1; 0 for no end).")] = None,
    every: Annotated[int | None, typer.Option(min=1, help="Record a window every N steps.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for what is recorded.")] = Path(
        "runs/instrument"
    ),
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
        int | None, typer.Option(min=1, help="Measure at most N kernels (ncu; default 100).")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option for the vendor's tool, as it is.", metavar="OPTION")
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
    plan = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat, "every": every}
    options = {"record_shapes": shapes, "profile_memory": memory, "with_stack": stacks}
    try:
        loop: dict[str, Any] = {"out": str(out.absolute()), "names": names.value, "modules": _levels(modules)}
        loop |= _plan(steps, {name: value for name, value in plan.items() if value is not None})
        loop |= {name: True for name, wanted in options.items() if wanted}
        if syncs or budget:
            loop |= {"syncs": True, "budget": budgets(budget or [])}
        if ranks is not None:
            loop["ranks"] = _ranks(ranks)
        if step_on is not None:
            loop["step_on"] = check(step_on)
        loop["typed"] = _typed(ctx)
    except ValueError as error:
        raise unusable(error) from None
    if profiler in (Profiler.torch, Profiler.none):
        loop |= {"exporter": "torch_profiler"} if profiler is Profiler.torch else {"record": False}
    given = environment(loop)
    if options_of_python := " ".join(excluded(line)):
        lost = "no step and no region is recorded" if profiler.value in VENDORS else "nothing is recorded"
        say(f"{lost}: with {options_of_python}, Python does not import what records; run it without")
    if profiler.value in VENDORS:
        request = Request(line, out.absolute(), _windows(loop), given, region or (), launches, option or ())
        raise typer.Exit(_under(profiler.value, request, print_command))
    if print_command:
        typer.echo(_shown(line, given))
        return
    raise typer.Exit(_become(line, given))


def _typed(ctx: typer.Context) -> list[str]:
    """The options that choose windows, as far as they were given."""
    given = {name: ctx.get_parameter_source(name) for name in _WINDOWS}
    return [
        f"--{name} {ctx.params[name]}" if ctx.params[name] is not True else f"--{name}"
        for name, source in given.items()
        if source is not None and source.name == "COMMANDLINE"
    ]


def _command(program: Sequence[str] | None, ctx: typer.Context) -> list[str]:
    rest = ctx.meta[_PROGRAM]
    if not program and rest[:1] == ["--"]:
        rest = rest[1:]
    try:
        return command([*(program or []), *rest])
    except ValueError as error:
        raise unusable(error) from None


def _plan(steps: str | None, plan: dict[str, int]) -> dict[str, Any]:
    if steps == "all":
        whole = {"at": 0, "active": sys.maxsize}
        if plan:
            raise ValueError(f'"--steps all" is the whole run, so these cannot be: {", ".join(plan)}')
        return whole
    chosen: dict[str, tuple[str, ...]] = {"--every": ("wait",)} if "every" in plan else {}
    if steps is not None:
        chosen = {"--steps": ("wait", "repeat", "every")}
        if "-" in steps and "active" in plan:
            raise ValueError("--active cannot be combined with a range in --steps")
    for option, refused in chosen.items():
        for name in refused:
            if plan.get(name):
                raise ValueError(f"--{name} cannot be combined with {option}")
    given = plan | ({} if steps is None else {"at": steps})
    try:
        planned(None, given)
    except ValueError as error:
        if steps is None:
            raise
        raise ValueError(re.sub("^at ", "--steps ", str(error))) from None
    return given


def _levels(modules: str) -> int | bool | None:
    if modules in ("all", "none"):
        return None if modules == "all" else False
    if not modules.isdecimal():
        raise ValueError(f'"--modules" must be a number of levels, "all" or "none": {modules}')
    return int(modules)


def _ranks(ranks: str) -> list[int]:
    if not all(rank.strip().isdecimal() for rank in ranks.split(",")):
        raise ValueError(f'"--ranks" must be numbers such as 0,8: {ranks}')
    return [int(rank) for rank in ranks.split(",")]


def _windows(loop: Mapping[str, Any]) -> int | None:
    """How many windows there will be; None for no end, and 0 for the whole run."""
    if loop.get("active") == sys.maxsize:
        return 0
    plan = planned(None, {name: loop[name] for name in PLAN if name in loop})
    return plan.count if isinstance(plan, Schedule) else None


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
