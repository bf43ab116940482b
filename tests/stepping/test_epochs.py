"""Tests of `EpochStarts`: loops over DataLoaders, and those of programs under `instrument run`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from instrument.base.run_folder import RUNS
from instrument.record.stepping.epochs import EpochStarts

from ..support import programs, warm

Loader = DataLoader[int]


def epochs_of(loader: Loader, other: Loader, *, other_at: tuple[int, ...] = (), in_step: int = 1) -> list[int]:
    """Return the epochs of three loops over ``loader``, with loops over ``other`` within some steps."""
    found: list[int] = []
    step, batches = 0, 0
    starts = EpochStarts(lambda: step, found.append)

    def has_batch() -> bool:
        starts.before_batch(iterator)
        return next(iterator, None) is not None

    for _ in range(3):
        iterator = iter(loader)
        training = iterator
        while has_batch():
            batches += 1
            if step in other_at:
                iterator = iter(other)
                while has_batch():
                    pass
                iterator = training
            step += batches % in_step == 0
    return found


def test_each_loop_is_an_epoch() -> None:
    """The first step of each loop is found, also where gradients are accumulated."""
    numbers: Loader = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type]
    assert [0, 4, 8] == epochs_of(numbers, numbers)
    assert [0, 2, 4] == epochs_of(numbers, numbers, in_step=2)


def test_an_evaluation_is_no_epoch() -> None:
    """A loop within one step is not one of the training."""
    numbers: Loader = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type]
    assert [0, 4, 8] == epochs_of(numbers, DataLoader(range(6)), other_at=(2, 4, 6))  # type: ignore[arg-type]


def test_workers_that_stay() -> None:
    """One iterator serves all epochs of a loader with persistent workers."""
    numbers: Loader = DataLoader(range(6), num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    assert [0, 6, 12] == epochs_of(numbers, numbers)


@pytest.mark.process
def test_stalls_at_epochs_of_a_program(tmp_path: Path) -> None:
    """`instrument run` says that the slow steps of an unchanged program are the first of its epochs."""
    code = """
        import time, torch

        class Numbers(torch.utils.data.Dataset):
            def __len__(self):
                return 7

            def __getitem__(self, index):
                time.sleep(0.3 if index == 0 else 0.01)
                return torch.ones(2)

        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            for batch in torch.utils.data.DataLoader(Numbers()):
                model(batch).sum().backward()
                optimizer.step()
                list(torch.utils.data.DataLoader(range(2)))  # an evaluation
    """
    script = programs.program(code, tmp_path)
    line = ["instrument", "run", "--steps", "2-3", "-o", "out", "--", sys.executable, str(script)]
    done = warm.run(programs.python(Path("-m"), line), programs.environment(), cwd=tmp_path, check=True)
    (run,) = map(json.loads, (tmp_path / "out" / RUNS).read_text().splitlines())
    assert [0, 7, 14, 21] == run["lengths"]["epochs"]
    said = " ".join(done.stderr.split())
    assert "every 7th step, the first of each epoch, of about" in said
    advice = re.search(r"No window shows a slow step; record one with (--steps) (\S+)", said)
    assert advice is not None
    line = ["instrument", "run", *advice.groups(), "-o", "again", "--", sys.executable, str(script)]
    done = warm.run(programs.python(Path("-m"), line), programs.environment(), cwd=tmp_path, check=True)
    (run,) = map(json.loads, (tmp_path / "again" / RUNS).read_text().splitlines())
    assert [14] == run["lengths"]["recorded"]
    assert "No window shows a slow step" not in done.stderr
