"""An interrupt while patches are applied: all patched attributes can still be restored.

The interrupts come before lines of the library. Interrupts inside torch's registration of a hook are not tested:
one between the hook and its handle leaves a hook that does nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo  # not in the middle of a case, where import hooks would add lines
from torch import nn
from torch.optim import optimizer

import instrument
from instrument.base.compat import compiler, kineto, profilers
from instrument.base.patch import TRANSPARENT, Patch, apply, undo
from instrument.integrations.adapter import Adapter
from instrument.integrations.loop import Loop
from instrument.record.cuda_graphs import GraphedCallables
from instrument.record.exporters.sessions import OpenRanges
from instrument.record.modules.compiling import HookSuspension
from instrument.record.modules.installer import installer
from instrument.record.modules.parts import patcher
from instrument.record.stepping.explicit_steps import program_steps
from instrument.record.stepping.follower import StepFollower
from instrument.record.stepping.optimizer_steps import OptimizerSteps
from instrument.record.stepping.outermost_model import OutermostModel
from instrument.syncs.budget import Budget
from instrument.syncs.dryrun.cuda import PretendedCuda
from instrument.syncs.dryrun.run import dry_run_context
from instrument.syncs.monitor import SyncMonitor
from instrument.syncs.torch_reports import SyncWarning

pytestmark = pytest.mark.fuzz
# Lines to run in each case: a case with less than 150 lines has every moment, others some; at least FEWEST.
LINES = 1 << 40 if os.environ.get("INSTRUMENT_FUZZ") == "all" else 25_000
FEWEST = 20
SEED = os.environ.get("INSTRUMENT_FUZZ_SEED") or str(random.randrange(1 << 32))  # of the moments that are drawn
PACKAGE = str(Path(instrument.__file__).parent)
ABSENT = object()


class Owner(NamedTuple):
    """An object that patches attributes from ``begin`` to ``end``, and the models that it hooks."""

    begin: Callable[[], object]
    end: Callable[[], object]
    models: tuple[nn.Module, ...] = ()

    def hooks(self) -> list[object]:
        """Return the hooks on the models and on all optimizers, and the listeners of the program's steps."""
        modules = [module for model in self.models for module in model.modules()]
        held = [getattr(module, name) for module in modules for name in ("_forward_pre_hooks", "_forward_hooks")]
        held += [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
        return [*(hook for hooks in held for hook in hooks.values()), *program_steps.listeners]


class Interrupter:
    """Calls ``interrupt`` before the ``at``-th line of the library; records the attributes before each patch."""

    def __init__(self, at: int, interrupt: Callable[[], object]) -> None:
        self._at = at
        self._interrupt = interrupt
        self.places: list[str] = []
        self.before: dict[tuple[int, str], tuple[Any, Any]] = {}

    def __enter__(self) -> Interrupter:
        self._trace = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._trace)

    def _called(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code is Patch.__init__.__code__:
            owner, name = frame.f_locals["owner"], frame.f_locals["name"]
            self.before.setdefault((id(owner), name), (owner, vars(owner).get(name, ABSENT)))
        return self._line if frame.f_code.co_filename.startswith((PACKAGE, TRANSPARENT)) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line":
            self.places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            if len(self.places) == self._at:
                self._interrupt()
        return self._line

    @property
    def unrestored(self) -> list[str]:
        """Return the names of the attributes that are not restored."""
        before = self.before.items()
        return [name for (_, name), (owner, value) in before if vars(owner).get(name, ABSENT) is not value]


def follower(following: Any) -> Owner:
    return Owner(following.follow, following.remove)


def called_model() -> Owner:
    outermost, model = OutermostModel(id, id), nn.Linear(2, 2)

    def begin() -> None:
        outermost.follow()
        model(torch.ones(2))

    return Owner(begin, outermost.remove, (model,))


def service(handle: Any, served: Any) -> Owner:
    def begin() -> None:
        with pytest.MonkeyPatch.context() as recording:
            recording.setattr(type(served), "_should_be_on", property(lambda service: bool(service.requests)))
            served.refresh()

    return Owner(begin, handle.remove)


def models() -> Owner:
    model = nn.Sequential(nn.Linear(2, 2), nn.TransformerEncoderLayer(4, 2, 4), nn.LSTM(2, 2))
    begin, end, _ = service(instrument.annotate_modules(model), installer)
    return Owner(begin, end, (model,))


def suspension() -> Owner:
    suspended, suspend = HookSuspension(compiler.scripters), contextlib.nullcontext
    return Owner(lambda: suspended.set_suspended(suspend, True), lambda: suspended.set_suspended(suspend, False))


def sources() -> Owner:
    watched, listener = SyncMonitor(), SimpleNamespace()
    return Owner(lambda: watched.add(listener), lambda: watched.remove(listener))


def pretended() -> Owner:
    gpu = PretendedCuda(SimpleNamespace(record_sync=print, record_not_covered=print))
    return Owner(gpu.install, gpu.undo)


def warning() -> Owner:
    sync_warning = SyncWarning(print)
    return Owner(sync_warning.install, sync_warning.remove)


def open_ranges() -> Owner:
    ranges = OpenRanges()
    return Owner(ranges.follow, ranges.end)


def dry_run() -> Owner:
    stack = contextlib.ExitStack()
    return Owner(lambda: stack.enter_context(dry_run_context(False, Budget(None))), stack.close)


def adapter() -> Owner:
    attached, owner = Adapter(Loop("unused")), type("Owner", (), {"call": print})
    return Owner(lambda: attached.wrap(owner, "call", attached.in_region("call")), attached.detach)


class SessionObserver:
    """Ignores the sessions of torch's profiler."""

    def before_start(self) -> None:
        pass

    def before_prepare(self, profiler: Any) -> bool | None:
        pass

    def on_ended(self) -> None:
        pass

    def before_disable(self) -> Any:
        pass


def profiler_owner() -> Owner:
    held: list[Patch] = []

    def begin() -> None:
        apply(profilers.profiler_patches(lambda target, profiler: None, int), held)
        apply(kineto.session_patches(SessionObserver()), held)

    return Owner(begin, lambda: undo(held))


CASES: dict[str, Callable[[], Owner]] = {
    "profilers of torch": profiler_owner,
    "steps": lambda: follower(StepFollower(int, int, on_begin=int)),
    "steps by forward": lambda: follower(StepFollower(int, int, "forward")),
    "steps by function": lambda: follower(StepFollower(int, int, "torch.nn.functional:relu")),
    "updates": lambda: follower(OptimizerSteps(int, every=True)),
    "the outermost model": called_model,
    "graphs": lambda: follower(GraphedCallables()),
    "open ranges": open_ranges,
    "parts of a step": lambda: service(instrument.annotate_step(), patcher),
    "modules": models,
    "TorchScript": suspension,
    "the synchronization warning": warning,
    "sources of synchronization events": sources,
    "a pretended GPU": pretended,
    "a dry run": dry_run,
    "a framework": adapter,
}

ONCE = ("steps", "steps by forward", "steps by function", "updates", "the outermost model")


def moments(make: Callable[[], Owner]) -> list[int]:
    """Return the line numbers to interrupt at: each place once, then others up to the limit."""
    for _ in range(3):  # the first runs import modules and fill caches
        gc.collect()  # some owners look through all objects, and take fewer lines once garbage is gone
        owner = make()
        with Interrupter(0, print) as counted:
            owner.begin()
        owner.end()
        assert not counted.unrestored
    assert counted.before
    print(f"{len(counted.places)} lines; INSTRUMENT_FUZZ_SEED={SEED} draws the same moments again")
    drawn = random.Random(SEED).sample(range(len(counted.places)), len(counted.places))
    at_place = {counted.places[at]: at for at in drawn}
    first = [*at_place.values(), *(at for at in drawn if at_place[counted.places[at]] != at)]
    return [at + 1 for at in first[: max(FEWEST, LINES // len(first))]]


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_interrupts_leave_no_patches(make: Callable[[], Owner]) -> None:
    """After an interrupt at any line, the owner's end restores each attribute."""
    swept, reached = moments(make), 0
    for at in swept:
        owner = make()
        hooks = owner.hooks()
        with suppress(KeyboardInterrupt), Interrupter(at, interrupt) as interrupter:
            owner.begin()
        owner.end()
        assert not interrupter.unrestored, interrupter.places[-1]
        assert owner.hooks() == hooks, interrupter.places[-1]
        reached += len(interrupter.places) == at
    assert reached > len(swept) / 3  # caches shorten later runs


# A dry run is a block of the program, which no handler ends.
@pytest.mark.parametrize("name", [name for name in CASES if name != "a dry run"])
def test_a_handler_that_undoes_the_patches(name: str) -> None:
    """A signal handler of the program calls the owner's end during its begin, which then continues.

    Owners that begin only once stay ended. For the others, the end may have come too early, and is called again.
    """
    swept, reached = moments(CASES[name]), 0
    for at in swept:
        owner = CASES[name]()
        hooks = owner.hooks()
        with Interrupter(at, owner.end) as interrupter:
            owner.begin()
        ended = len(interrupter.places) >= at
        if name not in ONCE or not ended:
            owner.end()
        place = interrupter.places[at - 1] if ended else "at its end"
        assert not interrupter.unrestored, place
        assert owner.hooks() == hooks, place
        reached += ended
    assert reached > len(swept) / 2
