"""Replays of real traces, each diagnosed once: what steps wait for, critical paths, plans and lengths."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from instrument.base.units import duration
from instrument.explain.diagnosis.diagnose import diagnose
from instrument.explain.diagnosis.diagnosis import Diagnosis
from instrument.explain.replay import what_if
from instrument.explain.replay.step_waits import removals
from instrument.read.jobs.read import content_of
from instrument.read.measures.summary import summarize
from instrument.show.sections.diagnosis import overview_section
from instrument.start.cli import app
from tests.diagnosis.test_plan import check, check_wins, step_with
from tests.replay.test_step_waits import CHEAPER_CPU, check_one_path, check_parts, check_path
from tests.support.shared_traces import shared

WITH_STEPS = [
    "deepseek_train_h800.json.gz", "hta_nccl_data.json.gz", "hta_ns_resolution.json.gz",
    "hta_tracediff_control.json.gz", "kineto_tb_resnet50_nw0_v100.json.gz", "pairs/hta_test_v100.json.gz",
    "pairs/resnet50_workers4_a.json.gz", "tl_h100_bert_small.json.gz", "tl_h100_owlv2.json.gz",
    "tl_h100_qwen05b.json.gz", "tl_mi300_bert_small.json.gz", "tl_mi300_resnet_actckpt.json.gz",
    *(f"param_dlrm_8rank_r{rank}.json.gz" for rank in range(8)),
]  # fmt: skip
WITHOUT_STEPS = [
    "critical_path/simple_add_input.json.gz", "hta_alexnet_cudasync.json.gz",
    "hta_event_sync_multistream.json.gz", "hta_gpu_user_annotation.json.gz", "kineto_docs_after_fix.json",
    "labelled/conv_07_transposed.json.gz", "labelled/gemm_01_compute_few_tiles.json.gz",
    "labelled/sdpa_01_long_seq_low_eff.json.gz", "labelled/sdpa_03_short_seq_overhead.json.gz",
    "nsys/mfu_2gpu_after.sqlite", "nsys/mfu_2gpu_before.sqlite", "param_resnet_kineto.json.gz",
    "tl_torch_compile_triton.json.gz", "tl_vllm_decode_full_cudagraph.json.gz",
]  # fmt: skip
NOT_REPLAYED = ["hta_large_integer.json.gz", "nsys/h100_2gpu_1s.sqlite", "tl_rocprofv3_908_results.json.gz"]
REPLAYED = WITH_STEPS + WITHOUT_STEPS


@pytest.fixture(scope="module", params=REPLAYED)
def replayed(request: pytest.FixtureRequest) -> Diagnosis:
    """The diagnosis of a trace, for all tests of it in turn; none changes it."""
    return diagnose(shared(request.param))


def test_steps_and_their_critical_path(replayed: Diagnosis) -> None:
    """The laws hold, and `whatif` and the diagnosis have one length of a step and one critical path."""
    assert replayed.waits is not None
    assert replayed.replayer is not None
    check_parts(replayed.waits, replayed.step_ns)
    guess = replayed.what_if()
    assert guess.before_ns == pytest.approx(replayed.step_ns, abs=1)
    wins, changes = replayed.waits.wins, removals(replayed.replayer)
    assert {*wins} <= {*changes}
    ties = {each for each, ns in wins.items() if ns >= max(wins.values()) - 0.05 * replayed.step_ns}
    assert replayed.bound is None or ("compute" if replayed.bound == "memory" else replayed.bound) in ties
    assert guess.critical_path is not None
    check_path(guess.critical_path, replayed.waits)
    for change in (CHEAPER_CPU, changes["synchronization"]):
        check_one_path(replayed.replayer, change)


def test_plans(replayed: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and predictions agree, and so do the change that a finding names and what it wins in a replay."""
    plan = replayed.plan()
    if plan.rows:
        assert step_with(replayed, plan.words) == plan.rows[-1].step_ns
    # The critical path takes most of a prediction's time; only its length is compared here.
    monkeypatch.setattr(what_if, "critical_path", lambda replayer, change: None)
    check(replayed)
    check_wins(replayed)
    for finding in replayed.findings:
        if finding.change and finding.replayed_ns is not None and finding.win_ns is not None:
            won = replayed.what_if().before_ns - (step_with(replayed, finding.change) or 0)
            assert finding.replayed_ns == min(max(won, 0), finding.win_ns), finding.rule


def test_one_length_without_steps(replayed: Diagnosis) -> None:
    """Without steps, all that names a length of the recording names the same one."""
    name = str(replayed.path)
    assert replayed.has_steps == name.endswith(tuple(WITH_STEPS))
    if not replayed.has_steps:
        check_one_length(replayed)


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_one_length_without_replays(name: str) -> None:
    """The same holds where nothing can be replayed."""
    found = diagnose(shared(name), what_if=False)
    assert not found.has_steps
    assert found.waits is None
    check_one_length(found)


def check_one_length(found: Diagnosis) -> None:
    assert found.facts is not None
    overview = overview_section(found)
    assert overview is not None
    lengths = {
        found.step_ns,
        found.what_if().before_ns,
        summarize(found.facts.trace).step_ns,
        content_of(found.facts.trace).window_ns,
        overview["step_ns"],
        sum(found.parts.values()),
    }
    assert len(lengths) == 1
    said = " ".join(CliRunner().invoke(app, ["summarize", str(found.path)]).stdout.split())
    assert found.verdict in said
    assert f"Where the time went: {duration(found.step_ns)}" in said
    assert found.waits is None or "the loop" not in said  # one sentence says what bounds the step
