"""`dry_run`: runs a training step without a GPU, and lists where it would wait for one."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import functools
import importlib.util
import inspect
import os
import runpy
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...base.config import settings
from ...base.early_stop import EarlyStop, ProgramStopper, ctrl_c_stop, describe_error, stop_on_signals
from ...base.findings import NOT_COVERED, Site
from ...base.guard import guard, uninterrupted
from ...base.imports import loaded_modules
from ...base.patch import Patch
from ...base.source_paths import INSTALLED
from ...explain.waits import sites
from ...explain.waits.comments import mistaken_comments
from ...explain.waits.events import SyncEvent
from ...record.modules.optimizers import live_optimizers, parameter_ids, parameters
from ...record.regions import dispatch
from ...record.regions.emitters import RegionPath
from ...record.stepping.follower import StepFollower
from ..budget import Budget
from ..counting.compilation import Compiled
from ..counting.counts import counts_of
from ..counting.recorder import FEATURE, CallRecorder
from ..counting.regions import RegionCounter
from .autocast import is_supported
from .compiled import Compiler
from .cuda import PretendedCuda
from .dataless import DatalessMode
from .patches import modes, patched
from .report import DryRunReport, final_counts
from .state import RunState, as_cuda, tensors
from .steps import StepRecorder


def dry_run(
    step: Callable[[], object],
    *,
    fake: bool = False,
    on_gpu: Iterable[Any] = (),
    budget: int | Mapping[str, int] | None = None,
) -> DryRunReport:
    """Call ``step`` as if there were a GPU; list where the CPU would wait, and count what a step does on the GPU.

    `DryRunReport.counts` has the operators, kernels, floating-point operations, bytes and copies of a step.

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
        run.state.tags.put(tensors_of(on_gpu), as_cuda("cuda"))
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
    ranks: int = 1,
    on_caught_stop: Callable[[DryRunReport], None] | None = None,
) -> DryRunReport:
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
        ranks: run the program as the first of so many ranks on one machine, without the others: collectives send
            nothing.
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
        with dry_run_context(fake, Budget(budget), script=function is None, step_on=step_on, ranks=ranks) as run:
            run.ends_by_ctrl_c = True
            stopper = ProgramStopper(
                None if on_caught_stop is None else lambda stopped: on_caught_stop(run.report(stopped))
            )
            with stop_on_signals(stopper, time_limit):
                step: Callable[[], object] | None = functools.partial(_run_as_main, program)
                if function is not None and isinstance(program, Path):
                    step = run.call(functools.partial(_function, program, function))
                if step is not None:
                    if function is not None:
                        run.reset()
                    run.stop_after(steps, stopper)
                    run.call(step)
        if isinstance(run.error, _UsageError):
            raise run.error.args[0]
        return run.report()
    finally:
        sys.argv, sys.path[:] = before[:2]
        _remove_script_modules(before[2], folder)


def _remove_script_modules(before: dict[str, Any], folder: Path) -> None:
    """Remove the script's own modules again: another script may have different modules of the same names."""
    ours = __name__.partition(".")[0]
    for name, _, names in loaded_modules():
        if name not in before and name.partition(".")[0] != ours:
            file = str(names.get("__file__") or os.devnull)
            if Path(file).is_relative_to(folder) and not any(part in file for part in INSTALLED):
                del sys.modules[name]


def _run_as_main(program: Path | str) -> None:
    if isinstance(program, Path):
        runpy.run_path(str(program), run_name="__main__")
        return
    try:
        spec = importlib.util.find_spec(program)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{program}.__main__")
    except ModuleNotFoundError as error:
        if not f"{program}.".startswith(f"{error.name}."):
            raise  # an import of a package around the module
        spec = None
    except ValueError:  # the name is empty
        spec = None
    if spec is None:
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
    try:
        step: Callable[[], object] = attrgetter(name)(module)
        _check(step, f"{name} in {path}")
    except AttributeError:
        raise _UsageError(ValueError(f"there is no function {name} in {path}")) from None
    except TypeError as error:
        raise _UsageError(error) from None
    return step


