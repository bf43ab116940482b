"""What tests for a GPU ask of the simulated one; on a real GPU none of it has an effect."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests import simgpu

TESTS = Path(__file__).parents[1]
VALUES = {"SIMGPU_NUMERICS": "1"}
"""The environment of a program that reads what kernels compute."""


@pytest.fixture
def gpu_values() -> Iterator[None]:
    """Let kernels compute in a test that reads their results."""
    with simgpu.numerics() if simgpu.active() else nullcontext():
        yield


@pytest.fixture(autouse=True)
def only_values_that_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that compares what kernels of the simulated GPU did not compute: it would find it equal."""
    if simgpu.active():
        for owner, name in ((torch, "equal"), (torch, "allclose"), (torch.testing, "assert_close")):
            monkeypatch.setattr(owner, name, _computed(getattr(owner, name)))


def _computed(compare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compare)
    def compare_computed(*args: Any, **kwargs: Any) -> Any:
        by_test = Path(sys._getframe(1).f_code.co_filename).is_relative_to(TESTS)
        if (
            by_test
            and not simgpu.computes()
            and any(getattr(value, "is_cuda", False) for value in tree_leaves(args))
        ):
            pytest.fail("compares values that the simulated GPU did not compute: take the fixture gpu_values")
        return compare(*args, **kwargs)

    return compare_computed


def skip_if_simulated(reason: str) -> None:
    """Skip a test of what the simulated GPU has not."""
    if simgpu.active():
        pytest.skip(f"on the simulated GPU: {reason}")


def skip_if_cpus_are_busy() -> None:
    """Skip a test that failed because the simulated GPU, and those who wait for it, got too little of the CPUs."""
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        skip_if_simulated("more programs want the CPUs than there are CPUs")
