"""Launches that block because the queue of the GPU is full, in loops with known times."""

from __future__ import annotations

from pathlib import Path

import pytest

from instrument.explain.metrics.metrics import metrics_of
from instrument.read.measures.launches import find_blocked_launches
from instrument.read.measures.step_lengths import StepLengths, step_lengths
from instrument.read.tables.trace import Trace
from tests.support.loops import BASE_US, Loop

US = 1_000


MS = 1_000_000


def of(trace: Trace) -> StepLengths:
    lengths = step_lengths(trace)
    assert lengths is not None
    return lengths


def blocked_ns(loop: Loop, trace: Trace) -> int:
    """Return how long launches were blocked, from the end of the first step to the end of the last."""
    ends = (trace.steps.end_ns - (BASE_US * US - trace.epoch_ns)).tolist()
    return sum(max(min(end * US, ends[-1]) - max(start * US, ends[0]), 0) for start, end in loop.held)


def blocked_launches_us(trace: Trace) -> list[tuple[float, float]]:
    """Return the starts and ends of blocked launches, on the clock of the loop."""
    found, base_ns = find_blocked_launches(trace), BASE_US * US - trace.epoch_ns
    starts, ends = (found.start_ns - base_ns) / US, (found.end_ns - base_ns) / US
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def test_loop_that_fills_the_queue(tmp_path: Path) -> None:
    """With a full queue, a launch returns when the GPU has finished earlier work: the CPU waits in it."""
    loop = Loop(queue=300)
    for number in range(6):
        with loop.step(number):
            for _ in range(200):
                loop.launch(100)
    trace = loop.trace(tmp_path)
    lengths = of(trace)
    assert (lengths.bound, lengths.gpu_step_ns) == ("gpu", 20 * MS)
    assert lengths.totals.cpu_waits_ns == lengths.totals.queue_waits_ns == blocked_ns(loop, trace)
    assert lengths.totals.cpu_waits_ns > 0.6 * lengths.totals.cpu_ns


def test_nearly_always_blocked(tmp_path: Path) -> None:
    """A CPU that is ahead by more than half of the recording is blocked nearly all of the time."""
    loop = Loop(queue=300)
    for number in range(4):
        with loop.step(number):
            for _ in range(300 if not number else 100):
                loop.launch(100)
    lengths = of(loop.trace(tmp_path))
    totals = lengths.totals
    assert totals.cpu_ns == sum(step.cpu_ns for step in lengths.steps[1:])
    assert 0.85 * totals.cpu_ns < totals.cpu_waits_ns <= totals.cpu_ns
    numbers = metrics_of(loop.trace(tmp_path), "auto", lengths)
    assert numbers["loop"]["cpu_waits_share"] == totals.cpu_waits_ns / totals.cpu_ns


def test_loop_that_starves_and_fills_the_queue(tmp_path: Path) -> None:
    """CPU and GPU both bound a loop in which the CPU waits for the GPU in a part of each step."""
    loop = Loop(queue=300)
    for number in range(4):
        with loop.step(number):
            loop.work(60_000)
            for _ in range(600):
                loop.launch(100)
    trace = loop.trace(tmp_path)
    lengths = of(trace)
    assert lengths.bound == "both"
    assert lengths.totals.gpu_waits_ns > 0.2 * lengths.totals.gpu_ns
    assert lengths.totals.queue_waits_ns == blocked_ns(loop, trace) > 0.2 * lengths.totals.cpu_ns


@pytest.mark.parametrize("before", [5, 300])
def test_launches_that_load_code(tmp_path: Path, before: int) -> None:
    """A launch that loads code is not blocked: little is queued, or its work starts before it returns."""
    loop = Loop()
    for number in range(3):
        with loop.step(number):
            for _ in range(before):
                loop.launch(100)
            loop.launch(50_000, cost=(400, 40_000)[before == 300])
            loop.synchronize()
    lengths = of(loop.trace(tmp_path))
    assert lengths.totals.cpu_waits_ns > 0
    assert lengths.totals.queue_waits_ns == 0


def test_graph_launch_takes_one_place(tmp_path: Path) -> None:
    """The launch of a graph takes one place in the queue, however many kernels it has."""
    loop = Loop()
    for number in range(5):
        with loop.step(number):
            loop.work(5_000)
            for _ in range(20):
                loop.launch(10, cost=5)
            for _ in range(2):
                loop.launch(600, call="cudaGraphLaunch", cost=60, kernels=300)
    trace = loop.trace(tmp_path)
    assert len(find_blocked_launches(trace).start_ns) == 0
    assert of(trace).totals.queue_waits_ns == 0


def test_queue_full_of_graphs(tmp_path: Path) -> None:
    """Graph launches are blocked like kernel launches, beyond their usual duration."""
    loop = Loop(queue=300)
    for _ in range(400):
        loop.launch(20, cost=5)
        loop.launch(600, call="cudaGraphLaunch", cost=60, kernels=3)
    trace = loop.trace(tmp_path)
    graphs = [(start, end) for start, end in loop.held if end - start > 3 * 60]
    assert len(graphs) > 200
    assert [(start, end) for start, end in blocked_launches_us(trace) if end - start > 3 * 60] == graphs


def test_queue_filled_before_the_recording(tmp_path: Path) -> None:
    """Work that was launched before the recording counts as queued."""
    loop = Loop(queue=300)
    for _ in range(400):
        loop.launch(100)
    loop.held.clear()
    loop.events = [event for event in loop.events if event["cat"] == "kernel"]
    for _ in range(20):
        loop.launch(100)
    assert len(loop.held) == 20
    loop.synchronize()
    for _ in range(20):
        loop.launch(100)
    trace = loop.trace(tmp_path)
    assert blocked_launches_us(trace) == loop.held
