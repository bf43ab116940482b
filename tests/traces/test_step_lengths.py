"""Lengths of steps on the CPU and on the GPU, in loops with known times and in real traces."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instrument.read.jobs.read import read_trace
from instrument.read.measures.step_lengths import StepLengths, merge_step_lengths, step_lengths
from instrument.read.measures.summary import merge, summarize
from instrument.read.tables.trace import Trace
from tests.support.loops import BASE_US, LATENCY_US, Loop
from tests.support.shared_traces import shared

US = 1_000
MS = 1_000_000


def of(trace: Trace) -> StepLengths:
    lengths = step_lengths(trace)
    assert lengths is not None
    return lengths


def loop_ahead(steps: int = 10, first: int = 3) -> Loop:
    """Return a loop whose steps launch 8 matmuls of 1.25 ms in 1 ms, and never synchronize."""
    loop = Loop()
    for number in range(first, first + steps):
        with loop.step(number):
            for _ in range(8):
                loop.launch(1_250, cost=125)
    return loop


def test_loop_that_runs_ahead(tmp_path: Path) -> None:
    """Steps take ten times as long on the GPU as on the CPU, which runs further ahead with each."""
    lengths = of(loop_ahead().trace(tmp_path))
    assert {step.cpu_ns for step in lengths.steps} == {1 * MS}
    assert {step.gpu_ns for step in lengths.steps} == {10 * MS}
    assert [step.gpu_period_ns for step in lengths.steps] == [None, *[10 * MS] * 9]
    ahead = [9 * number * MS + LATENCY_US * US for number in range(1, 11)]
    assert [step.run_ahead_ns for step in lengths.steps] == ahead
    assert lengths.run_ahead_ns == ((ahead[4] + ahead[5]) / 2, ahead[-1])
    delays = [max(9 * number * MS, 0) + LATENCY_US * US for number in range(10)]
    assert [step.launch_delay_ns for step in lengths.steps] == delays
    assert (lengths.bound, lengths.unknown, lengths.runs_ahead) == ("gpu", "", True)
    assert (lengths.gpu_step_ns, lengths.cpu_step_ns) == (10 * MS, 1 * MS)
    assert (lengths.step_ns, lengths.clock, lengths.synchronized_step_ns) == (10 * MS, "gpu", None)


def test_times_of_the_work(tmp_path: Path) -> None:
    """First start and last end are times of the trace; work of the second step runs after its end on the CPU."""
    trace = loop_ahead(2).trace(tmp_path)
    first, second = of(trace).steps
    base = BASE_US * US - trace.epoch_ns
    assert (first.gpu_first_ns, first.gpu_last_ns) == (base + 5 * US, base + 10_005 * US)
    assert (second.gpu_first_ns, second.gpu_last_ns) == (base + 10_005 * US, base + 20_005 * US)


def test_loop_bound_by_the_cpu(tmp_path: Path) -> None:
    """The GPU waits for each launch, and is idle before the step ends."""
    loop = Loop()
    for number in range(5):
        with loop.step(number):
            for _ in range(8):
                loop.launch(50, cost=500)
    starved = loop.starved
    lengths = of(loop.trace(tmp_path))
    assert {step.cpu_ns for step in lengths.steps} == {4 * MS}
    assert {step.gpu_ns for step in lengths.steps} == {3_550 * US}
    assert {step.run_ahead_ns for step in lengths.steps} == {-445 * US}
    assert (lengths.bound, lengths.runs_ahead) == ("cpu", False)
    assert (lengths.step_ns, lengths.clock) == (4 * MS, "cpu")
    # The oracle counts from the first kernel on, the sums from the end of the first step's work.
    assert lengths.totals.gpu_waits_ns == (starved - 7 * 450) * US
    assert lengths.totals.cpu_waits_ns == 0


@pytest.mark.parametrize(("prepares_us", "bound"), [(100, "gpu"), (4_000, "both")])
@pytest.mark.parametrize("call", ["cudaDeviceSynchronize", "cudaStreamSynchronize", "hipDeviceSynchronize"])
def test_loop_that_synchronizes(tmp_path: Path, call: str, prepares_us: int, bound: str) -> None:
    """The wall time between synchronizations is the length of a step; the GPU idles while the CPU prepares."""
    loop = Loop()
    for number in range(6):
        with loop.step(number):
            loop.work(prepares_us)
            for _ in range(8):
                loop.launch(1_250, cost=125)
            loop.synchronize(call)
    wall_ns = loop.cpu * US / 6
    lengths = of(loop.trace(tmp_path))
    assert (lengths.bound, lengths.runs_ahead) == (bound, False)
    assert (lengths.step_ns, lengths.clock) == (wall_ns, "synchronizations")
    assert lengths.gpu_step_ns == wall_ns
    assert lengths.totals.synchronized_steps == 5
    waited = lengths.totals.cpu_waits_ns / lengths.totals.cpu_ns
    assert waited == pytest.approx(9_005 / (10_006 + prepares_us))


def test_synchronizations_in_the_middle_of_steps(tmp_path: Path) -> None:
    """Synchronizations at the same place of each step measure whole steps."""
    loop = Loop()
    for number in range(6):
        with loop.step(number):
            loop.launch(3_000)
            loop.synchronize("cudaStreamSynchronize")
            loop.work(500)
            loop.launch(200)
            loop.work(7_000)
    lengths = of(loop.trace(tmp_path))
    assert lengths.synchronized_step_ns == lengths.cpu_step_ns == lengths.steps[0].cpu_ns


def test_synchronizations_at_different_places(tmp_path: Path) -> None:
    """Synchronizations at different places of the steps do not measure a step."""
    loop = Loop()
    for number in range(2):
        with loop.step(number):
            for place in range(2):
                if place == number:
                    loop.synchronize()
                loop.launch(1_000)
            if number:
                loop.synchronize()
    assert of(loop.trace(tmp_path)).synchronized_step_ns is None


def test_synchronization_that_leaves_work(tmp_path: Path) -> None:
    """A call that returns while the GPU runs earlier work, as of another stream, does not measure a step."""
    loop = Loop()
    for number in range(4):
        with loop.step(number):
            loop.launch(5_000)
            start, loop.cpu = loop.cpu, loop.cpu + 50
            loop.add("cuda_runtime", "cudaStreamSynchronize", start, loop.cpu)
    lengths = of(loop.trace(tmp_path))
    assert (lengths.synchronized_step_ns, lengths.bound) == (None, "gpu")


def test_synchronizations_of_other_threads(tmp_path: Path) -> None:
    """Synchronizations on the backward thread hold up the loop, those on a memory-pinning thread do not."""
    counted = {}
    threads = (
        (2, "autograd::engine::evaluate_function: MmBackward0"),
        (3, "aten::pin_memory"),
        (4, "in a report without operators, the thread has the name of autograd's"),
    )
    for thread, operator in threads:
        loop = Loop()
        for number in range(4):
            with loop.step(number):
                loop.work(500)
                loop.launch(1_000)
                start = loop.cpu
                loop.synchronize(thread=thread)
                loop.add("cpu_op", operator, start, loop.cpu, thread, **{"Sequence number": number})
        if thread == 4:
            loop.events = [event for event in loop.events if event["cat"] != "cpu_op"]
            name = {"ph": "M", "cat": "", "name": "thread_name", "pid": 1, "tid": 4}
            loop.events.append(name | {"args": {"name": "thread 4 (pt_autograd_0)"}})
        counted[thread] = of(loop.trace(tmp_path))
    assert {thread: each.bound for thread, each in counted.items()} == {2: "both", 3: "cpu", 4: "both"}
    assert (counted[2].clock, counted[3].clock) == ("synchronizations", "cpu")


def test_single_step(tmp_path: Path) -> None:
    """A single step has lengths, but does not show what bounds the loop."""
    lengths = of(loop_ahead(1).trace(tmp_path))
    (step,) = lengths.steps
    assert (step.cpu_ns, step.gpu_ns, step.gpu_period_ns) == (1 * MS, 10 * MS, None)
    assert (lengths.bound, lengths.step_ns, lengths.clock) == (None, None, None)
    assert "two successive steps" in lengths.unknown
    assert lengths.run_ahead_ns == (9_005 * US, 9_005 * US)


def test_trace_without_gpu_work(tmp_path: Path) -> None:
    """Without GPU work there are no lengths, although the profiler synchronizes at the end."""
    loop = Loop()
    with loop.step(0):
        loop.work(1_000)
    trace = loop.trace(tmp_path)
    assert step_lengths(trace) is None
    assert summarize(trace).lengths is None


def test_trace_without_steps(tmp_path: Path) -> None:
    """A trace without marked steps has no lengths."""
    loop = Loop()
    loop.launch(10)
    assert step_lengths(loop.trace(tmp_path)) is None


@pytest.mark.parametrize("recorded", [0, 1])
def test_graphs_without_their_kernels(tmp_path: Path, recorded: int) -> None:
    """GPU lengths are unknown, but synchronizations with the whole device measure the steps."""
    loop = Loop()
    for number in range(5):
        with loop.step(number):
            for _ in range(recorded):
                loop.launch(100)
            loop.launch(5_000, call="cudaGraphLaunch", kernels=0)
            loop.synchronize("cudaStreamSynchronize")
            loop.synchronize()
    lengths = of(loop.trace(tmp_path))
    assert {step.gpu_ns for step in lengths.steps} == {None}
    assert (lengths.bound, lengths.unknown) == (None, "the trace lacks the GPU work of 5 launches")
    assert (lengths.step_ns, lengths.clock) == (lengths.steps[0].cpu_ns, "synchronizations")


def test_stream_synchronization_without_kernels(tmp_path: Path) -> None:
    """If kernels are missing, a synchronization with one stream does not measure steps."""
    loop = Loop()
    for number in range(3):
        with loop.step(number):
            loop.launch(5_000, call="cudaGraphLaunch", kernels=0)
            loop.synchronize("cudaStreamSynchronize")
    assert of(loop.trace(tmp_path)).synchronized_step_ns is None


def test_recording_that_ends_before_the_gpu(tmp_path: Path) -> None:
    """The last step, whose kernels are missing, has no length on the GPU; the others do."""
    loop = loop_ahead(5)
    kernels = [event for event in loop.events if event["cat"] == "kernel"]
    for event in kernels[-6:]:
        loop.events.remove(event)
    lengths = of(loop.trace(tmp_path))
    assert [step.gpu_ns for step in lengths.steps] == [*[10 * MS] * 4, None]
    assert lengths.unknown == "the trace lacks the GPU work of 6 launches"


def test_graph_among_other_launches(tmp_path: Path) -> None:
    """One graph without its kernels makes the length of a step unknown, and the periods around it."""
    loop = Loop()
    for number in range(5):
        with loop.step(number):
            for _ in range(20):
                loop.launch(100)
            if number == 2:
                loop.launch(90_000, call="cudaGraphLaunch", kernels=0)
    lengths = of(loop.trace(tmp_path))
    assert [step.gpu_ns is None for step in lengths.steps] == [False, False, True, False, False]
    assert [step.gpu_period_ns is None for step in lengths.steps] == [True, False, True, True, False]
    assert (lengths.bound, lengths.gpu_step_ns) == (None, None)


def test_work_of_unknown_origin(tmp_path: Path) -> None:
    """If the GPU did much work of unknown origin, what bounds the loop is unknown."""
    loop = Loop()
    for number in range(4):
        with loop.step(number):
            loop.launch(1_000)
        loop.launch(1_000)
    lengths = of(loop.trace(tmp_path))
    assert (lengths.bound, lengths.unknown) == (None, "the steps launched only 50 % of what the GPU did")
    launches = [event for event in loop.events if event["cat"] == "cuda_runtime"]
    for event in launches[1:-1:2]:
        loop.events.remove(event)
    assert of(loop.trace(tmp_path)).unknown == lengths.unknown


def test_work_before_the_steps(tmp_path: Path) -> None:
    """Work from before the window neither hides the steps' work nor counts toward it."""
    loop = loop_ahead(3)
    for event in loop.events:
        if event["cat"] == "kernel":
            event["ts"] += 20_000
    earlier = loop.event("kernel", "earlier", 0, 20_000) | {"pid": 0, "tid": 7}
    loop.events.append(earlier | {"args": {"device": 0, "stream": 7}})
    loop.gpu += 20_000
    lengths = of(loop.trace(tmp_path))
    assert (lengths.bound, lengths.gpu_step_ns) == ("gpu", 10 * MS)
    assert lengths.steps[0].run_ahead_ns == 29_005 * US


