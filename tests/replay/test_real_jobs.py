"""Replays of real traces without a change, and a prediction whose outcome was recorded."""

from __future__ import annotations

import numpy as np
import pytest

from instrument.explain.diagnosis.diagnose import diagnose
from instrument.explain.replay.critical_path import critical_path
from instrument.explain.replay.replay import Replayer, lower_median
from instrument.read.jobs.read import read_trace
from tests.support.shared_traces import shared

JOBS = {  # the error of a step, at most
    "deepseek_train_h800": 0.005,
    "hta_nccl_data": 0.001,
    "hta_ns_resolution": 0.003,
    "hta_tracediff_control": 0.008,
    "kineto_tb_resnet50_nw0_v100": 0.001,
    "pairs/hta_test_v100": 0.008,
    "pairs/resnet50_workers4_a": 0.003,
    "param_dlrm_8rank_r0": 0.003,
    "tl_h100_bert_small": 0.001,
    "tl_h100_owlv2": 0.005,
    "tl_h100_qwen05b": 0.008,
    "tl_mi300_bert_small": 0.002,
    "tl_mi300_resnet_actckpt": 0.002,
}


@pytest.mark.parametrize("job", JOBS)
def test_error_without_a_change(job: str) -> None:
    """The median error of the steps of each real job is below 1 %."""
    replayer = Replayer(read_trace(shared(f"{job}.json.gz")))
    assert replayer.abstained is None
    assert np.median(replayer.errors) <= JOBS[job]
    path = critical_path(replayer)
    assert sum(part.duration_ns for part in path.segments) == path.total_ns
    assert min(part.duration_ns for part in path.segments) > 0
    on_path = [part.row for part in path.segments if part.row >= 0]
    assert not path.slack_ns[on_path].any()


def test_unknown_launches() -> None:
    """A trace without the launches of most of its work is not replayed."""
    replayer = Replayer(read_trace(shared("hta_mtia_rank0.json.gz")))
    assert (
        replayer.abstained == "the launches of 22,361 of 25,814 kernels, memcpys and memsets are not in the trace"
    )


def test_loader_with_workers() -> None:
    """Without the DataLoader, a loop is predicted to be as long as it was with four worker processes."""
    before = shared("kineto_tb_resnet50_nw0_v100.json.gz")
    after = Replayer(read_trace(shared("pairs/resnet50_workers4_a.json.gz")))
    guess = diagnose(before).what_if(without=["dataloader"])
    measured = lower_median(after.recorded_ns)  # two of its six steps still wait for a worker
    assert guess.step_ns is not None
    assert abs(guess.step_ns / measured - 1) < 0.08