def _check(step: Any, what: str) -> None:
    """Raise ``TypeError`` for an object that cannot be called as a step."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction, inspect.isclass)
    if not callable(step) or any(is_kind(step) for is_kind in kinds):
        raise TypeError(f"{what} must be a plain function without arguments: {step!r}")
    with contextlib.suppress(ValueError):  # built-in functions have no signature
        parameters = inspect.signature(step).parameters.values()
        needed = [
            p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if needed:
            raise TypeError(f"{what} needs arguments: {', '.join(needed)}")


def tensors_of(on_gpu: Iterable[Any]) -> list[Any]:
    """Return the tensors of ``on_gpu``, with their gradients.

    The tensors of a module are its parameters and buffers, and the state that optimizers keep of these parameters,
    as an optimizer creates it on the parameter's device. Those of an optimizer are its parameters and all its
    state.

    Raises:
        TypeError: something in ``on_gpu`` is not a module, an optimizer or a tensor, and holds no tensors.
    """
    single = isinstance(on_gpu, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor))
    all_of_them: list[Any] = []
    for value in [on_gpu] if single else on_gpu:
        if isinstance(value, torch.nn.Module):
            held = [*value.parameters(), *value.buffers(), *_state(value)]
        elif isinstance(value, torch.optim.Optimizer):
            held = [*tensors(parameters(value)), *_arrays(value.state.values())]
        elif not (held := list(tensors(value))):
            raise TypeError(f'"on_gpu" must hold modules, optimizers and tensors: {value!r}')
        all_of_them += held
    return all_of_them + [t.grad for t in all_of_them if t.is_leaf and t.grad is not None]


def _state(model: torch.nn.Module) -> list[Any]:
    """Return the state of the parameters of ``model`` in the optimizers of this process; takes 0.1 s."""
    keys = parameter_ids(model)
    states = [getattr(optimizer, "state", None) for optimizer in live_optimizers()]
    return _arrays(
        held for state in states if isinstance(state, Mapping) for key, held in state.items() if id(key) in keys
    )


def _arrays(states: Iterable[Any]) -> list[Any]:
    """Return the tensors of states except single numbers, such as a count of steps, which stay on the CPU."""
    return [t for state in states for t in tensors(state) if t.dim()]


_WITHOUT_TENSORS = ("tqdm_monitor", "instrument")  # threads whose names begin so use no tensors
_COVERAGE = (
    "a dry run: tensors on the GPU were on the CPU, so synchronizations have no times; what libraries do "
    "outside torch, and in their own CUDA code, was not checked"
)
_NO_AUTOCAST = "autocast changed no types, as this version of torch cannot be taught them"
_FAKE = "tensors had no data: branches on values, and code that asks whether it is traced, may go the other way"
_NOTHING_ON_GPU = (
    'nothing was on a GPU: build the model inside the step with device="cuda", '
    "or pass what is on the GPU already as on_gpu=[model, optimizer]"
)
_NOTHING_ON_GPU_IN_SCRIPT = (
    "nothing was moved to a GPU: does the script choose its device from torch.cuda.is_available(), or does it "
    "need an option such as --device cuda?"
)
_STOPPED_EARLY = "the run ended before anything was moved to the GPU"
_TOO_EARLY = (
    "{} uses the CPU: if the device was chosen before the dry run began, choose it inside the step, or run "
    "the file: instrument syncs FILE.py::FUNCTION"
)


def _unwatched(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that looks at tensors without the modes, which cost 20 us a look."""

    @guard.contained("telling what memory is for")
    def call(*args: Any) -> None:
        with torch._C.DisableTorchFunction():
            function(*args)

    return call


