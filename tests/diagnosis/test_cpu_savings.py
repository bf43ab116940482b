"""Time that the CPU saves wins no more than later launches, which end gaps of the GPU, come sooner."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instrument.explain.diagnosis.diagnose import diagnose
from instrument.explain.rules.trace_facts import TraceFacts
from instrument.read.tables.trace import Trace
from tests.support.shared_traces import shared

from .made_loops import GEMM, MadeLoop
from .shown import each_step, named

Program = list[tuple[str, int, bool]]
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(["cpu", "launch", "sync"]), st.integers(1, 60), st.booleans()),
    min_size=1,
    max_size=14,
)


def run(program: Program, *, without: bool, loop: MadeLoop | None = None) -> int:
    """Run a program on a CPU and a GPU of one stream; return when both are done, in us.

    Args:
        program: "cpu" (work that takes so long, and that may be saved), "launch" (of work that takes so long) and
            "sync".
        without: whether the work that may be saved takes no time.
        loop: records the run.
    """
    cpu = gpu = 0
    for kind, took, saved in program:
        before = cpu
        if kind == "cpu":
            cpu += 0 if saved and without else took
            if loop and saved:
                loop.operator("aten::saved", before, cpu)
        elif kind == "launch":
            start = max(cpu, gpu)
            gpu = start + took
            if loop:
                loop.work("k", cpu, start, gpu, took=0)
        else:
            cpu = max(cpu, gpu)
            if loop:
                loop.call("cudaDeviceSynchronize", before, cpu)
    return max(cpu, gpu)


@given(PROGRAMS)
@settings(deadline=None, max_examples=25)
def test_bound_holds(program: Program) -> None:
    """No program wins more than the bound, and the bound is no more than the time saved."""
    loop = MadeLoop(steps=1, busy=False)
    recorded = run(program, without=False, loop=loop)
    loop.rows["regions"][0]["duration_ns"] = 1000 * recorded
    facts = TraceFacts(loop.trace())
    if not facts.gpu:
        return
    events = facts.trace.operators
    won = 1000 * (recorded - run(program, without=True))
    assert won <= facts.cpu_win(events) <= int(events.duration_ns.sum())
    if not any(kind == "sync" for kind, _, _ in program):
        assert won == facts.cpu_win(events)


def hidden_optimizer() -> MadeLoop:
    """Return a loop that is slow to launch, and then hides its optimizer behind a long kernel and waits for it."""
    loop = MadeLoop(busy=False)
    for number, start in enumerate(range(0, 300_000, 100_000)):
        loop.rows["regions"][number] |= {"start_ns": 1000 * start, "duration_ns": 100_000_000}
        for at in range(start, start + 30_000, 300):
            loop.work("k", at, at + 5, at + 10)
        loop.work("long", start + 30_000, start + 30_010, start + 90_010)
        loop.region("Optimizer.step#SGD.step", start + 31_000, start + 56_000)
        for place in range(200):
            loop.work("add", start + 31_000 + 120 * place, start + 90_010 + 5 * place, start + 90_015 + 5 * place)
        loop.operator("aten::item", start + 57_000, start + 91_020)
        loop.call("cudaDeviceSynchronize", start + 57_001, start + 91_015)
    return loop


def test_cpu_time_behind_a_long_kernel() -> None:
    """An optimizer that the GPU does not wait for wins no CPU time."""
    found = named(diagnose(hidden_optimizer().trace())).get("for-loop-optimizer")
    assert found is None or (found.win_ns or 0) <= 1_010_000


@pytest.mark.parametrize(("rule", "most_us"), [("occupancy-queries", 100), ("memsets", 260)])
def test_queries_of_a_real_cpu_that_runs_ahead(rule: str, most_us: float) -> None:
    """A step of Qwen's makes calls of 556 us and 658 us; the GPU waits for 37 us and 49 us of them."""
    found = named(diagnose(shared("tl_h100_qwen05b.json.gz"))).get(rule)
    assert found is None or (found.win_ns or 0) <= 1000 * most_us


def on_two_processes(made: MadeLoop) -> Trace:
    """Return a trace whose second thread is one of another process."""
    trace = made.trace()
    return replace(trace, threads=[trace.threads[0], replace(trace.threads[1], process=2)])


def test_processes_do_not_win_together() -> None:
    """The CPU time of two processes is that of the one that spends more."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        for thread in (0, 1):
            for at in range(start, start + 990, 20):
                loop.operator("aten::copy_", at, at + 8 - thread, thread=thread)
                loop.work("Memcpy DtoD (Device -> Device)", at + 1, at + 9, at + 10, device=thread)
                loop.rows["runtime"][-1]["thread"] = thread
    found = named(diagnose(on_two_processes(loop)))["device-copies"]
    values = {each.name: each.value for each in found.evidence}
    assert values["cpu_ns"] == 50 * 8_000
    assert found.win_ns is not None
    assert found.win_ns <= 50 * 9_000
    assert "Of several processes" in next(each.definition for each in found.evidence if each.name == "cpu_ns")


def test_two_real_processes() -> None:
    """Two processes copy for 8.2 and 7.8 ms: neither can win more than it spends, and the time of the copies."""
    found = named(diagnose(shared("nsys/mfu_2gpu_after.sqlite")))
    for rule, cpu, most_ms in (("device-copies", "cpu_ns", 8.3), ("memsets", "launch_ns", 6.8)):
        values = {each.name: each.value for each in found[rule].evidence}
        cpu_ns, gpu_ns = values[cpu], values["gpu_ns"]
        assert isinstance(cpu_ns, int)
        assert isinstance(gpu_ns, int)
        assert cpu_ns <= most_ms * 1e6
        assert (found[rule].win_ns or 0) <= cpu_ns + 2 * gpu_ns


def test_an_optimizer_before_the_next_batch() -> None:
    """If the optimizer ends sooner, so does loading the next batch, for which the GPU idles."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.region("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start, start + 400)
        loop.work(GEMM, start + 400, start + 401, start + 900)
        loop.operator("aten::saved", start + 500, start + 700)
    facts = TraceFacts(loop.trace())
    assert facts.cpu_win(facts.trace.operators) == pytest.approx(200_000, abs=34_000)


def test_nested_ranges_of_an_optimizer() -> None:
    """Ranges of optimizers inside one another take their time once."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        for margin in (0, 5, 10):
            loop.region("Optimizer.step#SGD.step", start + margin, start + 999 - margin)
        for at in range(start + 20, start + 980, 8):
            loop.work("void at::native::add_kernel<float>", at, at + 1, at + 4)
    found = named(diagnose(loop.trace()))["for-loop-optimizer"]
    values = {each.name: each.value for each in found.evidence}
    assert values["cpu_ns"] == 999_000


def test_idle_time_that_comes_before() -> None:
    """CPU time after the last gap of the GPU wins nothing; the time before one wins no more than that gap."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.operator("aten::saved", start, start + 300).work(GEMM, start + 301, start + 301, start + 999)
        loop.operator("aten::saved", start + 310, start + 900)
    facts = TraceFacts(loop.trace())
    early = facts.trace.operators.where(facts.trace.operators.duration_ns == 300_000)
    assert facts.cpu_win(early) == 300_000
    assert facts.cpu_win(facts.trace.operators) <= 303_000
