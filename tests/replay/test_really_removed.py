"""Predictions for programs on the CPU, compared with the programs without the cause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

import instrument
from instrument.explain.replay.replay import Replayer, mean_ns
from instrument.explain.replay.requests import Request
from instrument.explain.replay.what_if import WhatIf, what_if
from instrument.read.jobs.read import read_trace

STEPS, WORK_S, CAUSE_S = 9, 0.03, 0.02
Loop = Callable[[bool], None]


class Batches(Dataset[torch.Tensor]):
    """Batches that take a while to load, or none."""

    def __init__(self, slow: bool) -> None:
        self._slow = slow

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(CAUSE_S if self._slow else 0)
        return torch.ones(8)


def train(batch: torch.Tensor) -> None:
    """Stand in for a training step whose length does not depend on other programs of the machine."""
    with instrument.annotate("train"):
        (batch * 2).sum()
        time.sleep(WORK_S)


def sleeping(with_cause: bool) -> None:
    with instrument.annotate("cause"):
        time.sleep(CAUSE_S if with_cause else 0)
    train(torch.ones(8))


def waiting(with_cause: bool) -> None:
    done = threading.Event()
    worker = threading.Timer(CAUSE_S, done.set)
    with instrument.annotate("cause"):
        if with_cause:
            worker.start()
            done.wait()
    train(torch.ones(8))


def record(loop: Loop, with_cause: bool, path: Path) -> Replayer:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        if loop is loading:
            for batch in DataLoader(Batches(with_cause), batch_size=1):
                train(batch)
                profiler.step()
        else:
            for _ in range(STEPS):
                loop(with_cause)
                profiler.step()
    profiler.export_chrome_trace(str(path))
    return Replayer(read_trace(path))


def loading(with_cause: bool) -> None:
    """Marks the loop whose batches take a while; `record` runs it."""


@pytest.mark.parametrize(
    ("loop", "without"), [(sleeping, "region:cause"), (waiting, "region:cause"), (loading, "dataloader")]
)
def test_prediction(loop: Loop, without: str, tmp_path: Path) -> None:
    """The predicted step is within 10 % of the step of the program without the cause.

    On a busy machine a step may take longer by itself: of three pairs of recordings, one has to agree.
    """
    for _ in range(3):
        guess: WhatIf = what_if(record(loop, True, tmp_path / "before.json"), Request(without=[without]))
        measured = mean_ns(record(loop, False, tmp_path / "after.json").recorded_ns)
        assert guess.step_ns is not None
        if abs(guess.step_ns / measured - 1) < 0.1 and guess.before_ns > 1.3 * measured:
            return
    pytest.fail(f"predicted {guess.step_ns:,} ns, measured {measured:,}, before {guess.before_ns:,}")