def test_step_without_gpu_work(tmp_path: Path) -> None:
    """A step without GPU work has no GPU length, and counts toward the mean."""
    loop = Loop()
    for number in range(5):
        with loop.step(number):
            if number == 2:
                loop.work(80)
            else:
                for _ in range(8):
                    loop.launch(1_250)
    lengths = of(loop.trace(tmp_path))
    assert [step.gpu_ns is None for step in lengths.steps] == [False, False, True, False, False]
    assert (lengths.totals.steps, lengths.totals.gpu_ns) == (4, 30 * MS)


def test_gap_between_steps(tmp_path: Path) -> None:
    """No period spans steps that were not recorded."""
    loop = loop_ahead(3, first=1)
    loop.work(500 * US)
    for number in (10, 11):
        with loop.step(number):
            loop.launch(10_000)
    lengths = of(loop.trace(tmp_path))
    assert [step.gpu_period_ns is None for step in lengths.steps] == [True, False, False, True, False]
    assert (lengths.totals.steps, lengths.totals.gpu_ns) == (3, 30 * MS)


def test_processes_with_their_own_gpus(tmp_path: Path) -> None:
    """A busy GPU of one process does not hide the idle GPU of another."""
    busy, idle = Loop(process=1, device=0), Loop(process=2, device=1)
    for number in range(4):
        with busy.step(number):
            for _ in range(4):
                busy.launch(1_000)
        with idle.step(number):
            for _ in range(4):
                idle.launch(50, cost=1_000)
    starved = idle.starved - 3 * 950
    totals = of(busy.trace(tmp_path, idle)).totals
    assert (totals.steps, totals.gpu_waits_ns) == (6, starved * US)


