"""Findings on the shapes of matmuls: what they say of their evidence, and what they advise."""

from __future__ import annotations

import pytest

from instrument.base.findings import Finding
from instrument.explain.diagnosis.diagnose import diagnose
from tests.support.shared_traces import shared

from .made_loops import GEMM, MadeLoop
from .shown import BF16, each_step, matmul, named


def values(found: Finding) -> dict[str, object]:
    return {each.name: each.value for each in found.evidence}


def test_other_shapes_with_few_tiles() -> None:
    """The finding names the shape that wins most, and gives the time of all shapes whose win it adds up."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        for at, n, blocks, took in ((0, 512, 120, 500), (20, 1024, 8, 300)):
            loop.operator("aten::mm", start + at, start + at + 10, [[256, 4096], [4096, n]], [BF16, BF16])
            begin = start + 30 + 2 * at * 25
            loop.work(GEMM, start + at + 1, begin, begin + took - 40, blocks=blocks)
    found = named(diagnose(loop.trace()))["few-tiles"]
    assert (
        found.title
        == "A matmul of 256 x 1024 x 4096 has 8 tiles for 132 multiprocessors, and 1 other shape as well"
    )
    evidence = values(found)
    assert (evidence["gpu_ns"], evidence["all_ns"]) == (260_000, 720_000)
    assert found.win_ns is not None
    assert found.win_ns <= 720_000


def test_the_win_of_a_real_trace_follows_from_its_evidence() -> None:
    """What few tiles can win is less than the stated time of all such matmuls."""
    found = named(diagnose(shared("hta_tracediff_control.json.gz")))["few-tiles"]
    all_ns = values(found)["all_ns"]
    assert isinstance(all_ns, int)
    assert (found.win_ns or 0) <= all_ns
    assert "other shapes as well" in found.title


def test_a_long_k_is_split() -> None:
    """A matmul with a long k is split, one with a short k is batched."""
    for k, word in ((131072, "unflatten"), (512, "stack")):
        fix = named(diagnose(matmul(256, 512, k, blocks=8).trace()))["few-tiles"].fix
        assert fix is not None
        assert word in fix.after
    fix = named(diagnose(shared("labelled/gemm_01_compute_few_tiles.json.gz")))["few-tiles"].fix
    assert fix is not None
    assert "Split the long k" in fix.text


@pytest.mark.parametrize(
    ("kind", "name", "multiple", "padded"),
    [(BF16, GEMM, 8, 5192), ("float", "sm90_xmma_gemm_tf32_128x128", 4, 5188)],
)
def test_the_fix_of_a_misaligned_matmul(kind: str, name: str, multiple: int, padded: int) -> None:
    """Title and fix name the same number of elements, that of 16 bytes in this type."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.operator("aten::mm", start, start + 10, [[4097, 4097], [4097, 4097]], [kind, kind])
        loop.work(name, start + 1, start + 2, start + 1000, blocks=1320)
    found = named(diagnose(loop.trace()))["misaligned-matmuls"]
    assert f"not aligned to {multiple} elements" in found.title
    assert found.fix is not None
    assert f"multiples of {multiple} elements (16 bytes)" in found.fix.text
    assert f"tokens = {padded}" in found.fix.after