class DryRun:
    """One dry run, from its start to its report."""

    def __init__(
        self, path: RegionPath, fake: bool, budget: Budget, script: bool, step_on: str | None, counts: bool,
        ranks: int,
    ) -> None:  # fmt: skip
        self.recorder = StepRecorder(path.names, budget, DryRun.call.__code__)
        self.state = RunState(self.recorder, DatalessMode() if fake else None, budget, ranks)
        self.regions = RegionCounter(self.recorder)
        self.modules = RegionCounter(self.recorder)
        if counts:
            self.state.calls = CallRecorder(
                self.recorder, path.names, self.state.memory, _unwatched(self.state.allocations.mark_model),
                self.modules.note,
            )  # fmt: skip
        self.compiler: Compiler | None = None
        self._failures_before = guard.failures[FEATURE]
        self.error: BaseException | None = None
        self._ended_at: Site | None = None
        self._early_stop: EarlyStop | None = None
        self._script = script
        self.ends_by_ctrl_c = False  # otherwise Ctrl-C ends the caller, too
        # Without an optimizer, a function that is called once is one step; a script has as many as it finds.
        weakest = "forward" if script else "optimizer"
        self.follower = StepFollower(
            self._on_step, self._on_restart, step_on, weakest=weakest, on_optimizer_made=self._on_optimizer_made
        )
        self._optimizer_was_made = False
        pools = getattr(concurrent.futures.thread, "_threads_queues", ())  # the tasks of these threads are watched
        watched = {threading.current_thread(), threading.main_thread(), *pools}
        names = {thread.name for thread in threading.enumerate() if thread not in watched}
        self._unwatched_threads = sorted(name for name in names if not name.startswith(_WITHOUT_TENSORS))

    def call(self, step: Callable[[], Any]) -> Any:
        """Call ``step``; keep the error that ends it early."""
        try:
            return step()
        except EarlyStop as stopped:
            self._on_early_stop(stopped)
        except KeyboardInterrupt:
            if not self.ends_by_ctrl_c:
                raise
            self._on_early_stop(ctrl_c_stop())
        except SystemExit as error:
            if error.code not in (None, 0):
                self._on_error(error)
        except Exception as error:
            self._on_error(error)

    def _on_early_stop(self, stopped: EarlyStop) -> None:
        """Keep the reason why the program ended early."""
        self._early_stop = stopped
        self.error = stopped if stopped.code else None

    def _on_error(self, error: BaseException) -> None:
        self.error = error
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        place = sites.locate(traceback.tb_frame if traceback else None)
        self._ended_at = place.site
        text = f"the step ended here with {describe_error(error)}"
        self.recorder.add(SyncEvent(NOT_COVERED, text, place.site, place.via, step=self.recorder.step))

    def note_region(self, path: tuple[str, ...]) -> None:
        """Note that a region opened; ``path`` are the open regions, outermost first."""
        self.regions.note(path)
        if self.state.budget.given:
            self.state.budget.note_region(path)

    def call_patches(self) -> Iterator[Patch]:
        """Return what must be patched so that operators are counted."""
        if self.state.calls is not None:
            yield from self.state.calls.patches(lambda: self.state.thread.places)

    def reset(self) -> None:
        """Drop all findings and steps so far."""
        self.recorder.clear()
        self.recorder.restart(None if self.recorder.step is None else 0)
        self.state.budget.clear()
        self.regions.clear()
        self.modules.clear()
        if self.compiler is not None:
            self.compiler.clear()
        if self.state.calls is not None:
            self.state.calls.clear()
        self.state.allocations.forget_places()

    def _on_optimizer_made(self, _: Any) -> None:
        """Note that an optimizer is made: everything before belongs to no step."""
        if self.recorder.step is None:
            self.recorder.step, self._optimizer_was_made = 0, True
            self.state.budget.clear()

    def stop_after(self, steps: int | None, stopper: ProgramStopper) -> None:
        """End the program after ``steps`` more steps; None means no limit."""
        self.recorder.max_steps, self.recorder.stopper = steps, stopper

    def _on_step(self) -> None:
        """Note that an update was made, or that the program marked the end of a step."""
        self.recorder.on_update(marked=self.follower.by == "program")

    def _on_restart(self) -> None:
        """Make everything so far a part of step 0, as a stronger sign of steps was found."""
        self.recorder.restart(None if self.recorder.step is None else 0)
        self.regions.restart(self.recorder.step)
        self.modules.restart(self.recorder.step)
        if self.compiler is not None:
            self.compiler.restart()
        if self.state.calls is not None:
            self.state.calls.restart(self.recorder.step)
        self.recorder.reassign_steps(lambda seen: +Counter({0: seen.total() - seen[None], None: seen[None]}))

    def _why_nothing_on_gpu(self) -> str:
        if self._early_stop is not None:
            return _STOPPED_EARLY
        if self._script:
            return _NOTHING_ON_GPU_IN_SCRIPT
        chosen = self.state.cpu_by_name
        return _NOTHING_ON_GPU if chosen is None else f"{_NOTHING_ON_GPU}. {_TOO_EARLY.format(chosen)}"

    def report(self, stopped: EarlyStop | None = None) -> DryRunReport:
        """Return the report; ``stopped`` is what ends the program, if it caught that."""
        if stopped is not None:
            self._on_early_stop(stopped)
        recorder = self.recorder
        steps = max(recorder.updates, 1)
        budget = self.state.budget
        if recorder.updates and not recorder.in_step:
            budget.restart_step()  # what follows the last step is in none
        recorder.reassign_steps(lambda seen: final_counts(seen, steps, self._optimizer_was_made))
        used = self.state.tags.any_on_device or self.error is not None
        sentences = [_COVERAGE, *([_FAKE] if self.state.fake else [])]
        if not is_supported():
            sentences.append(_NO_AUTOCAST)
        if self._early_stop is not None and self.error is None:
            sentences.append(self._early_stop.reason)
        if self.follower.explanation is not None:
            sentences.append(self.follower.explanation)
        if names := ", ".join(self._unwatched_threads):
            sentences.append(f"threads that were running before were not watched: {names}")
        unmatched = [*budget.unmatched(), *mistaken_comments(recorder.findings)]
        if self.follower.function_missing:
            unmatched.append("the function of --step-on was not found, or never called")
        sentences += unmatched
        compiled = Compiled(() if self.compiler is None else tuple(self.compiler.events))
        report = DryRunReport(
            "dry run", [*map(compiled.marked, recorder.findings)], steps, sentences, error=self.error,
            dropped=recorder.dropped, unavailable_reason="" if used else self._why_nothing_on_gpu(),
            budgeted=budget.given, exceeded=budget.exceeded(steps), unmatched=unmatched, ended_at=self._ended_at,
        )  # fmt: skip
        if self.state.calls is not None:

            def synchronizations(step: int) -> int:
                return sum(finding.steps[step - 1] for finding in report.findings if finding.covered)

            report.allocations = self.state.allocations.record
            with guard.contained(FEATURE):
                report.counts = counts_of(self.state.calls.record, steps, synchronizations, compiled)
                report.regions = self.regions.tree(report.counts.step.step)
                if not report.regions.calls:
                    report.regions = replace(self.modules.tree(report.counts.step.step), of_modules=True)
            report.counting_failed = guard.failures[FEATURE] > self._failures_before
        return report


