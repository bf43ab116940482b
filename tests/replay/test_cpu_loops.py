"""Predictions for loops whose steps run on the CPU alone."""

from __future__ import annotations

import pytest

import instrument
from instrument.explain.diagnosis.diagnosis import Diagnosis
from tests.replay.machine import Machine

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


@pytest.fixture
def diagnosis() -> Diagnosis:
    """Six steps that wait 2 ms for a batch, and compute for 3 ms in a region."""
    machine = Machine()
    for _ in range(6):
        with machine.step():
            with machine.region(LOADER):
                machine.work(2_000_000)
            with machine.region("train"):
                machine.work(3_000_000)
    return instrument.diagnose(machine.trace())


@pytest.mark.parametrize("change", [{"without": "dataloader"}, {"workers": 4}, {"fix": "input-wait"}])
def test_the_path_without_the_wait_for_batches(diagnosis: Diagnosis, change: dict[str, str | int]) -> None:
    """What a change removes is not on the critical path, whose parts are those of the predicted step."""
    guess = diagnosis.what_if(**change)  # type: ignore[arg-type]
    assert guess.critical_path is not None
    assert 3_000_000 == guess.step_ns
    assert {"overhead": 6 * 3_000_000} == guess.critical_path.by_class()
    assert {(("train",), "overhead"): 6 * 3_000_000} == guess.critical_path.by_region()


def test_a_part_of_the_wait(diagnosis: Diagnosis) -> None:
    """Without another region, the wait stays as it is."""
    guess = diagnosis.what_if(without="region:train")
    assert guess.critical_path is not None
    assert {"input": 6 * 2_000_000} == guess.critical_path.by_class()


@pytest.mark.parametrize("change", [{"fuse": "optimizer"}, {"launch": "0.1x"}])
def test_changes_of_launches(diagnosis: Diagnosis, change: dict[str, str]) -> None:
    """Without a GPU there are no launches to save: the CPU's work is the computation."""
    (name,) = change
    with pytest.raises(ValueError, match=f'"{name}": the trace has no GPU work'):
        diagnosis.what_if(**change)  # type: ignore[arg-type]
