"""A loop with a profile that forgets to call ``step()``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import optimizer

import instrument

from .training import Recorder, do_nothing, train

FORGOTTEN = "step() was not called in 100 updates of the optimizer"


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what was logged while the loop ran."""
    caplog.set_level(logging.WARNING, "instrument")
    return lambda: [record.message for record in caplog.records if FORGOTTEN in record.message]


def test_a_forgotten_step_is_noticed_while_the_loop_runs(
    out: Path, logged: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """After 100 updates, one line has the fix; at the end, another one says that nothing was recorded."""
    with instrument.profile(out, schedule="3", exporter=Recorder()):
        train(99)
        assert [] == logged()
        train(200)
        (line,) = logged()
        assert "call prof.step() after each update" in line
    assert "no step was counted: call step() after each step" in caplog.text
    assert not optimizer._global_optimizer_post_hooks


def test_a_loop_that_steps_has_no_hook(out: Path, logged: Callable[[], list[str]]) -> None:
    """The first step removes the hook, and its loop may update as often as it likes afterwards."""
    with instrument.profile(out, schedule="3", exporter=Recorder()) as prof:
        assert optimizer._global_optimizer_post_hooks
        prof.step()
        assert not optimizer._global_optimizer_post_hooks
        train(150)
    assert [] == logged()


def test_many_optimizers_in_one_step(out: Path, logged: Callable[[], list[str]]) -> None:
    """One optimizer for each parameter makes many updates in a step."""
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(150)]
    optimizers = [torch.optim.SGD([parameter], 0.1) for parameter in parameters]
    with instrument.profile(out, schedule="3", exporter=Recorder()) as prof:
        for one in optimizers:
            one.step()
        prof.step()
    assert [] == logged()


@pytest.mark.parametrize("arguments", [{}, {"ranks": [1], "schedule": "3"}])
def test_profiles_that_need_no_step(out: Path, logged: Callable[[], list[str]], arguments: dict[str, Any]) -> None:
    """Without a schedule, or on a rank that records nothing, a loop may leave it out."""
    with instrument.profile(out, exporter=Recorder(), **arguments):
        train(101)
    assert [] == logged()


def test_steps_calls_it_itself(out: Path, logged: Callable[[], list[str]]) -> None:
    """A loop over `steps` is not watched: its items may have many updates each."""
    for _ in instrument.steps(range(1), out, at=3, exporter=Recorder()):
        train(120, do_nothing)
    assert [] == logged()
