"""What findings of a program under `instrument run` advise: options of the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from tests.bootstrap.programs import RUN, run_warm, write
from tests.diagnosis.made_loops import MadeLoop

SLOW_FIRST = """
import time, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range(6):
    time.sleep(0.2 if number == 2 else 0.01)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def fix_of(run: Path) -> tuple[str, str]:
    """Return the code of the fix for the slow first step, before and after."""
    (found,) = [each for each in instrument.diagnose(run).findings if each.rule == "cold-first-step"]
    assert found.fix is not None
    return found.fix.before, found.fix.after


@pytest.mark.process
def test_a_slow_first_step_under_run(tmp_path: Path) -> None:
    """The fix names options of the command, also in a slim trace with anonymous names."""
    write(tmp_path, SLOW_FIRST)
    run_warm(tmp_path, [*RUN, "--", "train.py"])
    run = tmp_path / "runs" / "instrument"
    expected = "instrument run -- train.py", "instrument run --wait 5 --warmup 2 -- train.py"
    assert expected == fix_of(run)
    assert not instrument.slim(next(run.glob("window-*/*.gz")), tmp_path / "slim.json", anonymize=True).changed
    assert expected == fix_of(tmp_path / "slim.json")


def test_a_slow_first_step_of_a_loop(tmp_path: Path) -> None:
    """The fix names arguments where the program records itself."""
    with instrument.profile(tmp_path, schedule="1-3") as prof:
        for number in range(5):
            for _ in range(4000 if number == 1 else 10):
                torch.ones(3).sum()
            prof.step()
    before, after = fix_of(tmp_path)
    assert before.startswith("instrument.schedule(")
    assert after.startswith("instrument.schedule(")


@pytest.mark.parametrize(
    ("metadata", "shapes", "full", "memory"),
    [
        ({}, "record_shapes=True", 'detail="full"', 'profile_memory=True or memory="snapshot"'),
        ({"instrument_run": "1"}, "--shapes", "--detail full", "--memory events or --memory snapshot"),
    ],
)
def test_what_a_trace_lacks(metadata: dict[str, Any], shapes: str, full: str, memory: str) -> None:
    """Rules that abstain say how to record what they need, as the user records."""
    loop = MadeLoop()
    without = instrument.diagnose(replace(loop.trace(), metadata=metadata))
    assert f"record with {full}" in str([*without.abstained.values()])
    assert f"record with {memory}" in str([*without.abstained.values()])
    loop.operator("aten::mm", 0, 10)
    assert f"record with {shapes}" in str(
        [*instrument.diagnose(replace(loop.trace(), metadata=metadata)).abstained.values()]
    )
