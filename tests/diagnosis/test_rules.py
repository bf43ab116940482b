"""Every rule fires on a loop that shows what it finds, and on no healthy one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from instrument.explain.diagnosis.diagnose import diagnose
from instrument.explain.rules.rule import RULES
from instrument.read.tables.trace import Device

from .made_loops import GEMM, MadeLoop
from .shown import SHOWN, compiled, each_step, named
from .test_snapshot_findings import EVENTS

IDLE = ("input", "synchronization", "overhead", "latency", "other")
LOSSY = {"lost-kernels", "lost-graph-kernels", "no-gpu-work"}
"""Rules whose loops lose so much that the parts of their steps are not known: test_lost_work.py."""

LOGGED = {"compile-time", "generated-kernels", "damaged-trace", "selected-steps"}
"""Rules that need a log of torch.compile or a file: test_compile_log.py, test_diagnose.py, test_slim.py."""


def test_a_healthy_loop_has_no_findings() -> None:
    """A loop whose CPU and GPU are busy has no findings, and nothing in it bounds it alone."""
    diagnosis = diagnose(MadeLoop().trace())
    assert (diagnosis.findings, diagnosis.failed, diagnosis.bound) == ((), {}, None)
    assert diagnosis.verdict.endswith(
        "several things take about equally long: no class of work wins anything alone."
    )


def test_every_rule_is_tested() -> None:
    """Each built-in rule has a loop that shows it; those that need more than a trace are tested apart."""
    apart = {
        "stretched-window",
        "late-rank",
        "uneven-compute",
        "pipeline-bubble",
        "missing-ranks",
        *LOGGED,
        "restarted-workers",
        "recurring-slow-steps",
        *EVENTS,
    }
    assert {*SHOWN, *apart} == {*RULES}


@pytest.mark.parametrize("rule", SHOWN)
def test_rule_fires(rule: str) -> None:
    """The rule finds what the loop shows, with evidence and no more to win than the step."""
    trace = SHOWN[rule]().trace()
    diagnosis = diagnose(trace)
    found = named(diagnosis)
    assert rule in found, list(found)
    finding = found[rule]
    assert finding.title
    assert finding.evidence
    assert all(
        each.definition and each.unit in ("ns", "1", "%", "bytes", "bytes/s", "MHz", "W", "C", "events", "")
        for each in finding.evidence
    )
    assert len({each.name for each in finding.evidence}) == len(finding.evidence)
    assert finding.win_ns is None or 0 <= finding.win_ns <= diagnosis.step_ns
    assert rule not in named(diagnose(trace, ignore=[rule]))


@pytest.mark.parametrize("rule", [rule for rule in SHOWN if rule not in LOSSY])
def test_parts_add_up(rule: str) -> None:
    """The parts of the step add up to it, and the idle parts to the idle time by cause."""
    diagnosis = diagnose(SHOWN[rule]().trace())
    idle = sum(diagnosis.parts[name] for name in IDLE)
    assert sum(diagnosis.parts.values()) == pytest.approx(diagnosis.step_ns, abs=10)
    assert sum(diagnosis.idle_by_cause.values()) == pytest.approx(idle, abs=10)


@pytest.mark.parametrize(
    ("rule", "win_us"),
    [
        ("input-wait", 400),
        ("long-synchronization", 200),
        ("garbage-collection", 300),
        ("exposed-communication", 399),
        ("few-tiles", 998 * (1 - 8 / 132)),
        ("elementwise-chains", 400),
    ],
)
def test_time_to_win(rule: str, win_us: float) -> None:
    """Where the time to win can be said exactly, it is exact."""
    win_ns = named(diagnose(SHOWN[rule]().trace()))[rule].win_ns
    assert win_ns is not None
    assert win_ns / 1000 == pytest.approx(win_us, rel=0.01)


def test_phases_of_a_compilation() -> None:
    """The finding on compilation names the longest phases."""
    loop = SHOWN["compilation"]().region("inductor_codegen (dynamo_timed)", 10, 200)
    values = {each.name: each.value for each in named(diagnose(loop.trace()))["compilation"].evidence}
    assert values["phases"] == "_compile.compile_inner 900 us, inductor_codegen 190 us"


def test_bandwidth_of_a_collective() -> None:
    """Exposed communication says how fast the longest collective is."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work(GEMM, start, start + 1, start + 500)
        columns = {
            "elements_in": 1_000_000,
            "elements_out": 1_000_000,
            "dtype": "Float",
            "collective": "allreduce",
        }
        loop.work("ncclDevKernel_AllReduce_Sum_f32", start + 2, start + 500, start + 900, stream=20, **columns)
    found = named(diagnose(loop.trace()))["exposed-communication"]
    values = {each.name: each.value for each in found.evidence}
    assert values["bandwidth"] == pytest.approx(4_000_000 / 400e-6)


def test_functions_compiled_side_by_side() -> None:
    """Several compiled functions are no graph breaks."""
    assert "graph-breaks" not in named(diagnose(compiled("0/0", "1/0", "2/0").trace()))


def test_a_graph_break_of_the_installed_torch(tmp_path: Path) -> None:
    """The ranges of a function with two breaks, as the installed torch records them, are a finding."""

    @torch.compile(backend="eager")
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        x = x * 2
        torch._dynamo.graph_break()
        return x + 3

    x = torch.ones(4)
    broken(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        broken(x)
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    torch.compiler.reset()
    found = named(diagnose(tmp_path / "trace.json"))["graph-breaks"]
    assert found.title == "Graphs of torch.compile break 2 times in the window"


def test_gpu_time_wins_nothing_if_the_cpu_sets_the_pace() -> None:
    """A loop that only launches is not faster with faster kernels."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work("ampere_sgemm_128x128_tn", start, start + 1, start + 300)
    assert "fp32-matmuls" not in named(diagnose(loop.trace()))


def test_an_unknown_gpu_does_not_fail() -> None:
    """Without known peaks no rule fails."""
    for made in SHOWN.values():
        assert diagnose(made().trace(Device(0, name="Some GPU"))).failed == {}


def test_no_evidence_no_finding() -> None:
    """A trace of a CPU alone, an empty trace and one without steps have no findings of a GPU."""
    cpu = MadeLoop(busy=False)
    for start in each_step():
        cpu.operator("aten::mm", start, start + 990)
    empty = MadeLoop(steps=0, busy=False)
    for loop, bound in ((cpu, "compute"), (empty, None)):
        diagnosis = diagnose(loop.trace())
        assert (diagnosis.findings, diagnosis.bound, diagnosis.failed) == ((), bound, {})
    assert diagnosis.coverage == "the trace has no GPU work"