def test_windows_add_up(tmp_path: Path) -> None:
    """Totals of several windows add up; a window without GPU work keeps its steps."""
    one = summarize(loop_ahead(4).trace(tmp_path))
    without = Loop()
    with without.step(7):
        without.work(5)
    total = merge([one, summarize(without.trace(tmp_path)), one])
    assert total.lengths is not None
    assert one.lengths is not None
    assert len(total.lengths.steps) == total.steps == 9
    assert total.lengths.steps[4].cpu_ns == 5 * US
    assert total.lengths.totals == one.lengths.totals + one.lengths.totals
    assert total.lengths.gpu_step_ns == 10 * MS
    assert merge_step_lengths([(None, (1, 2))]) is None


Step = list[tuple[int, int, bool]]
STEPS = st.lists(
    st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 2_000), st.booleans()), max_size=5),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150)
@given(STEPS)
def test_periods_add_up_to_the_span(steps: list[Step]) -> None:
    """The first length and the periods add up to the time from first start to last end of the steps' work."""
    loop, at_first = Loop(), None
    for number, launches in enumerate(steps):
        with loop.step(number):
            for cpu_us, gpu_us, waits in launches:
                loop.work(cpu_us)
                loop.launch(gpu_us)
                if waits:
                    loop.synchronize()
            loop.work(1)
        if launches and at_first is None:
            at_first = loop.starved
    starved = loop.starved - (at_first or 0)
    with tempfile.TemporaryDirectory() as folder:
        lengths = step_lengths(loop.trace(Path(folder)))
    if lengths is None:
        assert not any(steps)
        return
    known = [step for step in lengths.steps if step.gpu_ns is not None]
    assert [step.gpu_ns is not None for step in lengths.steps] == [bool(step) for step in steps]
    first, ends = known[0], [step.gpu_last_ns or 0 for step in known]
    periods = [step.gpu_period_ns or 0 for step in known[1:]]
    assert first.gpu_ns is not None
    assert first.gpu_first_ns is not None
    assert first.gpu_ns + sum(periods) == max(ends) - first.gpu_first_ns
    assert lengths.totals.gpu_ns == sum(periods)
    if lengths.totals.gpu_ns:
        assert lengths.totals.gpu_waits_ns == starved * US
        assert lengths.totals.gpu_waits_ns + lengths.totals.busy_ns <= lengths.totals.gpu_ns
        assert lengths.totals.cpu_waits_ns <= lengths.totals.cpu_ns
        assert lengths.totals.known_ns == lengths.totals.busy_ns


