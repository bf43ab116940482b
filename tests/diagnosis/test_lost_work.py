"""What rests on times of the GPU abstains where many launches have no work, or work at impossible times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from instrument.explain.diagnosis.diagnose import Diagnosis, diagnose
from instrument.explain.rules.rule import RULES

from .made_loops import GEMM, STEP, MadeLoop
from .shown import SHOWN, each_step, named
from .small_traces import Row

WITHOUT_GPU = {
    "lost-kernels", "lost-graph-kernels", "no-gpu-work", "damaged-trace", "stretched-window", "input-wait",
    "cold-first-step", "graph-breaks", "recompilations", "compile-time", "memory-growth", "fragmented-memory",
    "memory-nearly-full", "missing-ranks",
}  # fmt: skip
"""Rules that need no times of the GPU, or say less without them."""


def late_loop(first_us: int = 10_000) -> MadeLoop:
    """Return a loop that starts at some time and launches a kernel each 100 us."""
    loop = MadeLoop(busy=False)
    for place in range(3 * STEP // 100):
        loop.work(GEMM, first_us + 100 * place, first_us + 100 * place + 10, first_us + 100 * place + 80)
    for row in loop.rows["regions"]:
        row["start_ns"] += 1000 * first_us
    return loop


def at_zero(row: Row) -> None:
    row["start_ns"] = 0


def earlier(row: Row) -> None:
    row["start_ns"] -= 500_000


def without_duration(row: Row) -> None:
    row["duration_ns"] = 0


def changed(change: Callable[[Row], None], rows: int) -> Diagnosis:
    """Return the diagnosis of a loop with so many changed kernels of 30."""
    loop = late_loop()
    for row in loop.rows["gpu"][:rows]:
        change(row)
    return diagnose(loop.trace())


def assert_abstains(found: Diagnosis) -> None:
    """Check that nothing that rests on times of the GPU is said."""
    assert found.bound is None
    assert found.verdict.endswith(f" is unknown: {found.coverage}.")
    assert (found.parts, found.idle_by_cause, found.idle_gaps) == ({}, {}, ())
    assert (found.goodput["mfu"], found.goodput["unknown"]) == (None, found.coverage)
    assert {each.rule for each in found.findings} <= WITHOUT_GPU
    assert {rule for rule, reason in found.abstained.items() if reason == found.coverage} >= {
        "launch-overhead", "dominant-kernel", "low-utilization", "long-synchronization", "old-kernels",
    }  # fmt: skip


def test_lost_kernels() -> None:
    """If many kernels are lost, all abstains; those that ran after the recording are no loss."""
    lossy = diagnose(SHOWN["lost-kernels"]().trace())
    assert_abstains(lossy)
    assert lossy.coverage == "the kernels of 2 of 5 launches are not in the trace"
    assert "lost-kernels" in named(lossy)
    ahead = MadeLoop()
    for at in range(2500, 2900, 10):
        ahead.call("cudaLaunchKernel", at, at + 1)
    assert (diagnose(ahead.trace()).findings, diagnose(ahead.trace()).parts["compute"]) == ((), 999_000)


def test_lost_kernels_of_graphs() -> None:
    """Launches of graphs without kernels count as well."""
    loop = late_loop(0)
    for start in each_step():
        for at in range(start + 20, start + 900, 200):
            loop.call("cudaGraphLaunch", at, at + 9)
    found = diagnose(loop.trace())
    assert_abstains(found)
    assert found.coverage == "the kernels of 15 of 45 launches are not in the trace"
    assert "15 graph launches of 15 have no kernels in the trace" in named(found)["lost-graph-kernels"].title
    assert "lost-kernels" not in named(found)


@pytest.mark.parametrize(
    ("change", "rows", "title"),
    [
        (at_zero, 30, "30 kernels are at time 0: some GPU times are wrong"),
        (at_zero, 4, "4 kernels are at time 0: some GPU times are wrong"),
        (earlier, 15, "15 kernels begin before their launch: some GPU times are wrong"),
        (without_duration, 30, "30 kernels have no duration: some GPU times are wrong"),
    ],
)
def test_impossible_times(change: Callable[[Row], None], rows: int, title: str) -> None:
    """Kernels at impossible times are lost, and the finding says nothing of what is not the case."""
    found = changed(change, rows)
    assert_abstains(found)
    assert found.coverage == f"the kernels of {rows} of 30 launches have impossible times"
    (lost,) = found.findings
    assert (lost.title, lost.severity) == (title, "medium")


def test_a_few_impossible_times() -> None:
    """A single early kernel is said, and the rest is diagnosed."""
    found = changed(earlier, 1)
    assert found.bound is not None
    lost = named(found)["lost-kernels"]
    assert (lost.title, lost.severity) == ("1 kernel begins before its launch: some GPU times are wrong", "low")


def test_clocks_that_differ_by_little() -> None:
    """Kernels that begin a few us before their launch, as clocks differ, are not lost."""
    loop = late_loop()
    for row in loop.rows["gpu"]:
        row["start_ns"] -= 12_000
    assert "lost-kernels" not in named(diagnose(loop.trace()))


def test_waiting_for_input_beside_lost_kernels() -> None:
    """The time that the loop waits is known without the GPU."""
    loop = SHOWN["lost-kernels"]()
    for start in each_step():
        loop.region("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start, start + 400)
    found = diagnose(loop.trace())
    assert_abstains(found)
    title = "The loop waits 400 us per step for the next batch: 40 % of the step"
    assert named(found)["input-wait"].title == title


def test_steps_without_a_duration() -> None:
    """Steps that take no time are said to, and not that the trace has no GPU work."""
    loop = late_loop(0)
    for row in loop.rows["regions"]:
        row["duration_ns"] = 0
    found = diagnose(loop.trace())
    assert found.coverage == "the recorded steps have no duration"
    assert "no GPU work" not in found.verdict


def test_steps_without_gpu_work() -> None:
    """Steps that launch nothing are told apart from a trace without GPU work."""
    loop = late_loop(0)
    for row in loop.rows["regions"]:
        row["start_ns"] += 50_000_000
    found = diagnose(loop.trace())
    assert found.coverage == "the recorded steps have no GPU work"
    assert found.abstained["launch-overhead"] == found.coverage


def test_every_rule_is_known() -> None:
    """The rules that need no times of the GPU exist."""
    assert WITHOUT_GPU <= {*RULES}
