"""`dry_run`: runs a training step without a GPU, and lists where it would wait for one."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base.early_stop import EarlyStop, ProgramStopper, ctrl_c_stop, describe_error, stop_on_signals
from ...base.imports import loaded_modules
from ...base.source_paths import INSTALLED
from ...explain.waits.report import SyncReport
from ..budget import Budget
from .session import DryRun, dry_run_context


def dry_run(
    step: Callable[[], object],
    *,
    fake: bool = False,
    on_gpu: Iterable[Any] = (),
    budget: int | Mapping[str, int] | None = None,
) -> SyncReport:
    """Call ``step`` as if there were a GPU, and list where the CPU would wait for it.

    The step really runs, on the CPU: it trains the model and writes its files. An error in it ends the run and is
    in the report.

    Args:
        step: called once, without arguments: a training step, or a whole short training, which the first
            optimizer that steps divides into steps.
        fake: run without data, for models that are too large for this machine. Tensors that the step creates
            then have only shapes.
        on_gpu: existing modules, optimizers and tensors that count as on the GPU. A module includes the state
            that optimizers keep of its parameters. All other existing tensors are on the CPU.
        budget: synchronizations that a step may make, in total or by region, as in `detect_syncs`; a step lasts
            from one optimizer step to the next. `SyncReport.assert_max` then fails if the budget is exceeded.

    Raises:
        TypeError: ``step`` cannot be called, or ``on_gpu`` holds something else.
        RuntimeError: inside another dry run.

    Example:
        >>> def step():
        ...     model = torch.nn.Linear(4, 4, device="cuda")
        ...     loss = model(torch.randn(2, 4, device="cuda")).sum()
        ...     print(loss.item())
        >>> instrument.dry_run(step).assert_max(1)
        Traceback (most recent call last):
        AssertionError: ...
    """
    _check(step, '"step"')
    with dry_run_context(fake, Budget(budget)) as run:
        run.state.code_ran_before = True
        run.put_on_gpu(on_gpu)
        run.call(step)
    return run.report()


def dry_run_file(
    program: Path | str,
    function: str | None,
    *,
    fake: bool = False,
    args: Sequence[str] = (),
    budget: int | Mapping[str, int] | None = None,
    steps: int | None = None,
    time_limit: float | None = None,
    step_on: str | None = None,
    on_caught_stop: Callable[[SyncReport], None] | None = None,
) -> SyncReport:
    """Run a script as if there were a GPU, or import it and call one function of it.

    Args:
        program: the path of the script, or the name of a module, which runs as with ``python -m``.
        function: what to call of a script, without arguments; None runs the program as ``__main__``.
        fake: as in `dry_run`.
        step_on: the event that ends a step, as in `StepFollower`.
        budget: as in `dry_run`.
        args: the arguments of the script.
        steps: the number of steps after which the run ends, where the next step begins; None means no limit.
        time_limit: the number of seconds after which the run ends.
        on_caught_stop: called with the report if the script catches the exception that ends it and goes on, as
            with ``except BaseException`` in a loop, or at the second Ctrl-C or SIGTERM; must end the process. None
            lets the script go on.

    However the run ends, by a limit, an error, Ctrl-C or SIGTERM, the report has all findings up to then. The run
    ends from inside, as by `sys.exit`: ``finally`` blocks run.

    Raises:
        ValueError: the file or the module does not exist, or lacks the function.
        TypeError: the function needs arguments.
    """
    if isinstance(program, Path) and not program.is_file():
        raise ValueError(f"there is no file {program}")
    folder = program.parent.resolve() if isinstance(program, Path) else Path.cwd()
    before = sys.argv, list(sys.path), dict(sys.modules)
    sys.argv, sys.path[:0] = [str(program), *args], [str(folder), str(Path.cwd())]
    try:
        with dry_run_context(fake, Budget(budget), script=function is None, step_on=step_on) as run:
            stopper = ProgramStopper(
                None if on_caught_stop is None else lambda stopped: on_caught_stop(_report(run, stopped))
            )
            with stop_on_signals(stopper, time_limit):
                if function is None or isinstance(program, str):
                    run.stop_after(steps, stopper)
                    run.call(_interruptible(lambda: _run_as_main(program)))
                else:
                    step = run.call(_interruptible(lambda: _function(program, function)))
                    if step is not None:
                        run.reset()
                        run.stop_after(steps, stopper)
                        run.call(_interruptible(step))
        if isinstance(run.error, _UsageError):
            raise run.error.args[0]
        return run.report()
    finally:
        sys.argv, sys.path[:] = before[:2]
        _remove_script_modules(before[2], folder)


def _report(run: DryRun, stopped: EarlyStop) -> SyncReport:
    run.on_early_stop(stopped)
    return run.report()


def _interruptible(step: Callable[[], Any]) -> Callable[[], Any]:
    """Return ``step``, with Ctrl-C raised as an `EarlyStop`."""

    def call() -> Any:
        try:
            return step()
        except KeyboardInterrupt:
            raise ctrl_c_stop() from None

    return call


def _remove_script_modules(before: dict[str, Any], folder: Path) -> None:
    """Remove the script's own modules again: another script may have different modules of the same names."""
    ours = __name__.partition(".")[0]
    for name, _, names in loaded_modules():
        file = str(names.get("__file__") or os.devnull)
        own = Path(file).is_relative_to(folder) and not any(part in file for part in INSTALLED)
        if own and name not in before and name.partition(".")[0] != ours:
            del sys.modules[name]


def _run_as_main(program: Path | str) -> None:
    if isinstance(program, Path):
        runpy.run_path(str(program), run_name="__main__")
        return
    try:
        found = importlib.util.find_spec(program)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{program}.__main__")
    except ModuleNotFoundError as error:
        if not f"{program}.".startswith(f"{error.name}."):
            raise  # an import of a package around the module
        found = None
    except ValueError:  # the name is empty
        found = None
    if found is None:
        raise _UsageError(ValueError(f"there is no module {program} that can be run"))
    runpy.run_module(program, run_name="__main__", alter_sys=True)


class _UsageError(Exception):
    """Carries an error in the arguments, as opposed to one in the script."""


def _function(path: Path, name: str) -> Callable[[], object]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise _UsageError(ValueError(f"{path} is not a Python file"))
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise _UsageError(ValueError(f"cannot import {path}: {describe_error(error)}")) from None
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise _UsageError(ValueError(f"there is no function {name} in {path}"))
        found = getattr(found, part)
    try:
        _check(found, f"{name} in {path}")
    except TypeError as error:
        raise _UsageError(error) from None
    step: Callable[[], object] = found
    return step


def _check(step: Any, what: str) -> None:
    """Raise ``TypeError`` for an object that cannot be called as a step."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction, inspect.isclass)
    if not callable(step) or any(is_kind(step) for is_kind in kinds):
        raise TypeError(f"{what} must be a plain function without arguments: {step!r}")
    with contextlib.suppress(ValueError):  # built-in functions have no signature
        needed = [p.name for p in inspect.signature(step).parameters.values() if _is_required(p)]
        if needed:
            raise TypeError(f"{what} needs arguments: {', '.join(needed)}")


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variadic
