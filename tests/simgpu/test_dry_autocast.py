"""The types of autocast in a dry run against those on the simulated GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import instrument
from tests import simgpu
from tests.counting.programs import BEGIN, PROGRAMS
from tests.dryrun.autocast_cases import outcomes

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
    pytest.mark.filterwarnings("ignore"),  # torch's own
]


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_operators(low: torch.dtype) -> None:
    """Each result has the type that it has on CUDA, and so has its gradient."""
    expected, found = outcomes(low), dict[str, str]()
    report = instrument.dry_run(lambda: found.update(outcomes(low)))
    assert report.error is None
    assert found == expected


def saved_types(program: str) -> list[tuple[Any, ...]]:
    """Return the shape and type of each tensor that a program saves for its backward pass."""
    saved = []

    def pack(tensor: Any) -> Any:
        if tensor.dim() > 1:
            saved.append((tuple(tensor.shape), str(tensor.dtype)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        exec(compile(BEGIN + PROGRAMS[program], "program.py", "exec"), {})
    return sorted(saved)


@pytest.mark.parametrize("program", ["gpt, autocast", "gpt, float16 and scaler", "gpt", "matrix of scores"])
def test_what_programs_save(program: str) -> None:
    """What is saved for the backward pass has the shapes and types of CUDA."""
    expected, found = saved_types(program), []
    report = instrument.dry_run(lambda: found.extend(saved_types(program)))
    assert report.error is None
    assert found == expected
