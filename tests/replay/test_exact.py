"""Replays of simulated programs, whose true lengths with a change are known to the nanosecond."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from instrument.explain.replay.replay import Replayer, step_lengths
from instrument.explain.replay.requests import Request
from instrument.explain.replay.what_if import WhatIf, what_if
from instrument.read.jobs.read import read_trace

from .machine import COPY, FILL, Costs, Machine

Program = Callable[[Machine, bool], None]
US, MS = 1_000, 1_000_000
NCCL = "ncclDevKernel_AllReduce_Sum_f32"


class Case(NamedTuple):
    """A program that takes whether it runs with the change, and the change as it is asked for.

    Attributes:
        step: one step of the program.
        change: the arguments of `what_if`.
        faster: how many times as fast kernels are with the change, by name.
        costs: the delays of the machine.
    """

    step: Program
    change: dict[str, Any]
    faster: dict[str, float] | None = None
    costs: Costs = Costs()


def small_kernels(machine: Machine, count: int = 10, ns: int = 20 * US, cpu: int = 10 * US, **where: Any) -> None:
    for _ in range(count):
        machine.work(cpu)
        machine.launch(ns, **where)


def sleeps(machine: Machine, without: bool) -> None:
    """The CPU sleeps in a region, and launches little."""
    with machine.region("sleep"):
        machine.work(0 if without else 300 * US)
    small_kernels(machine)


def sleeps_while_gpu_works(machine: Machine, without: bool) -> None:
    """The CPU sleeps, but the GPU has work for longer."""
    machine.launch(900 * US)
    with machine.region("sleep"):
        machine.work(0 if without else 300 * US)
    machine.launch(100 * US)
    machine.synchronize()


def input_wait(machine: Machine, without: bool) -> None:
    """The loop waits for a batch."""
    machine.work(0 if without else 700 * US, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    small_kernels(machine, ns=40 * US)


def input_wait_then_sync(machine: Machine, without: bool) -> None:
    """The loop waits for a batch, and for the GPU at its end."""
    input_wait(machine, without)
    machine.synchronize()
    machine.work(30 * US)


def sync_in_the_middle(machine: Machine, without: bool) -> None:
    """A synchronization keeps the CPU from running ahead."""
    small_kernels(machine, 20, ns=30 * US)
    if not without:
        machine.synchronize()
    else:
        machine.work(3 * US)
    small_kernels(machine, 20, ns=5 * US, cpu=20 * US)


def stream_sync(machine: Machine, without: bool) -> None:
    """A synchronization with one of two streams."""
    machine.launch(400 * US, stream=8)
    small_kernels(machine, 5, ns=10 * US)
    if without:
        machine.work(3 * US)
    else:
        machine.synchronize(7)
    small_kernels(machine, 5, ns=10 * US)


def pageable_copy(machine: Machine, without: bool) -> None:
    """A copy from pageable memory blocks the CPU."""
    if not without:
        machine.copy(200 * US)
    small_kernels(machine, 10, ns=30 * US)


def copies_between_kernels(machine: Machine, without: bool) -> None:
    """Copies within the GPU, in a queue."""
    for _ in range(8):
        machine.launch(50 * US)
        if not without:
            machine.launch(30 * US, name=COPY)
        machine.launch(10 * US)


def backward(machine: Machine, without: bool) -> None:
    """The backward pass on another thread, with a sleep in it."""
    small_kernels(machine)
    with machine.region("backward"), machine.backward():
        small_kernels(machine, 20)
        with machine.region("hook"):
            machine.work(0 if without else 250 * US)
        small_kernels(machine, 5)
    small_kernels(machine, 3)


def forward_before_backward(machine: Machine, without: bool) -> None:
    """A sleep in the forward pass, before a backward pass on another thread."""
    with machine.region("sleep"):
        machine.work(0 if without else 400 * US)
    small_kernels(machine)
    with machine.region("backward"), machine.backward():
        small_kernels(machine, 20)
    small_kernels(machine, 3)


def whole_backward(machine: Machine, without: bool) -> None:
    """The whole backward pass, on another thread, in a region of the first."""
    small_kernels(machine, 10, ns=5 * US)
    with machine.region("backward"):
        if not without:
            with machine.backward(fork=0, join=0):
                small_kernels(machine, 20, ns=5 * US)
    small_kernels(machine, 3, ns=5 * US)


def gpu_bound(machine: Machine, without: bool) -> None:
    """The GPU is the limit, with kernels of two kinds."""
    for _ in range(10):
        machine.launch(100 * US)
        machine.launch(60 * US, name="softmax")


def hidden_kernel(machine: Machine, without: bool) -> None:
    """A slow kernel on a stream of its own, which nothing waits for."""
    machine.launch(200 * US, stream=9, name="softmax")
    small_kernels(machine, 30, ns=5 * US, cpu=20 * US)


def memset_kernels(machine: Machine, without: bool) -> None:
    """Memsets before each kernel."""
    for _ in range(10):
        machine.launch(20 * US, name=FILL)
        machine.launch(40 * US)


def two_streams(machine: Machine, without: bool) -> None:
    """A kernel waits for work on another stream, which is slow."""
    machine.launch(300 * US, stream=8, name="softmax")
    machine.launch(100 * US)
    machine.wait_event(7, 8)
    machine.launch(50 * US)
    machine.synchronize()


def two_streams_early(machine: Machine, without: bool) -> None:
    """A kernel waits for work on another stream that has ended long before."""
    machine.launch(20 * US, stream=8)
    small_kernels(machine, 10, ns=60 * US, cpu=2 * US)
    machine.wait_event(7, 8)
    machine.launch(50 * US, name="softmax")
    machine.synchronize()


def exposed_communication(machine: Machine, without: bool) -> None:
    """Kernels wait for communication on another stream."""
    small_kernels(machine, 4, ns=50 * US, cpu=5 * US)
    machine.wait_event(9, 7)
    machine.launch(300 * US, stream=9, name=NCCL)
    if not without:
        machine.wait_event(7, 9)
    else:
        machine.work(500)
    small_kernels(machine, 4, ns=50 * US, cpu=5 * US)


def hidden_communication(machine: Machine, without: bool) -> None:
    """Communication beside compute, and nothing waits for it."""
    machine.wait_event(9, 7)
    machine.launch(100 * US, stream=9, name=NCCL)
    small_kernels(machine, 10, ns=60 * US, cpu=5 * US)


def communication_on_stream(machine: Machine, without: bool) -> None:
    """Communication on the stream of compute."""
    machine.launch(100 * US)
    machine.launch(150 * US, stream=9 if without else 7, name=NCCL)
    machine.launch(100 * US)
    machine.work(1 * MS)


def nothing(machine: Machine, without: bool) -> None:
    """A step on the CPU alone."""
    machine.work(50 * US)
    with machine.region("sleep"):
        machine.work(0 if without else 200 * US)


def queue_of_many(machine: Machine, without: bool) -> None:
    """The CPU launches much faster than the GPU works, and waits at the end."""
    for _ in range(200):
        machine.launch(15 * US)
        machine.launch(3 * US, name="softmax")
    machine.synchronize()
    machine.work(20 * US)


def heavy_region(machine: Machine, faster: bool) -> None:
    """A region works on the CPU and the GPU, and then waits for it; with the change, in half the time."""
    part = 2 if faster else 1
    machine.launch(40 * US)
    with machine.region("heavy"):
        machine.work(200 * US // part)
        machine.launch(100 * US // part)
        machine.synchronize()
        machine.work(60 * US // part)
    machine.work(20 * US)
    machine.launch(30 * US)


def heavy_backward(machine: Machine, faster: bool) -> None:
    """The region's work is on the thread of the backward pass."""
    part = 2 if faster else 1
    with machine.region("heavy"), machine.backward():
        machine.work(200 * US // part)
        machine.launch(100 * US // part)
        machine.work(60 * US // part)
    machine.work(20 * US)


def slow_launches(machine: Machine, faster: bool) -> None:
    """The CPU launches slowly, waits for the GPU and for a batch; with the change, its own work takes a tenth."""
    part = 10 if faster else 1
    for _ in range(10):
        machine.work(50 * US // part)
        machine.launch(20 * US)
    machine.synchronize()
    with machine.region("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
        machine.work(40 * US)
    machine.work(30 * US // part)
    machine.launch(20 * US)


def loading_and_launching(machine: Machine, without: bool) -> None:
    """The CPU launches slowly after it waited for a batch; with the change, it does neither."""
    machine.work(0 if without else 700 * US, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    machine.work(300 * US // (10 if without else 1))
    machine.launch(20 * US)
    machine.synchronize()


def ending_with_backward(machine: Machine, without: bool) -> None:
    """The step ends with the backward pass, which waits for the GPU on its thread."""
    small_kernels(machine, 3)
    with machine.backward(fork=5 * US, join=0):
        for _ in range(5):
            machine.work(40 * US)
            machine.launch(60 * US)
            machine.work(3 * US) if without else machine.synchronize()
            machine.work(20 * US)


DATALOADER, SLEEP = {"without": ["dataloader"]}, {"without": ["region:sleep"]}
SOFTMAX, OVERLAP = {"speed": {"softmax": 2}}, {"overlap": ["communication"]}
CASES = {
    "a sleep": Case(sleeps, SLEEP),
    "a sleep without a GPU": Case(nothing, SLEEP),
    "a sleep beside the GPU": Case(sleeps_while_gpu_works, SLEEP),
    "a sleep before the backward pass": Case(forward_before_backward, SLEEP),
    "a sleep in the backward pass": Case(backward, {"without": ["region:hook"]}),
    "the backward pass": Case(whole_backward, {"without": ["region:backward"]}),
    "a wait for a batch": Case(input_wait, DATALOADER),
    "a wait for a batch and the GPU": Case(input_wait_then_sync, DATALOADER),
    "a wait for a batch on a slow machine": Case(
        input_wait_then_sync, DATALOADER, None, Costs(9_000, 3_500, 1, 9_000)
    ),
    "a synchronization": Case(sync_in_the_middle, {"without": ["sync"]}),
    "synchronizations at the end of a step": Case(ending_with_backward, {"without": ["sync"]}),
    "a synchronization of one stream": Case(stream_sync, {"without": ["sync"]}),
    "a pageable copy": Case(pageable_copy, {"without": ["copies"]}),
    "copies in a queue": Case(copies_between_kernels, {"without": ["copies"]}),
    "a faster kernel": Case(gpu_bound, SOFTMAX, {"softmax": 2}),
    "a slower kernel": Case(gpu_bound, {"speed": {"softmax": 0.5}}, {"softmax": 0.5}),
    "two faster kernels": Case(gpu_bound, {"speed": {"softmax": 2, "compute": 4}}, {"softmax": 2, "compute": 4}),
    "a faster kernel that nothing waits for": Case(hidden_kernel, SOFTMAX, {"softmax": 2}),
    "faster memsets": Case(memset_kernels, {"speed": {"Memset": 10}}, {FILL: 10}),
    "a faster kernel on another stream": Case(two_streams, SOFTMAX, {"softmax": 2}),
    "a much faster kernel on another stream": Case(two_streams, {"speed": {"softmax": 50}}, {"softmax": 50}),
    "a faster kernel after an event": Case(two_streams_early, SOFTMAX, {"softmax": 2}),
    "a faster kernel in a long queue": Case(queue_of_many, SOFTMAX, {"softmax": 2}),
    "faster communication": Case(
        lambda machine, _: exposed_communication(machine, without=False), {"speed": {"nccl": 3}}, {NCCL: 3}
    ),
    "overlapped communication": Case(exposed_communication, OVERLAP),
    "communication that overlaps already": Case(hidden_communication, OVERLAP),
    "overlapped communication on the stream of compute": Case(communication_on_stream, OVERLAP),
    "another kernel": Case(gpu_bound, {"replace": {"kernel:softmax": "1us"}}, {"softmax": 60}),
    "a slower other kernel": Case(gpu_bound, {"replace": "softmax=0.1ms"}, {"softmax": 0.6}),
    "other delays": Case(sync_in_the_middle, {"without": ["sync"]}, None, Costs(12_000, 400, 7_000, 3_000, 4_500)),
}


SCALED = {
    "a region twice as fast": Case(heavy_region, {"speed": "region:heavy=2x"}),
    "a backward pass twice as fast": Case(heavy_backward, {"speed": {"region:heavy": 2}}),
    "cheaper launches": Case(slow_launches, {"launch": "0.1x"}),
    "a part of the launches": Case(slow_launches, {"launch": 0.1}),
    "cheaper launches without a wait for a batch": Case(loading_and_launching, DATALOADER | {"launch": "0.1x"}),
}
"""Programs whose calls cost less with the change, too, which a machine cannot show."""


def run(case: Case, *, changed: bool, steps: int = 5, before: int = 3) -> Machine:
    """Run a program, with or without its change, which has run for some steps before."""
    machine = Machine(case.costs, faster=lambda name: (case.faster or {}).get(name, 1) if changed else 1)
    for _ in range(before):
        case.step(machine, changed)
    machine.begin()
    for _ in range(steps):
        with machine.step():
            case.step(machine, changed)
    return machine


def predicted(case: Case) -> WhatIf:
    return what_if(Replayer(run(case, changed=False).trace()), Request(**case.change))


@pytest.mark.parametrize("name", CASES)
def test_replay_without_a_change(name: str) -> None:
    """The replay without a change has the recorded lengths, and these are the true ones."""
    machine = run(CASES[name], changed=False)
    replayer = Replayer(machine.trace())
    assert replayer.recorded_ns.tolist() == machine.lengths
    assert step_lengths(replayer.graph, replayer.unchanged.times_ns).tolist() == machine.lengths


def test_a_gpu_that_lags_behind() -> None:
    """The faster the kernels, the shorter the steps, but never below the time on the CPU in the long run."""

    def lagging(machine: Machine, _: bool) -> None:
        for _ in range(20):
            machine.work(40 * US)
            machine.launch(60 * US)

    replayer = Replayer(run(Case(lagging, {}), changed=False, steps=3).trace())
    predicted = [what_if(replayer, Request(speed={".": factor})).step_ns for factor in (1, 1.2, 2, 100)]
    assert predicted == sorted(predicted, reverse=True)
    # and the last kernel of the last step, which nothing hides
    assert 20 * 42 * US <= predicted[-1] <= predicted[-2] < 20 * 42 * US + 60 * US / 3


def test_overlapped_communication_is_in_order() -> None:
    """Communication that no other work waits for takes its turn, also on the stream of compute."""

    def communicating(machine: Machine, without: bool) -> None:
        for _ in range(3):
            machine.launch(50 * US)
            machine.launch(400 * US, stream=9 if without else 7, name=NCCL)

    case = Case(communicating, OVERLAP)
    true_ns = sum(run(case, changed=True).lengths) / 5
    assert predicted(case).step_ns == pytest.approx(true_ns, rel=0.02)


@pytest.mark.parametrize(("name", "part"), [("Adam", 7 / 19), ("SGD", 5 / 8), ("Lion", 1 / 2)])
def test_a_fused_optimizer(name: str, part: float) -> None:
    """One kernel for all parameters takes a part of the time of those for single ones, and has no gaps."""

    def training(machine: Machine, fused: bool) -> None:
        machine.launch(500 * US)
        with machine.region(f"Optimizer.step#{name}.step"):
            if fused:
                machine.launch(round(380 * 10 * US * part))
            else:
                small_kernels(machine, 380, ns=10 * US, cpu=1 * US)
        machine.synchronize()

    case = Case(training, {"fuse": "optimizer"})
    assert predicted(case).step_ns == pytest.approx(sum(run(case, changed=True).lengths) / 5, rel=0.1)


def test_too_many_threads(tmp_path: Path) -> None:
    """A trace of more threads than are compared has no prediction."""
    events = []
    for number in range(140):
        ids = {"ph": "X", "ts": 100 * number, "dur": 10, "args": {"correlation": number, "device": 0, "stream": 7}}
        events += [
            ids | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": number},
            ids | {"cat": "kernel", "name": "k", "ts": 100 * number + 20, "pid": 0, "tid": 7},
        ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    guess = what_if(Replayer(read_trace(path)))
    assert guess.abstained == "140 threads launch work or wait for the GPU, more than 128"


@pytest.mark.parametrize("name", CASES)
def test_prediction(name: str) -> None:
    """The prediction is the length that the program has with the change."""
    changed = run(CASES[name], changed=True)
    guess = predicted(CASES[name])
    assert guess.abstained is None
    assert guess.step_ns == round(sum(changed.lengths) / 5)


@pytest.mark.parametrize("name", SCALED)
def test_prediction_of_less_work(name: str) -> None:
    """The prediction is the length that the program has with the change, but for what its calls cost."""
    changed = run(SCALED[name], changed=True)
    guess = predicted(SCALED[name])
    assert (guess.abstained, guess.win_ns is not None and guess.win_ns > 100 * US) == (None, True)
    assert guess.step_ns == pytest.approx(sum(changed.lengths) / 5, abs=12 * Costs().call)
