"""An interrupt while something replaces attributes of others: all of them can still be put back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

import instrument
from instrument import compat
from instrument.exporters.sessions import OpenRanges
from instrument.integrations.attachment import Attachment
from instrument.integrations.loop import Loop
from instrument.modules.compiling import HookSuspension
from instrument.modules.installer import installer
from instrument.modules.step import patcher
from instrument.patch import Patch
from instrument.syncs.dry.cuda import PretendedCuda
from instrument.syncs.dry.session import running
from instrument.syncs.following import StepFollower
from instrument.syncs.graphed import GraphMaking
from instrument.syncs.sources import Sources
from instrument.syncs.stepping import OptimizerSteps
from instrument.syncs.sync_warning import SyncWarning


class Interrupter:
    """Raises KeyboardInterrupt as the ``at``-th `Patch.apply` begins or returns; notes what each finds."""

    def __init__(self, at: int, event: str) -> None:
        self._at = at
        self._event = event
        self.applied = 0
        self._before: dict[tuple[int, str], tuple[Any, Any]] = {}

    def __enter__(self) -> Interrupter:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code is not Patch.apply.__code__ or event not in ("call", "return"):
            return
        patch = frame.f_locals["self"]
        owner = patch._owner()
        if event == "call":
            self.applied += 1
            self._before.setdefault((id(owner), patch._name), (owner, vars(owner).get(patch._name)))
        if event == self._event and self.applied == self._at:
            sys.setprofile(None)
            raise KeyboardInterrupt

    @property
    def left(self) -> list[str]:
        """The names of what is not as it was."""
        before = self._before.items()
        return [name for (_, name), (owner, value) in before if vars(owner).get(name) is not value]


Pair = tuple[Callable[[], object], Callable[[], object]]


def follower(made: Any) -> Pair:
    return made.follow, made.remove


def service(handle: Any, served: Any) -> Pair:
    def end() -> None:
        served.apply(False)
        handle.remove()

    return lambda: served.apply(True), end


def models() -> Pair:
    model = nn.Sequential(nn.Linear(2, 2), nn.TransformerEncoderLayer(4, 2, 4), nn.LSTM(2, 2))
    begin, end = service(instrument.annotate_modules(model), installer)
    return begin, lambda: (end(), model)  # which must live until then


def suspension() -> Pair:
    suspended, suspend = HookSuspension(compat.scripters), contextlib.nullcontext
    return lambda: suspended.set_suspended(suspend, True), lambda: suspended.set_suspended(suspend, False)


def sources() -> Pair:
    watched, listener = Sources(), SimpleNamespace()
    return lambda: watched.add(listener), lambda: watched.remove(listener)


def pretended() -> Pair:
    gpu = PretendedCuda(SimpleNamespace(wait=print, uncovered=print))
    return gpu.install, gpu.undo


def dry_run() -> Pair:
    stack = contextlib.ExitStack()
    return lambda: stack.enter_context(running(False)), stack.close


def attachment() -> Pair:
    attached, owner = Attachment(Loop("unused")), type("Owner", (), {"call": print})
    return lambda: attached.wrap(owner, "call", attached.region("call")), lambda: (attached.remove(), owner)


CASES: dict[str, Callable[[], Pair]] = {
    "steps": lambda: follower(StepFollower(int, int, begun=int)),
    "steps by forward": lambda: follower(StepFollower(int, int, "forward")),
    "steps by function": lambda: follower(StepFollower(int, int, "torch.nn.functional:relu")),
    "updates": lambda: follower(OptimizerSteps(int, every=True)),
    "graphs": lambda: follower(GraphMaking()),
    "open ranges": lambda: (lambda ranges: (ranges.follow, ranges.end))(OpenRanges()),
    "parts of a step": lambda: service(instrument.annotate_step(), patcher),
    "modules": models,
    "TorchScript": suspension,
    "the warning of waits": lambda: (lambda warning: (warning.install, warning.remove))(SyncWarning(print)),
    "sources of waits": sources,
    "a pretended GPU": pretended,
    "a dry run": dry_run,
    "a framework": attachment,
}


@pytest.mark.parametrize("event", ["call", "return"])
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_nothing_is_left(make: Callable[[], Pair], event: str) -> None:
    """Wherever it comes, what undoes the whole afterwards puts back each attribute."""
    counted = Interrupter(0, event)
    begin, end = make()
    with counted:
        begin()
    end()
    assert counted.applied and not counted.left
    for at in range(1, counted.applied + 1, -(-counted.applied // 20)):  # a dry run has 200
        begin, end = make()
        with Interrupter(at, event) as interrupter, pytest.raises(KeyboardInterrupt):
            begin()
        end()
        assert not interrupter.left, f"{event} {at}"
