"""`InstrumentProfiler`, as the profiler of Lightning's Trainer."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from instrument.integrations.lightning import InstrumentProfiler

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
from tests.integrations.lightning_support import (  # noqa: F401
    DATA,
    Module,
    callback,
    data,
    is_clean,
    quiet,
    recorded_events,
    region_tree,
    steps,
    trainer,
)

pytestmark = [
    pytest.mark.framework,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def test_profiler(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's actions are the regions of its steps, and the summary is its report."""
    logger = logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(logger, "propagate", True)
    logger.setLevel(logging.INFO)
    adapter = InstrumentProfiler(tmp_path / "out", wait=1, warmup=0, active=1)
    pl_trainer = trainer(tmp_path, profiler=adapter, accumulate_grad_batches=2)
    pl_trainer.fit(Module(), data(4), data(1))
    events = recorded_events(tmp_path / "out")
    lines = region_tree(events).splitlines()
    strategy = "[Strategy]SingleDeviceStrategy"
    chosen = [
        line
        for line in lines
        if any(part in line for part in ("step", "Step", "run_", f"{strategy}.backward", "_next"))
        and ".on_" not in line
    ]
    assert chosen == [
        "ProfilerStep#1",
        "  [_TrainingEpochLoop].train_dataloader_next",
        f"    {DATA}",
        "  step",
        "    run_training_batch",
        f"      {strategy}.training_step",
        f"      {strategy}.backward",
        "    [_TrainingEpochLoop].train_dataloader_next",
        f"      {DATA}",
        "    run_training_batch",
        "      [LightningModule]Module.optimizer_step",
        "        Optimizer.step#SGD.step",
        f"          {strategy}.training_step",
        f"          {strategy}.backward",
    ]
    assert not {"forward", "micro-step"} & {event["name"] for event in events}
    assert caplog.text.count("Where the step went") == 1
    assert "Where the step went" in adapter.summary()
    assert is_clean(pl_trainer, adapter)


def test_profiler_of_a_failing_run(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is logged although Lightning omits it."""
    logger = logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(logger, "propagate", True)
    logger.setLevel(logging.INFO)
    module = Module()
    module.body = lambda index: 1 / (1 - index)
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, profiler=InstrumentProfiler(tmp_path, wait=0, warmup=0, active=9)).fit(module, data(3))
    assert caplog.text.count("Where the step went") == 1


def test_profiler_actions_left_open(tmp_path: Path, recorded: Any) -> None:
    """Actions that are not stopped, or stopped twice or in another order, end with the enclosing one."""
    adapter = InstrumentProfiler(tmp_path)
    pl_trainer = trainer(tmp_path, profiler=adapter)
    module = Module()

    def body(index: int) -> None:
        adapter.stop("never begun")
        for action in ("a", "b", "c", "c", "left"):
            adapter.start(action)
        for action in ("c", "b", "c", "a", "a"):
            adapter.stop(action)
        adapter.start("left too")

    module.body = body
    names = Counter(event["name"] for event in recorded(lambda: pl_trainer.fit(module, data(2))))
    expected = {"a": 2, "b": 2, "c": 4, "left": 2, "left too": 2}
    assert expected == {name: names[name] for name in expected}
    assert not any(map(adapter.loop.is_open, ("step", *expected)))


def test_callback_and_profiler(tmp_path: Path, caplog: Any) -> None:
    """Together, callback and profiler record one window, in which each part of a step occurs once."""
    adapter = callback(tmp_path)
    pl_trainer = trainer(tmp_path, adapter, profiler=InstrumentProfiler(tmp_path / "other", wait=0, active=1))
    pl_trainer.fit(Module(), data(2))
    assert [(0, 1)] == steps(adapter)
    assert not (tmp_path / "other").exists()
    names = Counter(event["name"] for event in recorded_events(tmp_path / "out"))
    training_step = "[Strategy]SingleDeviceStrategy.training_step"
    expected = {"step": 2, "forward": 0, training_step: 2, "backward": 2, "run_training_epoch": 0}
    assert expected == {name: names[name] for name in expected}
    assert caplog.text.count("uses the arguments of the Trainer's InstrumentCallback") == 1
