"""What `diagnose` finds in real traces of which the cause is known."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from instrument.explain.diagnosis.diagnose import Diagnosis, diagnose
from instrument.read.jobs.read import read_file
from tests.support.shared_traces import shared

from .shown import named

REAL = {
    "tl_h100_owlv2.json.gz": ["input-wait", "unfused-attention", "old-kernels"],
    "tl_h100_bert_small.json.gz": ["launch-overhead"],
    "hta_nccl_data.json.gz": ["device-copies"],
    "hta_ns_resolution.json.gz": ["device-copies"],
    "kineto_tb_resnet50_nw0_v100.json.gz": ["input-wait"],
    "labelled/gemm_01_compute_few_tiles.json.gz": ["few-tiles"],
    "labelled/gemm_03_compute_misaligned.json.gz": ["misaligned-matmuls"],
    "labelled/sdpa_01_long_seq_low_eff.json.gz": ["slow-attention"],
    "labelled/sdpa_03_short_seq_overhead.json.gz": ["short-attention"],
}


@functools.cache
def of_real(name: str) -> Diagnosis:
    return diagnose(shared(name))


@pytest.mark.parametrize("name", REAL)
def test_first_findings_of_real_traces(name: str) -> None:
    """What is known of a real trace is among its first three findings."""
    assert {*REAL[name]} <= {found.rule for found in of_real(name).findings[:3]}


def test_the_time_to_win_of_a_real_fix() -> None:
    """More worker processes won 50 ms of a ResNet's step; the trace before said at most 59 ms."""
    before, after = "kineto_tb_resnet50_nw0_v100.json.gz", "pairs/resnet50_workers4_a.json.gz"
    medians = [float(np.median(read_file(shared(name)).steps.duration_ns[1:])) for name in (before, after)]
    won_ns = medians[0] - medians[1]
    said_ns = named(of_real(before))["input-wait"].win_ns
    assert said_ns is not None
    assert won_ns <= said_ns <= 1.25 * won_ns


def test_overlapped_communication_is_no_finding() -> None:
    """DeepSeek's training step overlaps its communication."""
    rules = {found.rule for found in of_real("deepseek_train_h800.json.gz").findings}
    assert not rules & {"exposed-communication", "small-collectives", "single-stream"}


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("tl_h100_owlv2.json.gz", "input"),
        ("tl_h100_bert_small.json.gz", "overhead"),
        ("tl_mi300_resnet_actckpt.json.gz", "communication"),
        ("deepseek_train_h800.json.gz", None),
    ],
)
def test_verdicts_of_real_traces(name: str, bound: str | None) -> None:
    """The verdict is what is known of these traces."""
    assert of_real(name).bound == bound