@contextlib.contextmanager
def dry_run_context(
    fake: bool, budget: Budget, *, script: bool = False, step_on: str | None = None, counts: bool = True,
    ranks: int = 1,
) -> Iterator[DryRun]:  # fmt: skip
    """Install the pretended GPU, and watch the block."""
    if settings.dry_run:
        raise RuntimeError("a dry run is already running in this process")
    stack = contextlib.ExitStack()
    try:
        with uninterrupted():
            run = _set_up(stack, fake, budget, script, step_on, counts, ranks)
        yield run
    finally:
        try:
            with uninterrupted():
                stack.close()
        finally:
            stack.close()  # if it was interrupted before it began


def _set_up(
    stack: contextlib.ExitStack, fake: bool, budget: Budget, script: bool, step_on: str | None, counts: bool,
    ranks: int,
) -> DryRun:  # fmt: skip
    # Each callback comes before the change that it undoes: an interrupt may come in between.
    stack.callback(setattr, settings, "dry_run", False)
    settings.dry_run = True
    path = RegionPath(lambda opened: run.note_region(opened))
    run = DryRun(path, fake, budget, script, step_on, counts, ranks)
    stack.callback(dispatch.active.remove, path)
    dispatch.active.add(path)
    cuda = PretendedCuda(run.state)
    stack.callback(lambda: run.compiler.reset() if run.compiler is not None else None)
    stack.callback(cuda.undo)
    cuda.install()
    patches = stack.enter_context(patched(run.state))
    stack.callback(run.follower.remove)
    run.follower.follow()

    own = [*run.recorder.patches(), *run.call_patches()]
    run.compiler = Compiler(run.state, run.recorder, [*patches, *own], cuda.patches)
    for patch in [*own, *run.compiler.patches()]:
        patch.apply_in(stack)
    mark = _unwatched(run.state.allocations.mark_optimizer)
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: mark(optimizer))
    stack.callback(handle.remove)
    stack.enter_context(modes(run.state))
    return run
