"""Which copies between CPU and GPU a dry run takes for synchronizations, and why."""

from __future__ import annotations

from typing import Any

import pytest

import instrument
from tests.support import copies

FILE = "/nowhere/copies.py"


def found(source: str, setup: str = "") -> list[Any]:
    code = compile(source, FILE, "exec")

    def step() -> None:
        given = copies.names()
        exec(setup, given)
        exec(code, given)

    return [each for each in instrument.dry_run(step).findings if each.site and each.site.file == FILE]


@pytest.mark.parametrize(("source", "waits"), copies.ALL, ids=copies.NAMES)
def test_copies(source: str, waits: bool) -> None:
    """A copy synchronizes as on the simulated GPU."""
    assert waits == bool(found(source))


def test_the_fix_of_a_copy_with_gaps() -> None:
    """Pinned memory with gaps is not to be pinned, but to be made contiguous, also if the copy blocks."""
    for source in ('p[::2].to("cuda", non_blocking=True)', 'p[::2].to("cuda")'):
        (gaps,) = found(source)
        assert "gathers" in gaps.cause
        assert gaps.fix.after == 'x = rows[:, ::2].contiguous().pin_memory().to("cuda", non_blocking=True)'


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_tensors(kind: str) -> None:
    """Their copies wait as well, and do not end the run."""
    (copy,) = found(f'torch.eye(3).{kind}().to("cuda")')
    assert copy.op == "to"
