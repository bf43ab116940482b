"""Sends and receives between ranks: which belong together, and how long each rank waits in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from instrument.explain.metrics.job import Job, job_of
from instrument.explain.slimming.slim import slim
from tests.support.stages import two_stages


def job(folder: Path) -> Job:
    return job_of(folder, "auto")


@pytest.mark.parametrize("clock", [0, 5000, 70])
def test_waits_and_transfers_of_both_ends(tmp_path: Path, clock: int) -> None:
    """A rank waits until the other end is ready, and then for the transfer, whatever the clocks say."""
    totals = job(two_stages(tmp_path, clock)).exchange.totals
    assert {0: (4, 2 * 380_000, 2 * 40_000), 1: (4, 2 * 90_000, 2 * 40_000)} == totals


def test_a_transfer_that_compute_hides(tmp_path: Path) -> None:
    """Nobody waits in a transfer while kernels compute."""
    path = two_stages(tmp_path) / "rank0.json"
    content = json.loads(path.read_text())
    for event in content["traceEvents"]:
        if event["name"] == "gemm" and event["dur"] == 420:
            event["ts"], event["dur"] = event["ts"] - 410, 830  # from 120 us on, over the whole receive
    path.write_text(json.dumps(content))
    assert (4, 0, 2 * 20_000) == job(tmp_path).exchange.totals[0]


def test_steps_with_different_numbers_of_calls(tmp_path: Path) -> None:
    """Only the calls of the steps in which as many were sent as received belong together."""
    path = two_stages(tmp_path) / "rank1.json"
    content = json.loads(path.read_text())
    gone = ("c10d::recv_", "record_param_comms", "ncclDevKernel_SendRecv(args)")
    kept = [each for each in content["traceEvents"] if each["ts"] < 6000 or each["name"] not in gone]
    path.write_text(json.dumps(content | {"traceEvents": kept}))
    assert {0: 2, 1: 2} == {rank: each.calls for rank, each in job(tmp_path).exchange.totals.items()}


def test_slim_traces(tmp_path: Path) -> None:
    """Slim traces of the ranks have the same pairs and the same waits."""
    folder = two_stages(tmp_path)
    slimmed = tmp_path / "slim"
    slimmed.mkdir()
    for rank in range(2):
        slim(folder / f"rank{rank}.json", slimmed / f"rank{rank}.json.gz")
    assert job(slimmed).exchange.totals == job(folder).exchange.totals != {}


def test_why_nothing_is_known(tmp_path: Path) -> None:
    """Without the other rank, and without the names of ranks in the trace, nothing belongs together."""
    folder = two_stages(tmp_path, shapes=False)
    assert "record with record_shapes=True" in job(folder).exchange.unknown
    two_stages(tmp_path)
    path = folder / "rank1.json"
    path.write_text(path.read_text().replace("user_annotation", "none"))
    assert "rank 1: no steps are marked" in job(folder).exchange.unknown
    path.unlink()
    assert job(folder).exchange.unknown == "no sends and receives are recorded of rank 1"
