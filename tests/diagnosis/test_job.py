"""Several ranks: who arrives late, whether the work is even, and how much memory any number of ranks takes."""

from __future__ import annotations

import pickle
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import instrument
from instrument.explain.diagnosis.diagnose import Diagnosis
from instrument.explain.metrics.collectives import arrivals, arrivals_of
from instrument.read.jobs.align import CollectiveSequence
from instrument.read.jobs.ranks import TraceSet, read_ranks
from instrument.read.jobs.read import content_of, rank_content_reader, read_rank_content
from tests.support.shared_traces import shared

from .made_loops import GEMM, MadeLoop
from .test_diagnose import write

REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


def rank(number: int, computes: list[int]) -> MadeLoop:
    """Return a rank whose steps compute for so long, and then reduce until 900 us, when all ranks have arrived."""
    loop = MadeLoop(steps=len(computes), busy=False)
    for step, took in enumerate(computes):
        start = 1000 * step
        loop.work(GEMM, start, start + 1, start + took)
        loop.work(REDUCE, start + 2, start + took, start + 900, stream=20)
    return loop


def job(*ranks: list[int]) -> TraceSet:
    """Return the traces of a job, each rank with its compute times by step."""
    traces = {number: rank(number, computes).trace() for number, computes in enumerate(ranks)}
    return TraceSet({number: replace(trace, rank=number) for number, trace in traces.items()})


def rules(diagnosis: Diagnosis) -> dict[str, instrument.Finding]:
    return {found.rule: found for found in diagnosis.findings}


def test_the_late_rank() -> None:
    """The rank with the shortest collectives is the one that the others wait for, and is diagnosed."""
    found = instrument.diagnose(job([100, 100, 100], [850, 850, 850], [200, 200, 200]))
    late = rules(found)["late-rank"]
    assert late.where.rank == 1
    assert late.win_ns == pytest.approx((750_000 + 650_000) / 2, rel=0.01)
    assert "on rank 1" in found.verdict
    assert rules(found)["uneven-compute"].where.rank == 1


def test_a_rank_that_recorded_fewer_steps() -> None:
    """Times per step are those of the steps that all ranks recorded."""
    whole = rules(instrument.diagnose(job([100] * 4, [850] * 4, [200] * 4)))
    fewer = rules(instrument.diagnose(job([100] * 4, [850] * 4, [200] * 3)))
    for rule in ("late-rank", "uneven-compute"):
        assert fewer[rule].win_ns == pytest.approx(whole[rule].win_ns, rel=0.01)
    assert fewer["late-rank"].evidence[2].value == pytest.approx(whole["late-rank"].evidence[2].value, rel=0.01)


def two_streams(number: int, steps: int, gathers: int, reduces: int) -> MadeLoop:
    """Return a rank that, in each step, arrives at two collectives on two streams, which both end at 900 us."""
    loop = MadeLoop(steps=steps, busy=False)
    for start in range(0, 1000 * steps, 1000):
        loop.work(GEMM, start, start + 1, start + min(gathers, reduces))
        loop.work("ncclDevKernel_AllGather_RING_LL", start + 2, start + gathers, start + 900, stream=20)
        loop.work(REDUCE, start + 3, start + reduces, start + 900, stream=21)
    return loop


def test_two_collectives_that_wait_at_once() -> None:
    """As in the backward pass of FSDP: the time in which a rank waits at both counts once."""
    ranks = {0: two_streams(0, 3, 100, 300), 1: two_streams(1, 3, 890, 895)}
    traces = TraceSet({number: replace(loop.trace(), rank=number) for number, loop in ranks.items()})
    late = rules(instrument.diagnose(traces))["late-rank"]
    assert late.where.rank == 1
    assert late.win_ns == pytest.approx(795_000, abs=1000)  # from 100 us, at the first, until 895, at the second


def test_a_rank_that_waits_for_two_others_at_once() -> None:
    """Its time counts once, and each of the others has caused its own."""
    ends = np.array([1000])
    sequences = {
        rank: {
            ("0", str(group)): CollectiveSequence(np.array([0]), np.array([1]), ends, ends - start)
            for group, start in groups.items()
        }
        for rank, groups in {0: {1: 100, 2: 100}, 1: {1: 900}, 2: {2: 950}}.items()
    }
    found = arrivals_of(sequences).ranks
    assert [found[rank].waited_ns for rank in range(3)] == [850, 0, 0]
    assert [found[rank].caused_ns for rank in range(3)] == [0, 800, 850]


def test_a_rank_whose_steps_are_shorter_than_what_others_take() -> None:
    """No fix can win more than the step of the rank that is diagnosed."""
    short, long = rank(0, [50, 50]), MadeLoop(steps=2, busy=False).work(GEMM, 0, 1, 9000)
    traces = TraceSet({number: replace(loop.trace(), rank=number) for number, loop in enumerate((short, long))})
    found = rules(instrument.diagnose(traces, rank=0))
    assert found["uneven-compute"].where.rank == 1
    assert found["uneven-compute"].win_ns == 1_000_000


