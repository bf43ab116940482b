"""Comparisons of real traces."""

from __future__ import annotations

import pytest

import instrument
from tests.support.shared_traces import shared


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("kineto_tb_resnet50_nw0_v100.json.gz", "pairs/resnet50_workers4_a.json.gz"),
        ("nsys/mfu_2gpu_before.sqlite", "nsys/mfu_2gpu_after.sqlite"),
    ],
)
def test_parts_of_real_pairs(before: str, after: str) -> None:
    """The parts add up, and almost everything is assigned."""
    change = instrument.compare(shared(before), shared(after))
    assert sum(part.ns for part in change.parts) == change.delta_ns
    assert abs(change.by_kind().get("unassigned", 0)) <= 0.05 * abs(change.delta_ns)


def test_a_loader_with_workers() -> None:
    """Worker processes make the loop faster, because it no longer waits for batches."""
    change = instrument.compare(
        shared("kineto_tb_resnet50_nw0_v100.json.gz"), shared("pairs/resnet50_workers4_a.json.gz")
    )
    assert change.verdict == "faster"
    assert next(iter(change.by_kind())) == "input"
    assert "input-wait" in {each.rule for each in change.gone}
    back = instrument.compare(change.after, change.before)
    assert (back.verdict, back.delta_ns) == ("slower", -change.delta_ns)


def test_windows_without_steps() -> None:
    """Traces without steps have parts, but no verdict."""
    change = instrument.compare(shared("nsys/mfu_2gpu_before.sqlite"), shared("nsys/mfu_2gpu_after.sqlite"))
    assert (change.verdict, change.p_value, change.steps) == ("no change seen", None, (1, 1))
    assert change.reasons == ("the traces have no steps",)


def test_different_devices() -> None:
    """Traces of different GPUs and jobs are not compared."""
    change = instrument.compare(shared("hta_tracediff_control.json.gz"), shared("pairs/hta_test_v100.json.gz"))
    assert change.verdict == "not comparable"
    assert change.reasons[0] == "the devices differ: NVIDIA A100-PG509-200 and Tesla V100-SXM2-16GB"
    assert change.reasons[1] == "the numbers of ranks differ: 8 and 2"
    assert sum(part.ns for part in change.parts) == change.delta_ns
