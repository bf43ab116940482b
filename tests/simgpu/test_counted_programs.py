"""What a dry run counts, against what the software GPU does: the launches of each family are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import instrument
from instrument.read.tables.kernel_families import family_of
from tests import simgpu
from tests.simgpu.counted_programs import PROGRAMS

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]


@pytest.fixture(autouse=True)
def without_cudnn() -> Iterator[None]:
    """The software GPU has no cuDNN."""
    before, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
    yield
    torch.backends.cudnn.enabled = before


def launched(name: str) -> Counter[str]:
    """Return the launches of the third step of a program by family."""
    step = PROGRAMS[name]()
    step()
    step()
    torch.cuda.synchronize()
    with simgpu.log() as log:
        step()
        torch.cuda.synchronize()
    works = (entry for entry in log if not entry.kind.startswith("wait"))
    return Counter(family_of(entry.name) if entry.kind == "kernel" else entry.kind for entry in works)


def counted(name: str) -> Counter[str]:
    """Return the same as a dry run counts it."""

    def run() -> None:
        step = PROGRAMS[name]()
        step()
        step()
        step()

    report = instrument.dry_run(run)
    assert report.finished, report.ended
    assert report.counts is not None
    step = report.counts.step
    copies = sum(each.count for each in step.copies)
    return +Counter({**step.kernels, "memcpy": step.memcpys + copies, "memset": step.memsets})


@pytest.mark.parametrize("name", PROGRAMS)
def test_launches_are_equal(name: str) -> None:
    """Each family has as many launches as on the software GPU."""
    assert launched(name) == counted(name)
