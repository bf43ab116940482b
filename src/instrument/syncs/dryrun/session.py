"""One dry run, from the tensors that count as on the GPU at its start to its report."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ...base.early_stop import EarlyStop, ProgramStopper, describe_error
from ...base.findings import NOT_COVERED
from ...base.guard import uninterrupted
from ...base.patch import Patch
from ...explain.waits import sites
from ...explain.waits.comments import mistaken_comments
from ...explain.waits.events import CountByStep, SyncEvent
from ...explain.waits.report import SyncReport
from ...record.modules.optimizers import live_optimizers, parameter_ids, parameters
from ...record.regions import dispatch
from ...record.regions.emitters import RegionPath
from ...record.stepping.follower import StepFollower
from .. import coverage
from ..budget import Budget
from .cuda import PretendedCuda
from .dataless import DatalessMode
from .patches import modes, patched
from .state import RunState, as_cuda, tensors
from .steps import StepRecorder
from .storages import calling


def tensors_of(on_gpu: Iterable[Any]) -> list[Any]:
    """Return the tensors of ``on_gpu``, with their gradients.

    The tensors of a module are its parameters and buffers, and the state that optimizers keep of these parameters,
    as an optimizer creates it on the parameter's device. Those of an optimizer are its parameters and all its
    state.

    Raises:
        TypeError: something in ``on_gpu`` is not a module, an optimizer or a tensor, and holds no tensors.
    """
    single = isinstance(on_gpu, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor))
    found: list[Any] = []
    for value in [on_gpu] if single else on_gpu:
        if isinstance(value, torch.nn.Module):
            found += [*value.parameters(), *value.buffers(), *_state(value)]
        elif isinstance(value, torch.optim.Optimizer):
            found += tensors(parameters(value))
            found += _arrays(value.state.values())
        else:
            held = list(tensors(value))
            if not held:
                raise TypeError(f'"on_gpu" must hold modules, optimizers and tensors: {value!r}')
            found += held
    return found + [t.grad for t in found if t.is_leaf and t.grad is not None]


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
    "outside torch, and in their own CUDA code, was not checked; autocast changed no types"
)
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


class DryRun:
    """One dry run, from its start to its report."""

    def __init__(self, path: RegionPath, fake: bool, budget: Budget, script: bool = False) -> None:
        self.recorder = StepRecorder(path.names, budget, DryRun.call.__code__)
        self.state = RunState(self.recorder, DatalessMode() if fake else None, budget)
        self.error: BaseException | None = None
        self._early_stop: EarlyStop | None = None
        self._script = script
        self.follower: StepFollower | None = None
        self._optimizer_was_made = False
        pools = getattr(concurrent.futures.thread, "_threads_queues", ())  # the tasks of these threads are watched
        known = {threading.current_thread(), threading.main_thread(), *pools}
        names = {thread.name for thread in threading.enumerate() if thread not in known}
        self._unwatched_threads = sorted(name for name in names if not name.startswith(_WITHOUT_TENSORS))

    def put_on_gpu(self, on_gpu: Iterable[Any]) -> None:
        """Treat existing tensors as being on the GPU."""
        if found := tensors_of(on_gpu):
            self.state.tags.put(found, as_cuda("cuda"))

    def call(self, step: Callable[[], Any]) -> Any:
        """Call ``step``; keep the error that ends it early."""
        try:
            return step()
        except EarlyStop as stopped:
            self.on_early_stop(stopped)
        except SystemExit as error:
            if error.code not in (None, 0):
                self._on_error(error)
        except Exception as error:
            self._on_error(error)

    def on_early_stop(self, stopped: EarlyStop) -> None:
        """Keep the reason why the program ended early."""
        self._early_stop = stopped
        self.error = stopped if stopped.code else None

    def _on_error(self, error: BaseException) -> None:
        self.error = error
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        place = sites.locate(traceback.tb_frame if traceback else None)
        text = f"the step ended here with {describe_error(error)}"
        self.recorder.add(SyncEvent(NOT_COVERED, text, place.site, place.via, step=self.recorder.step))

    def reset(self) -> None:
        """Drop all findings and steps so far."""
        self.recorder.clear()
        self.recorder.restart(None if self.recorder.step is None else 0)
        self.state.budget.clear()

    def on_optimizer_made(self) -> None:
        """Note that an optimizer is made: everything before belongs to no step."""
        if self.recorder.step is None:
            self.recorder.step, self._optimizer_was_made = 0, True
            self.state.budget.clear()

    def stop_after(self, steps: int | None, stopper: ProgramStopper) -> None:
        """End the program after ``steps`` more steps; None means no limit."""
        self.recorder.max_steps, self.recorder.stopper = steps, stopper

    def on_step(self) -> None:
        """Note that an update was made, or that the program marked the end of a step."""
        self.recorder.on_update(marked=self.follower is not None and self.follower.by == "program")

    def on_restart(self) -> None:
        """Make everything so far a part of step 0, as a stronger sign of steps was found."""
        self.recorder.restart(None if self.recorder.step is None else 0)
        self.recorder.reassign_steps(lambda seen: +Counter({0: seen.total() - seen[None], None: seen[None]}))

    def _final_counts(self, seen: CountByStep, steps: int) -> CountByStep:
        """Return the final number of calls by step, given the numbers ``seen`` during the run.

        Calls before the first update (0 in ``seen``, where steps count from 1) count for the first step, but only
        up to the most in any other step: the rest are preparations. Calls after the last step are outside the
        steps. Without an optimizer, everything is one step.
        """
        settled: CountByStep = Counter({step - 1: calls for step, calls in seen.items() if step and step <= steps})
        before, outside = seen[0], seen[None] + seen[steps + 1]
        if not self._optimizer_was_made:
            before, outside = before + seen[None], seen[steps + 1]
        others = (calls for step, calls in settled.items() if step)
        first = before if steps == 1 else min(before, max(max(others, default=0) - settled[0], 0))
        settled.update({0: first, None: before - first + outside})
        return +settled

    def _why_nothing_on_gpu(self) -> str:
        if self._early_stop is not None:
            return _STOPPED_EARLY
        if self._script:
            return _NOTHING_ON_GPU_IN_SCRIPT
        chosen = self.state.cpu_by_name
        return _NOTHING_ON_GPU if chosen is None else f"{_NOTHING_ON_GPU}. {_TOO_EARLY.format(chosen)}"

    def report(self) -> SyncReport:
        """Return the report."""
        recorder = self.recorder
        steps = max(recorder.updates, 1)
        budget = self.state.budget
        if recorder.updates and not recorder.in_step:
            budget.restart_step()  # what follows the last step is in none
        recorder.reassign_steps(lambda seen: self._final_counts(seen, steps))
        unavailable_reason = (
            "" if self.state.tags.any_on_device or self.error is not None else self._why_nothing_on_gpu()
        )
        sentences = [_COVERAGE, *([_FAKE] if self.state.fake else [])]
        if self._early_stop is not None and self.error is None:
            sentences.append(self._early_stop.reason)
        if self.follower is not None and self.follower.explanation is not None:
            sentences.append(self.follower.explanation)
        if self._unwatched_threads:
            sentences.append(
                f"threads that were running before were not watched: {', '.join(self._unwatched_threads)}"
            )
        unmatched = [*budget.unmatched(), *mistaken_comments(recorder.findings)]
        if self.follower is not None and self.follower.function_missing:
            unmatched.append("the function of --step-on was not found, or never called")
        sentences += unmatched
        return SyncReport(
            "dry run", recorder.findings, steps, sentences, error=self.error, dropped=recorder.dropped,
            unavailable_reason=unavailable_reason, budgeted=budget.given, exceeded=budget.exceeded(steps),
            unmatched=unmatched,
        )  # fmt: skip


@contextlib.contextmanager
def dry_run_context(
    fake: bool, budget: Budget, *, script: bool = False, step_on: str | None = None
) -> Iterator[DryRun]:
    """Install the pretended GPU, and watch the block."""
    if coverage.dry_run_active:
        raise RuntimeError("a dry run is already running in this process")
    stack = contextlib.ExitStack()
    try:
        with uninterrupted():
            run = _set_up(stack, fake, budget, script, step_on)
        yield run
    finally:
        try:
            with uninterrupted():
                stack.close()
        finally:
            stack.close()  # if it was interrupted before it began


def _set_up(stack: contextlib.ExitStack, fake: bool, budget: Budget, script: bool, step_on: str | None) -> DryRun:
    # Each callback comes before the change that it undoes: an interrupt may come in between.
    stack.callback(coverage.set_dry_run_active, False)
    coverage.set_dry_run_active(True)
    path = RegionPath(budget.note_region if budget.given else None)
    stack.callback(dispatch.active.remove, path)
    dispatch.active.add(path)
    run = DryRun(path, fake, budget, script)
    cuda = PretendedCuda(run.state)
    stack.callback(cuda.undo)
    cuda.install()
    stack.enter_context(patched(run.state))
    # Without an optimizer, a function that is called once is one step; a script has as many as the follower finds.
    run.follower = StepFollower(run.on_step, run.on_restart, step_on, weakest="forward" if script else "optimizer")
    stack.callback(run.follower.remove)
    run.follower.follow()

    def init(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        run.on_optimizer_made()

    optimizers = Patch(torch.optim.Optimizer, "__init__", calling(init))
    for patch in (optimizers, *run.recorder.patches()):
        patch.apply_in(stack)
    stack.enter_context(modes(run.state))
    return run