# Real traces


def real(name: str) -> StepLengths:
    trace = read_trace(shared(name))
    assert isinstance(trace, Trace)
    return of(trace)


def test_real_loop_that_runs_ahead() -> None:
    """DDP on V100: from the third step on the queue is full, so the CPU is as slow as the GPU, and ahead of it."""
    lengths = real("hta_ns_resolution.json.gz")
    assert [round(step.cpu_ns / MS, 1) for step in lengths.steps] == [35.1, 72.1, 95.7, 95.6, 95.7]
    assert [round((step.gpu_ns or 0) / MS, 1) for step in lengths.steps] == [97.7, 95.7, 95.6, 95.7, 95.4]
    assert (lengths.bound, lengths.runs_ahead) == ("gpu", True)
    assert lengths.step_ns == 95_591_571
    assert lengths.run_ahead_ns is not None
    assert 89 * MS < lengths.run_ahead_ns[0] < lengths.run_ahead_ns[1] < 90 * MS
    assert 0.64 < lengths.totals.cpu_waits_ns / lengths.totals.cpu_ns < 0.65
    assert lengths.totals.queue_waits_ns == lengths.totals.cpu_waits_ns


def test_real_loop_with_earlier_work() -> None:
    """On MI300X a third of the GPU time belongs to steps before the window, and hides nothing of the others."""
    lengths = real("tl_mi300_resnet_actckpt.json.gz")
    assert (lengths.bound, lengths.step_ns) == ("gpu", 18_768_629.5)
    assert [(step.run_ahead_ns or 0) // MS for step in lengths.steps] == [32, 35, 37]


def test_real_loop_with_overlapping_steps() -> None:
    """Memcpys of a step run while the step before it computes, so a period is shorter than a step."""
    lengths = real("pairs/hta_test_v100.json.gz")
    assert lengths.bound == "gpu"
    assert lengths.step_ns == 117_573_800
    assert min(step.gpu_ns or 0 for step in lengths.steps) > 122 * MS


@pytest.mark.parametrize(
    ("name", "step_ms"),
    [
        ("kineto_tb_resnet50_nw0_v100.json.gz", 175.8),
        ("pairs/resnet50_workers4_a.json.gz", 136.2),
        ("hta_nccl_data.json.gz", 221.1),
    ],
)
def test_real_loops_bound_by_the_cpu(name: str, step_ms: float) -> None:
    """With data loaders, with and without workers, the GPU waits, and synchronizations give the wall time."""
    lengths = real(name)
    assert (lengths.bound, lengths.clock) == ("cpu", "synchronizations")
    assert round((lengths.step_ns or 0) / MS, 1) == step_ms


def test_real_loop_that_synchronizes() -> None:
    """Blocking memcpys in each step keep both sides in step."""
    lengths = real("hta_tracediff_control.json.gz")
    assert (lengths.bound, lengths.clock) == ("both", "synchronizations")
    assert round((lengths.step_ns or 0) / MS) == 77


@pytest.mark.parametrize("name", ["deepseek_train_h800.json.gz", "param_dlrm_8rank_r1.json.gz"])
def test_real_single_steps(name: str) -> None:
    """One step does not show what bounds the loop."""
    assert real(name).bound is None


# Communication, and several GPUs


def test_loop_bound_by_communication(tmp_path: Path) -> None:
    """Exposed communication is a share of the steps on the GPU; communication during compute is hidden."""
    loop = loop_ahead(5)
    kernels = [event for event in loop.events if event["cat"] == "kernel"]
    for place, event in enumerate(kernels):
        if place % 8 < 6:
            event["name"] = "ncclDevKernel_AllReduce_Sum_f32"
    args = kernels[-4]["args"] | {"stream": 8}
    loop.events.append(kernels[-4] | {"name": "gemm", "dur": 625, "tid": 8, "args": args})
    trace = loop.trace(tmp_path)
    lengths = of(trace)
    assert (lengths.bound, lengths.totals.exposed_comm_ns) == ("gpu", 4 * 7_500 * US - 625 * US)
    everything = step_lengths(trace, ".")
    assert everything is not None
    assert everything.totals.exposed_comm_ns == everything.totals.gpu_ns == 40 * MS


def test_busy_time_of_a_step(tmp_path: Path) -> None:
    """The length of a step on the GPU includes idle time; its busy time does not."""
    loop = Loop()
    for number in range(3):
        with loop.step(number):
            for _ in range(4):
                loop.launch(100, cost=400)
    (*_, last) = of(loop.trace(tmp_path)).steps
    assert (last.gpu_ns, last.gpu_busy_ns) == (1_300 * US, 400 * US)


def test_busy_time_of_several_gpus(tmp_path: Path) -> None:
    """The busy share of GPUs that take turns is their mean, neither summed nor merged."""
    loop = Loop()
    for number in range(3):
        with loop.step(number):
            for device in (0, 1):
                loop.device = device
                loop.launch(1_000)
    trace = loop.trace(tmp_path)
    (*_, last) = of(trace).steps
    assert (last.gpu_ns, last.gpu_busy_ns) == (2_000 * US, 1_000 * US)
    assert summarize(trace).gpus == merge([summarize(trace)]).gpus == 2
