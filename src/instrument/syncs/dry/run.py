"""`dry_run`: carries a training step out without a GPU, and lists where it would wait for one."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...patch import Patch
from ...regions.live import live
from ...regions.path import RegionPath
from .. import sites
from ..finding import NOT_COVERED, Event
from ..recorder import Recorder
from ..report import SyncReport
from .cuda import PretendedCuda
from .fake import Fake
from .patches import modes, patched
from .state import State, as_cuda
from .tags import tensors

_COVERAGE = (
    "a dry run: tensors on the GPU were on the CPU, so waits have no times; what libraries do outside of torch, "
    "and in CUDA code of their own, was not looked at; autocast changed no types"
)
_FAKE = "tensors had no data: branches on values, and code that asks whether it is traced, may go the other way"
_NOWHERE = (
    'nothing was on a GPU: build the model inside of the step with device="cuda", '
    "or name what is on the GPU: dry_run(step, on_gpu=[model, optimizer])"
)


def dry_run(step: Callable[[], object], *, fake: bool = False, on_gpu: Iterable[Any] = ()) -> SyncReport:
    """Call ``step`` as if there were a GPU, and list where the CPU would wait for it.

    The step runs for real, on the CPU: what it trains is trained, what it writes is written. An error in it ends
    the run and is in the report.

    Args:
        step: called once, without arguments: a training step, or all of a short training, which is told apart
            into steps by the first optimizer that steps.
        fake: run without data, for models that are too large for this machine. What the step creates then has
            shapes only.
        on_gpu: modules, optimizers and tensors that exist already and are to be taken for being on the GPU.

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
    if not callable(step):
        raise TypeError(f'"step" must be a function without arguments: {step!r}')
    with _running(fake) as run:
        run.place(on_gpu)
        run.carry_out(step)
    return run.report()


def dry_run_file(path: Path, function: str | None, *, fake: bool = False, args: Sequence[str] = ()) -> SyncReport:
    """Run a script as if there were a GPU, or import it and call one function of it.

    Args:
        path: the script.
        function: what to call, without arguments; None runs the script as ``__main__``.
        fake: as in `dry_run`.
        args: the arguments of the script.

    Raises:
        ValueError: there is no such file, or no such function in it.
        TypeError: the function needs arguments.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    before = sys.argv, list(sys.path), sys.modules.get(path.stem)
    sys.argv, sys.path[:0] = [str(path), *args], [str(path.parent.resolve())]
    try:
        with _running(fake) as run:
            if function is None:
                run.carry_out(lambda: runpy.run_path(str(path), run_name="__main__"))
            else:
                step = run.carry_out(lambda: _function(path, function))
                if run.error is None:
                    run.state.recorder.clear()
                    run.carry_out(step)
        if isinstance(run.error, _UsageError):
            raise run.error.args[0]
        return run.report()
    finally:
        sys.argv, sys.path[:] = before[:2]
        if before[2] is None:
            sys.modules.pop(path.stem, None)


class _UsageError(Exception):
    """Carries an error that is not the script's."""


def _function(path: Path, name: str) -> Callable[[], object]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise _UsageError(ValueError(f"{path} is no Python file"))
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise _UsageError(ValueError(f"there is no function {name} in {path}"))
        found = getattr(found, part)
    if not callable(found):
        raise _UsageError(TypeError(f"{name} in {path} is no function"))
    with contextlib.suppress(ValueError):  # built-in functions have no signature
        needed = [p.name for p in inspect.signature(found).parameters.values() if _needed(p)]
        if needed:
            raise _UsageError(TypeError(f"{name} in {path} needs arguments: {', '.join(needed)}"))
    return found


def _needed(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variadic


class _Run:
    """One dry run, from its start to its report."""

    def __init__(self, path: RegionPath, fake: bool) -> None:
        self.state = State(Recorder(path.names), Fake() if fake else None)
        self.error: BaseException | None = None
        self._optimizer: Any = None
        self._stepped = 0
        self._built = False

    def place(self, on_gpu: Iterable[Any]) -> None:
        """Take tensors that exist already for being on the GPU."""
        device = as_cuda("cuda")
        for value in on_gpu:
            if isinstance(value, torch.nn.Module):
                held: Any = [*value.parameters(), *value.buffers()]
            elif isinstance(value, torch.optim.Optimizer):
                held = [t for state in value.state.values() for t in tensors(state) if t.dim()]
                held += [t for group in value.param_groups for t in group["params"]]
            else:
                held = value
            found = list(tensors(held))
            if not found and not isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
                raise TypeError(f'"on_gpu" must hold modules, optimizers and tensors: {value!r}')
            self.state.tags.put(found + [t.grad for t in found if t.is_leaf and t.grad is not None], device)

    def carry_out(self, step: Callable[[], Any]) -> Any:
        """Call ``step``; keep what ended it early."""
        try:
            return step()
        except SystemExit as error:
            if error.code not in (None, 0):
                self._ended(error)
        except Exception as error:
            self._ended(error)

    def _ended(self, error: BaseException) -> None:
        self.error = error
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        place = sites.locate(traceback.tb_frame if traceback else None)
        text = f"the step ended here with {type(error).__name__}: {error}"
        self.state.recorder.add(Event(NOT_COVERED, text, place.site, place.via, step=self.state.recorder.step))

    def built(self) -> None:
        """An optimizer is made: what came before was not yet a step."""
        recorder = self.state.recorder
        if recorder.step is None:
            recorder.step, self._built = 0, True

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """An optimizer stepped; the first one tells the steps."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if self._optimizer is optimizer:
            self._stepped += 1
            self.state.recorder.step = self._stepped

    def _settled(self, seen: Counter[int | None], steps: int) -> Counter[int | None]:
        """Return where waits were.

        A step ends with its optimizer, so what follows in the loop counts for the next one, and after the last
        for the first, which had nothing before it. Without a set-up, all is of a step.
        """
        settled: Counter[int | None] = Counter()
        for step, waits in seen.items():
            first = None if self._built else 0
            settled[first if step is None else step % steps] += waits
        return settled

    def report(self) -> SyncReport:
        """Return what was found."""
        recorder = self.state.recorder
        steps = max(self._stepped, 1)
        for found in recorder.findings:
            found.steps = self._settled(found.steps, steps)
        blind = "" if self.state.tags.used or self.error is not None else _NOWHERE
        coverage = [_COVERAGE, *([_FAKE] if self.state.fake else [])]
        return SyncReport(
            "dry run", recorder.findings, steps, coverage, error=self.error, dropped=recorder.dropped, blind=blind
        )


_active = False


@contextlib.contextmanager
def _running(fake: bool) -> Iterator[_Run]:
    """Pretend that there is a GPU, and watch."""
    global _active
    if _active:
        raise RuntimeError("a dry run is running already: this one would see its pretended GPU")
    _active = True
    with contextlib.ExitStack() as stack:
        stack.callback(_over)
        path = RegionPath()
        live.add(path)
        stack.callback(live.remove, path)
        run = _Run(path, fake)
        cuda = PretendedCuda(run.state)
        stack.callback(cuda.undo)
        cuda.install()
        stack.enter_context(patched(run.state))
        hook = register_optimizer_step_post_hook(run.stepped)
        stack.callback(hook.remove)
        stack.callback(Patch(torch.optim.Optimizer, "__init__", lambda original: _noting(original, run)).undo)
        stack.enter_context(modes(run.state))
        yield run


def _over() -> None:
    global _active
    _active = False


def _noting(original: Any, run: _Run) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        run.built()

    return __init__
