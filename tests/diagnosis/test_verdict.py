"""The verdict: what it names, and what it says if it names nothing."""

from __future__ import annotations

from instrument.explain.diagnosis.diagnose import diagnose
from instrument.explain.rules.trace_facts import TraceFacts
from tests.support.shared_traces import shared

from .made_loops import GEMM, STEP, MadeLoop
from .shown import SHOWN, each_step, named

INPUT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def test_a_batch_that_another_thread_waits_for() -> None:
    """A thread that fetches batches ahead does not make the loop wait."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.region(INPUT, start, start + 990).rows["regions"][-1]["thread"] = 1
        for at in range(start, start + STEP, 100):
            loop.work("k", at, at + 2, at + 10)
    found = diagnose(loop.trace())
    assert (found.bound, found.parts["input"]) == ("overhead", 0)
    assert "input-wait" not in named(found)


def test_most_of_the_time_is_other() -> None:
    """Without a replay, a step that mostly idles for an unknown reason has no bound, however long kernels take."""
    found = diagnose(SHOWN["initialization"]().trace())
    assert (found.bound, found.parts["other"]) == ("overhead", 200_500_000)
    assert "is waiting for a driver call of over 100 ms, as when the driver starts (" in found.verdict
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work(GEMM, start - 600, start + 450, start + 850).work(GEMM, start + 890, start + 891, start + 999)
    found = diagnose(loop.trace())
    assert (found.bound, found.parts["compute"]) == ("compute", 508_000)
    for row in loop.rows["gpu"]:
        row["duration_ns"] //= 2
    found = diagnose(loop.trace())
    assert found.bound is None
    assert found.coverage.startswith(
        "most of the time is other: the GPU idles while the next work, launched before"
    )


def test_latency_is_named() -> None:
    """Without a replay, gaps between kernels that were launched in time have no bound, and their part is named."""
    loop = MadeLoop(steps=0, busy=False)
    for start in each_step():
        for at in range(start, start + STEP, 20):
            loop.work("k", at - 50, at + 14, at + 20)
    found = diagnose(loop.trace())
    assert found.bound == "overhead"  # a launch every 20 us
    for row in loop.rows["gpu"][::8]:
        row["correlation"] = -1
    for row in loop.rows["runtime"][::8]:
        row["name"] = "cudaFuncGetAttributes"
    found = diagnose(loop.trace())
    assert (found.bound, found.parts["latency"] > 600_000) == (None, True)
    assert found.coverage.startswith("most of the time is latency: an idle GPU between kernels")


def test_a_real_trace_that_is_mostly_other() -> None:
    """No verdict says that no part takes a third of the time if one does."""
    found = diagnose(shared("tl_rocprofv3_908_results.json.gz"))
    assert found.coverage.startswith("most of the time is other")


def test_the_call_that_keeps_the_gpu_idle() -> None:
    """The start of the driver is named after the call during which the GPU idles, not a longer one before."""
    loop = MadeLoop(steps=0, busy=False)
    loop.work("k", -900_010, -900_005, 0).call("cudaDeviceGetStreamPriorityRange", -900_000, -100)
    loop.call("cudaFree", 10, 300_010).call("cudaMalloc", 300_020, 410_020).work("k", 410_030, 410_031, 410_040)
    found = named(diagnose(loop.trace()))["initialization"]
    assert "(cudaFree takes 300 ms)" in found.title
    values = {each.name: each.value for each in found.evidence}
    assert values["longest"] == "cudaFree 300 ms, cudaMalloc 110 ms, cudaDeviceGetStreamPriorityRange 0"


def test_the_call_of_a_real_trace() -> None:
    """The driver starts before the first work of AlexNet's GPU, which belongs to a recording without steps."""
    found = diagnose(shared("hta_alexnet_cudasync.json.gz"))
    assert "(cudaDeviceGetStreamPriorityRange takes 29.9 s)" in named(found)["initialization"].title
    assert "of the 43.3 s recorded, 100 % is waiting for a driver call of over 100 ms" in found.verdict


def test_after_the_last_work() -> None:
    """The time after the last work is no cost of launches, except for what a synchronization explains."""
    loop = MadeLoop(steps=1, busy=False).work(GEMM, 0, 1, 300)
    found = diagnose(loop.trace())
    assert (found.parts["overhead"], found.parts["other"]) == (1_000, 700_000)
    assert "is waiting for the CPU, mostly between operators (Python or other code) (" in found.verdict
    loop.operator("aten::item", 10, 340).call("cudaStreamSynchronize", 20, 310)
    assert TraceFacts(loop.trace()).idle.totals() == {
        "unknown": 410_000, "synchronization": 290_000, "launch_overhead": 1_000,
    }  # fmt: skip


def test_steps_that_overlap_or_repeat() -> None:
    """A step that a file repeats counts once, and steps that overlap are said to."""
    loop = MadeLoop(steps=1)
    loop.rows["regions"] *= 4
    found = diagnose(loop.trace())
    assert (found.steps, found.step_ns) == (1, 1_000_000)
    loop = MadeLoop()
    for row in loop.rows["regions"]:
        row["duration_ns"] *= 2
    assert "3 overlapping steps of" in diagnose(loop.trace()).verdict
    assert "overlapping" not in diagnose(MadeLoop().trace()).verdict


def test_totals_of_a_long_synchronization() -> None:
    """The evidence of a finding per step is per step as well."""
    found = named(diagnose(SHOWN["long-synchronization"]().trace()))["long-synchronization"]
    values = {each.name: each.value for each in found.evidence}
    assert (values["count"], values["blocked_ns"], values["idle_ns"]) == (1, 490_000, found.win_ns)
    assert all(each.definition.endswith("per step.") for each in found.evidence if each.value is not None)


def test_two_kernels_of_half_the_time() -> None:
    """A kernel with half of the time does not dominate."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work(GEMM, start, start + 1, start + 501).work("k", start + 2, start + 501, start + 1001)
    assert "dominant-kernel" not in named(diagnose(loop.trace()))


def test_gpus_that_work_for_different_times() -> None:
    """The parts are those of both GPUs together; the verdict says that one of them mostly idles."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work(GEMM, start, start + 1, start + 999, device=0).work(
            GEMM, start, start + 1, start + 101, device=1
        )
    said = diagnose(loop.trace()).verdict
    assert said.endswith("Of that time, GPU 0 is busy 100 %, GPU 1 is busy 10 %.")
