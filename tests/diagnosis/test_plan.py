"""The plan: which change comes first, what each wins after those before it, and what the command says of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

import instrument
from instrument.base.findings import Finding
from instrument.explain.diagnosis.diagnose import diagnose
from instrument.explain.diagnosis.diagnosis import Diagnosis
from instrument.explain.replay.requests import Request
from instrument.explain.rules.rule import RULES, Rule
from instrument.explain.rules.trace_facts import TraceFacts
from instrument.show.sections.diagnosis import plan_section
from instrument.start.cli import app
from tests.diagnosis.made_loops import GEMM, MadeLoop
from tests.replay.machine import Machine
from tests.replay.test_step_waits import LOADER, Action, actions, record
from tests.support.shared_traces import shared

MS = 1_000_000
RESNET = "kineto_tb_resnet50_nw0_v100.json.gz"
H100_FLOPS = {"c10::BFloat16": 989.4e12, "float": 67e12}


@pytest.fixture(scope="module")
def resnet() -> Diagnosis:
    """The diagnosis of a trace whose loop waits for its batches; no test changes it."""
    return diagnose(shared(RESNET))


def step_with(found: Diagnosis, words: str) -> int | None:
    """Return the step that `what_if` predicts for the words of a command line."""
    return found.what_if(**asdict(Request.from_words(words))).step_ns


def check_wins(found: Diagnosis) -> None:
    """No finding wins more than its class has on the critical path, unless it says what else it shortens.

    What it wins is what a replay says or, if none shows it, the most that it can win.
    """
    for finding in found.findings:
        of, win_ns = RULES[finding.rule].of, finding.likely_win_ns
        if of is None or win_ns is None or found.waits is None:
            continue
        parts = [found.waits.parts[name] for name in (of, *finding.also)]
        assert win_ns <= sum(parts), finding.rule
        assert of not in finding.also
        if finding.also:
            assert f"; it also shortens {finding.also[0]}" in found.win_text(finding)
            assert win_ns > sum(parts[:-1]), finding.rule


def test_what_a_finding_also_shortens() -> None:
    """Copies that are never waited for win what their launches cost."""
    found = diagnose(shared("hta_nccl_data.json.gz"))
    assert found.waits is not None
    assert found.waits.parts["copies"] == 0
    (copies,) = [each for each in found.findings if each.rule == "device-copies"]
    assert copies.also == ("overhead",)
    assert "in a replay, at most 11.8 ms per step (5.3 %); it also shortens overhead" in found.win_text(copies)
    assert json.loads(found.to_json())["findings"][found.findings.index(copies)]["also"] == ["overhead"]


def check(found: Diagnosis) -> None:
    """Each row is what `what_if` says of its change and those before it, and each wins 1 % of the step."""
    plan, before = found.plan(), found.what_if().before_ns
    if plan.end is None:
        assert plan.abstained
        return
    assert plan.end.step_ns == (plan.rows[-1].step_ns if plan.rows else before)
    assert plan.end.share is None or 0 < plan.end.share <= 1
    if plan.rows:
        assert plan.end.bound == plan.rows[-1].bound
        assert str(plan).endswith(str(plan.end))
    assert len(plan.rows) <= 6
    for number, row in enumerate(plan.rows, 1):
        assert row.before_ns == before
        assert row.before_ns - row.step_ns >= 0.01 * plan.recorded_ns
        assert step_with(found, " ".join(each.change for each in plan.rows[:number])) == row.step_ns
        before = row.step_ns


def loop(workers: bool, work: int, kernel: int) -> Machine:
    """Run four steps that load a batch, launch ten kernels, and do other work."""
    machine = Machine()
    for _ in range(4):
        with machine.step():
            if not workers:
                with machine.region(LOADER):
                    machine.work(20 * MS)
            for _ in range(10):
                machine.work(work)
                machine.launch(kernel)
    return machine


def mean(machine: Machine) -> float:
    return sum(machine.lengths) / len(machine.lengths)


def test_the_second_fix() -> None:
    """After the loader, a cheaper CPU wins what the program then wins when it runs so."""
    found = diagnose(loop(workers=False, work=MS, kernel=MS // 2).trace())
    first, second = found.plan().rows
    assert first.change.startswith("--workers ")
    assert second.change == "--launch 0.1x"
    assert first.step_ns == pytest.approx(mean(loop(workers=True, work=MS, kernel=MS // 2)), rel=0.01)
    assert second.step_ns == pytest.approx(mean(loop(workers=True, work=MS // 10, kernel=MS // 2)), rel=0.05)
    assert first.bound == "overhead"


@settings(max_examples=15, deadline=None)
@given(actions)
def test_a_plan_of_any_program(program: list[Action]) -> None:
    """Rows and predictions agree, with steps and without."""
    for marked in (True, False):
        found = diagnose(record(program, marked=marked).trace())
        check(found)
        check_wins(found)


def test_output(resnet: Diagnosis) -> None:
    """Terminal, Markdown and JSON have the plan, with a command that predicts the same."""
    path, found = shared(RESNET), resnet
    assert "1. with 8 workers: 178 ms -> 118 ms; then bound by compute (--workers 8)" in str(found)
    assert f"instrument whatif {shlex.quote(str(path))} --workers 8 --launch 0.1x" in " ".join(str(found).split())
    assert "1. with 8 workers: 178 ms -\\> 118 ms" in found.to_markdown()
    plan = json.loads(found.to_json())["plan"]
    said = CliRunner().invoke(app, ["whatif", str(path), *shlex.split(plan["whatif"]), "--json"])
    assert json.loads(said.stdout)["step_ns"] == plan["rows"][-1]["step_ns"]


def test_the_end_of_a_plan(resnet: Diagnosis) -> None:
    """A plan ends with the bound after it, and how far the step is from the roofline where kernels are known."""
    path = shared("tl_h100_qwen05b.json.gz")
    found = diagnose(path)
    end = found.plan().end
    assert end is not None
    assert (end.bound, end.gpu, round(end.share or 0, 2)) == ("memory", "H100 SXM", 0.55)
    said = "After that, memory bounds it: 26.9 ms is 55.2 % of the roofline of H100 SXM, at which its kernels take"
    assert said in " ".join(str(found).split())
    assert said in found.to_markdown()
    assert json.loads(found.to_json())["plan"]["end"]["text"] == str(end)
    section = plan_section(found)
    assert section is not None
    assert section["notes"][0] == str(end)
    few = resnet.plan().end  # of which few kernels have shapes
    assert few is not None
    assert (few.roofline_ns, str(few)) == (None, "After that, compute bounds it.")


@pytest.mark.parametrize(("kernel", "type_"), [(GEMM, "c10::BFloat16"), ("ampere_sgemm_128x128_tn", "float")])
def test_the_roofline_of_a_matmul(kernel: str, type_: str) -> None:
    """A matmul at half of its peak stays so in another type, whose peak is higher."""
    side = 8192
    flops = H100_FLOPS[type_]
    took = 2 * 2 * side**3 / flops * 1e6
    loop = MadeLoop(steps=0, busy=False)
    loop.operator("aten::mm", 0, 10, [[side, side]] * 2, [type_] * 2).work(kernel, 1, 10, 10 + took)
    end = diagnose(loop.trace()).plan().end
    assert end is not None
    assert end.share == pytest.approx(0.5, rel=0.05)
    assert end.roofline_ns == pytest.approx(1e9 * 2 * side**3 / H100_FLOPS["c10::BFloat16"], rel=0.05)


def test_no_plan(tmp_path: Path) -> None:
    """A trace that cannot be replayed has no plan, and says why."""
    found = diagnose(shared("hta_mtia_rank0.json.gz"))
    assert str(found.plan()).startswith("No plan: the launches of 22,361 of 25,814 kernels")
    assert "Plan:" not in str(found)


def test_what_is_hidden(resnet: Diagnosis) -> None:
    """FP32 kernels of a loop that waits for its batches are hidden; once it does not, they show."""
    before, after = resnet, diagnose(shared("pairs/resnet50_workers4_a.json.gz"))
    (hidden,) = before.hidden
    assert (hidden.rule, hidden.change) == ("fp32-matmuls", "--fix fp32-matmuls")
    assert hidden.hidden_ns is not None and hidden.win_ns is not None
    assert hidden.hidden_ns > 50 * MS > hidden.win_ns
    assert "Hidden behind overhead, with little to win until that is fixed:" in str(before)
    change = instrument.compare(before, after)
    assert [each.rule for each in change.became_visible] == ["fp32-matmuls"]
    assert "fp32-matmuls" not in {each.rule for each in change.new}
    back = instrument.compare(after, before)
    assert [each.rule for each in back.became_hidden] == ["fp32-matmuls"]
    assert "fp32-matmuls" not in {each.rule for each in back.gone}


def test_more_workers() -> None:
    """Workers load no batch in less than its time divided by their number."""
    found = diagnose(loop(workers=False, work=MS // 10, kernel=MS // 10).trace())
    steps = {number: found.what_if(workers=number).step_ns for number in (1, 2, 4, 64)}
    assert steps[1] == pytest.approx(20 * MS, rel=0.01)
    assert steps[2] == pytest.approx(10 * MS, rel=0.01)
    assert steps[4] == pytest.approx(5 * MS, rel=0.01)
    assert steps[64] == found.what_if(without="dataloader").step_ns


@pytest.mark.usefixtures("lenient")
def test_a_rule_that_the_plan_cannot_apply(resnet: Diagnosis) -> None:
    """The plan leaves out a finding that needs changed thresholds, or whose rule fails afterwards."""
    path = shared(RESNET)
    (copies,) = [each for each in resnet.findings if each.rule == "exposed-copies"]
    share = (copies.win_ns or 0) / resnet.step_ns
    assert "--fix exposed-copies" in resnet.plan().words
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "exposed-copies", replace(RULES["exposed-copies"], share=2 * share))
        found = diagnose(path, thresholds={"exposed-copies": {"share": share / 2}})
        assert "exposed-copies" in {each.rule for each in found.findings}
        assert "exposed-copies" not in found.plan().words
        with pytest.raises(ValueError, match="the rule 'exposed-copies' finds nothing that a replay can remove"):
            found.what_if(fix="exposed-copies")

    def failing(facts: TraceFacts) -> Iterator[Finding]:
        yield facts.finding("Kernels take time", win_ns=facts.gpu_win(facts.kernel_rows))
        raise RuntimeError("injected")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "failing", Rule("failing", failing))
        found = diagnose(path)
        assert ("failing", "--fix failing") in {(each.rule, each.change) for each in found.findings}
        assert "failing" not in found.plan().words
        with pytest.raises(ValueError, match="the rule 'failing' failed: RuntimeError"):
            found.what_if(fix="failing")


def test_a_step_that_the_workers_determine() -> None:
    """Where workers load for longer than the rest of a step takes, the loop waits for them; the path says so."""
    machine = Machine()
    for _ in range(6):
        with machine.step():
            with machine.region(LOADER):
                machine.work(80_000_000)
            machine.work(100_000)
            machine.launch(1_000_000)
    found = diagnose(machine.trace())
    first = found.plan().rows[0]
    assert (first.change, first.step_ns, first.bound) == ("--workers 8", 10_000_000, "input")
    path = found.what_if(workers=8).critical_path
    assert path is not None
    assert path.total_ns == pytest.approx(6 * 10_000_000, rel=1e-6)
    assert path.by_class()["input"] > 0.8 * path.total_ns


def test_loaders_with_and_without_workers() -> None:
    """The DataLoader for which the loop waits longer decides what more workers mean."""
    machine = Machine()
    for step in range(6):
        with machine.step():
            with machine.region(LOADER):
                machine.work(20_000_000)
            if step == 3:  # a batch of the validation
                with machine.region(LOADER.replace("SingleProcess", "MultiProcessing")):
                    machine.work(100_000)
            machine.launch(1_000_000)
    found = diagnose(machine.trace())
    (waits,) = [each for each in found.findings if each.rule == "input-wait"]
    assert waits.change == "--workers 8"
    assert found.plan().rows[0].change == "--workers 8"
    said = "\"workers\" must be a number such as 4, as the DataLoader has no workers: '2x'"
    with pytest.raises(ValueError, match=said):
        found.what_if(workers="2x")


@pytest.mark.parametrize("name", ["gc.collect", "checkpoint", "train/evaluation"])
def test_what_no_graph_makes_cheaper(name: str) -> None:
    """Cheaper launches leave the time in which Python collects garbage, and in which no training runs."""
    machine = Machine()
    for _ in range(6):
        with machine.step():
            with machine.region(name):
                machine.work(20_000_000)
            machine.work(10_000_000)
            machine.launch(1_000_000)
    assert diagnose(machine.trace()).what_if(launch=0.1).step_ns == pytest.approx(21_000_000, rel=0.01)


def test_an_optimizer_that_is_fused() -> None:
    """Nothing is won by fusing it again."""
    machine = Machine()
    for _ in range(3):
        with machine.step(), machine.region("Optimizer.step#AdamW.step"):
            machine.launch(1_000_000, name="multi_tensor_apply_kernel")
    with pytest.raises(ValueError, match="it is fused already"):
        diagnose(machine.trace()).what_if(fuse="optimizer")
