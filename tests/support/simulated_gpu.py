"""What tests for a GPU ask of the simulated one; on a real GPU none of it has an effect."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tests import simgpu

VALUES = {"SIMGPU_NUMERICS": "1"}
"""The environment of a program that reads what kernels compute."""


@pytest.fixture
def gpu_values() -> Iterator[None]:
    """Let kernels compute in a test that reads their results."""
    with simgpu.numerics() if simgpu.active() else nullcontext():
        yield


def skip_if_simulated(reason: str) -> None:
    """Skip a test of what the simulated GPU has not."""
    if simgpu.active():
        pytest.skip(f"on the simulated GPU: {reason}")


def skip_if_cpus_are_busy() -> None:
    """Skip a test that failed because the simulated GPU, and those who wait for it, got too little of the CPUs."""
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        skip_if_simulated("more programs want the CPUs than there are CPUs")
