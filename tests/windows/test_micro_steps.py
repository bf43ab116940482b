"""`steps` with ``accumulate``: several items for one update of the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import instrument

from .training import Recorder, manifest, names, traces


def accumulated(items: Any, size: int) -> int:
    """Train on ``items`` with an update after each ``size`` of them; return the number of updates."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    updates = 0
    for number, _ in enumerate(items, start=1):
        model(torch.ones(1, 2)).sum().backward()
        if number % size == 0:
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    return updates


def test_a_step_has_several_micro_steps(out: Path) -> None:
    """A step is an update, and the trace has each item of it as a region."""
    assert 5 == accumulated(instrument.steps(range(20), out, at="2-3", accumulate=4), 4)
    (entry,) = manifest(out)
    assert ("recorded", [2, 3], 5) == (entry["status"], entry["steps"], entry["timing"]["run_steps"])
    (path,) = traces(out)
    found = [name for name in names(path) if name.startswith(("micro", "ProfilerStep"))]
    expected = ["ProfilerStep#2", *["micro-step"] * 4, "ProfilerStep#3", *["micro-step"] * 4]
    assert expected == found


def test_the_items_are_the_same(out: Path) -> None:
    """All items arrive, one by one as they are loaded, and the rest at the end of an epoch is a step."""
    loaded = []

    def load() -> Any:
        for number in range(7):
            loaded.append(number)
            yield number

    batches = instrument.steps(load(), out, at=9, accumulate=3, exporter=Recorder())
    for number in batches:
        assert number == loaded[-1]
    assert list(range(7)) == loaded
    assert 3 == batches.profile.step_num
    assert 7 == len(instrument.steps(range(7), out, at=9, accumulate=3, exporter=Recorder()))


def test_a_break_in_a_step(out: Path) -> None:
    """The open window is saved as soon as the loop is left, and the next epoch begins a new step."""
    for _ in range(2):
        for number in instrument.steps(range(9), out, at="1-9", accumulate=3, exporter=Recorder()):
            if number == 4:
                break
    assert [[1, 1], [2, 3]] == [entry["steps"] for entry in manifest(out)]


def test_nested_loops_at_one_place(out: Path) -> None:
    """The inner loop over the same batches has a profile of its own, as with `steps` of single items."""
    for accumulate in (1, 2):
        folder = out / str(accumulate)
        batches = instrument.steps(range(4), folder, at=9, accumulate=accumulate, exporter=Recorder())
        outer = batches.profile
        for _ in batches:
            for _ in batches:
                assert batches.profile is not outer
            break
        assert 4 // accumulate == batches.profile.step_num


@pytest.mark.parametrize("wrong", [0, 1.5, True])
def test_wrong_numbers(out: Path, wrong: Any) -> None:
    """The call raises."""
    with pytest.raises((TypeError, ValueError), match='"accumulate" must be an integer >= 1'):
        instrument.steps(range(3), out, accumulate=wrong)