def test_a_rank_of_choice() -> None:
    """A rank can be chosen; one that does not exist is an error."""
    traces = job([100, 100], [850, 850])
    assert "on rank 0" in instrument.diagnose(traces, rank=0).verdict
    with pytest.raises(ValueError, match='"rank" must be one of 0, 1: 7'):
        instrument.diagnose(traces, rank=7)
    with pytest.raises(ValueError, match='"rank" must be the rank of the trace, 0: 3'):
        instrument.diagnose(traces[0], rank=3)


def test_even_ranks_have_no_findings() -> None:
    """Ranks that arrive together are not late, and none of them is named."""
    assert not rules(instrument.diagnose(job([800, 800], [800, 800]))).keys() & {"late-rank", "uneven-compute"}


def test_a_rank_that_ran_ahead_computes_no_more() -> None:
    """The kernels of steps before the recording, which still ran in it, are no work of its steps."""
    ahead = rank(0, [200, 200, 200])
    for step in range(3):  # during the reduction, while the CPU is 3 steps ahead
        ahead.work(GEMM, -3000 + 1000 * step, 1000 * step + 250, 1000 * step + 850, stream=21)
    ranks = {number: replace(loop.trace(), rank=number) for number, loop in enumerate((ahead, rank(1, [200] * 3)))}
    assert "uneven-compute" not in rules(instrument.diagnose(TraceSet(ranks)))


def test_missing_ranks() -> None:
    """Missing ranks are named, and arrivals of groups with unknown members abstain."""
    traces = dict(job([100, 100], [850, 850]))
    part = TraceSet({number: replace(trace, world_size=8) for number, trace in traces.items()})
    found = instrument.diagnose(part)
    assert rules(found)["missing-ranks"].title == "Only 2 of 8 ranks have a trace; missing: 2, 3, 4, 5, 6, 7"
    assert found.abstained["late-rank"] == "ranks are missing, which may be those that arrive last"


@given(st.lists(st.lists(st.integers(2, 899), min_size=3, max_size=3), min_size=2, max_size=6))
def test_waits_and_causes_add_up(ranks: list[list[int]]) -> None:
    """What all ranks waited is what all ranks caused; each collective has one last rank."""
    found = arrivals(job(*ranks))
    assert sum(each.waited_ns for each in found.ranks.values()) == sum(
        each.caused_ns for each in found.ranks.values()
    )
    assert sum(each.last for each in found.ranks.values()) == found.collectives == 3
    times = np.array(ranks)
    assert sum(each.waited_ns for each in found.ranks.values()) == 1000 * int((times.max(axis=0) - times).sum())


def test_ranks_that_do_not_match() -> None:
    """Without steps, ranks with different numbers of collectives are not compared; the reason is given."""
    one, two = (
        replace(trace, steps=trace.steps.where(slice(0, 0)), gpu=trace.gpu.where(trace.gpu.step < keep))
        for trace, keep in zip(job([100, 100, 100], [800, 800, 800]).values(), (3, 2), strict=True)
    )
    for trace in (one, two):
        trace.gpu.step[:] = -1
    found = arrivals({0: one, 1: two})
    assert found.unmatched == {"the ranks recorded different numbers of collectives": 1}
    assert (found.collectives, found.latest) == (0, None)


def test_the_content_of_a_rank_is_what_ranks_need() -> None:
    """Steps, collectives and the time of compute stay; everything else goes."""
    trace = job([300, 400])[0]
    small = content_of(trace)
    assert small.gpu.text("name") == [REDUCE, REDUCE]
    assert small.steps.number.tolist() == trace.steps.number.tolist()
    assert (small.compute_ns, small.window_ns) == (698_000, 2_000_000)
    assert len(small.strings) < len(trace.strings)
    assert not small.operators
    assert not small.runtime


@pytest.mark.parametrize("executor", [ThreadPoolExecutor, ProcessPoolExecutor, None])
def test_executors(tmp_path: Path, executor: type[Executor] | None) -> None:
    """Any executor reads the files; a damaged one is counted, and the others are diagnosed."""
    for number, took in enumerate((100, 850, 200)):
        write(tmp_path / f"rank{number}.json", rank(number, [took] * 3))
    (tmp_path / "rank3.json.gz").write_bytes(b"\x1f\x8b" + b"damaged" * 9)
    if executor is None:
        found = instrument.diagnose(tmp_path)
    else:
        with executor(2) as some:
            found = instrument.diagnose(tmp_path, executor=some)
    assert Path(found.path).name == "rank1.json"
    assert rules(found)["missing-ranks"].evidence[1].value == 1


def test_the_straggler_of_a_real_job() -> None:
    """Of eight ranks of DLRM, rank 7 is last at five of eight collectives, and is the one to look at."""
    pattern = str(shared("param_dlrm_8rank_r0.json.gz")).replace("_r0.", "_r*.")
    traces = read_ranks(pattern, rank_content_reader("auto", None))
    found = arrivals(traces)
    assert (found.latest, found.ranks[7].last, found.collectives) == (7, 5, 8)
    diagnosis = instrument.diagnose(pattern)
    assert "r7" in Path(diagnosis.path).name
    assert rules(diagnosis)["late-rank"].where.rank == 7


def test_memory_of_many_ranks() -> None:
    """What stays in memory of a rank is a few kilobytes, so that a thousand ranks fit easily."""
    source = shared("hta_nccl_data.json.gz")
    assert len(pickle.dumps(read_rank_content(source))) < 50_000
