"""Predictions, bounds and plans for programs that are slow for a known reason, against the changed programs."""

from __future__ import annotations

from statistics import median

import pytest

from tests import simgpu
from tests.simgpu.experiments import PROGRAMS, Program, experiment
from tests.support.simulated_gpu import skip_if_cpus_are_busy

pytestmark = [
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make experiments"),
    # A plan may ask for more workers than this machine has cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
SAMPLE = ("matmuls", "copies", "all-reduce in parts", "graph")  # whose steps the GPU bounds, and not the CPU


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            each,
            id=each.name,
            marks=[pytest.mark.experiment, *([pytest.mark.gpu_sim] if each.name in SAMPLE else [])],
        )
        for each in PROGRAMS
    ],
)
def test_the_changed_program(program: Program) -> None:
    """Predictions are within 15 %, the plan within 10 %, and the bound is what a step wins most without."""
    found = experiment(program)
    assert found.rows
    if found.faults():
        skip_if_cpus_are_busy()
    assert found.faults() == []


@pytest.mark.experiment
def test_the_median_error() -> None:
    """Half of all predictions are within 5 %, and few abstain."""
    rows = [row for program in PROGRAMS for row in experiment(program).rows]
    errors = [abs(row.error) for row in rows if row.predicted_ns is not None]
    assert len(errors) > 0.9 * len(rows)
    if median(errors) > 0.05:
        skip_if_cpus_are_busy()
    assert median(errors) <= 0.05
