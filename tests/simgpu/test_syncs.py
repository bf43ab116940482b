"""The detector of synchronizations against the log of the simulated GPU, and its classes against torch's own."""

from __future__ import annotations

import io
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import instrument
from tests import simgpu
from tests.dryrun import short_idioms
from tests.support import copies

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, of the idioms
]
UNSUPPORTED = {"linalg"}  # cuSOLVER is not simulated
FILE = "/nowhere/idiom.py"
IDIOMS = [
    pytest.param(source, waits, id=f"{'waits' if waits else 'clean'}-{name}")
    for waits, group in ((True, short_idioms.SYNCHRONISING), (False, short_idioms.CLEAN))
    for name, source in group.items()
    if name not in UNSUPPORTED
]


def names() -> dict[str, Any]:
    """Return the names that the idioms use, on the GPU."""
    t, m = torch.ones(4, device="cuda"), nn.Linear(4, 2).to("cuda")
    m(t).sum().backward()
    return {
        "torch": torch, "nn": nn, "F": F, "np": np, "io": io, "t": t, "m": m, "__name__": "idiom",
        "x": torch.ones(3, 4, device="cuda"), "i": torch.tensor([0, 1, 2, 1], device="cuda"),
        "b": torch.tensor([True, False, True, True], device="cuda"), "h": torch.randn(4),
        "p": torch.randn(4).pin_memory(),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def only_values_that_are_computed() -> None:
    """Some idioms compare; nobody looks at the result."""


@pytest.mark.parametrize(("source", "waits"), IDIOMS)
def test_idioms(source: str, waits: bool) -> None:
    """An idiom that makes the CPU wait is found, and a lookalike is not."""
    code, given = compile(source, FILE, "exec"), names()
    torch.cuda.synchronize()
    with instrument.detect_syncs() as syncs:
        exec(code, given)
    assert waits == any(found.site is not None and found.site.file == FILE for found in syncs.findings)


@pytest.mark.parametrize(("source", "waits"), copies.ALL, ids=copies.NAMES)
def test_copies(source: str, waits: bool) -> None:
    """A copy is found if and only if the CPU waited in it, according to the log."""
    code, given = compile(source, FILE, "exec"), copies.names()
    torch.cuda.synchronize()
    with simgpu.log() as log, instrument.detect_syncs() as syncs:
        torch.cuda._sleep(2_000_000)
        exec(code, given)
    assert waits == any(entry.kind.startswith("wait") for entry in log)
    assert waits == any(found.site is not None and found.site.file == FILE for found in syncs.findings)


@pytest.mark.parametrize("ms", [5, 50])
@pytest.mark.parametrize("source", ["t.sum().item()", "t.cpu()", "torch.cuda.synchronize()", "t.nonzero()"])
def test_blocked_time(source: str, ms: int) -> None:
    """The time that a line was blocked is at least that of its waits in the GPU's log, and at most the line's."""
    longest_ns = 0
    given, code = names(), compile(source, FILE, "exec")
    exec(code, given)  # once, so that nothing is first
    for _ in range(3):
        with simgpu.log() as log, instrument.detect_syncs() as syncs:
            torch.cuda._sleep(int(ms * 1.98e6))
            began = time.perf_counter_ns()
            exec(code, given)
            took = time.perf_counter_ns() - began
        waits = [entry for entry in log if entry.kind.startswith("wait")]
        longest_ns = max(longest_ns, *(entry.end - entry.start for entry in waits))
        waited = sum(entry.returned - entry.start for entry in waits)
        (found,) = (found for found in syncs.findings if found.site is not None and found.site.file == FILE)
        assert waited <= (found.blocked_ns or 0) <= took
    assert longest_ns > ms * 500_000  # on a busy machine, the GPU may be nearly done when the line begins
