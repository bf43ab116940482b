"""What holds for replays of any program: they are exact, monotone, and never faster than the GPU's own work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from instrument.explain.replay.replay import Change, Replayer, replay_changed, step_lengths
from instrument.explain.replay.requests import Request, joined
from instrument.explain.replay.what_if import what_if

from .machine import Costs, Machine

US = 1_000
Action = tuple[str, int, int]
durations = st.integers(1, 400).map(lambda us: us * US)
actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["work", "work", "launch", "launch", "launch", "other", "sync", "copy", "cause", "backward"]
        ),
        durations,
        st.integers(7, 8),
    ),
    min_size=1,
    max_size=25,
)


def play(machine: Machine, program: list[Action], *, without: bool = False) -> None:
    """Run one step; "other" launches a kernel of another name, and "cause" sleeps in a region."""
    for action, ns, stream in program:
        if action == "work":
            machine.work(ns)
        elif action in ("launch", "other"):
            machine.launch(ns, stream, "compute" if action == "launch" else "softmax")
        elif action == "sync":
            machine.synchronize()
        elif action == "copy":
            machine.copy(ns, stream)
        elif action == "backward":
            with machine.backward(fork=1 * US, join=1 * US):
                for _ in range(20):
                    machine.work(10 * US)
                    machine.launch(5 * US, stream)
        elif not without:
            with machine.region("cause"):
                machine.work(ns)


def record(
    program: list[Action], *, without: bool = False, faster: Callable[[str], float] = lambda _: 1
) -> Machine:
    machine = Machine(Costs(), faster=faster)
    machine.launch(10 * US, 7)
    machine.launch(10 * US, 8)
    machine.synchronize()
    for _ in range(3):
        with machine.step():
            play(machine, program, without=without)
            machine.work(30 * US)
    return machine


def replayer_of(machine: Machine) -> Replayer:
    return Replayer(machine.trace())


@settings(max_examples=30, deadline=None)
@given(actions)
def test_exact_without_a_change(program: list[Action]) -> None:
    """The replay without a change gives every event its recorded time."""
    replayer = replayer_of(record(program))
    assert (replayer.unchanged.times_ns == replayer.graph.recorded_ns)[1:].all()


@settings(max_examples=30, deadline=None)
@given(actions)
def test_without_a_region(program: list[Action]) -> None:
    """The steps of a replay without a region are as long as those of the program without it."""
    assume(any(action == "cause" for action, *_ in program))
    lengths = lengths_with(replayer_of(record(program)), Request(without=["region:cause"]))
    assert lengths == record(program, without=True).lengths


@settings(max_examples=30, deadline=None)
@given(actions, st.sampled_from([2, 4, 10]))
def test_with_faster_kernels(program: list[Action], factor: float) -> None:
    """The steps of a replay with faster kernels are as long as those of the program with them."""
    assume(any(action == "other" for action, *_ in program))
    lengths = lengths_with(replayer_of(record(program)), Request(speed={"softmax": factor}))
    faster = record(program, faster=lambda name: factor if name == "softmax" else 1)
    assert lengths == pytest.approx(faster.lengths, abs=3 * 25)  # durations are rounded


@settings(max_examples=30, deadline=None)
@given(actions, st.floats(0, 1), st.floats(0, 1))
def test_monotone(program: list[Action], one: float, two: float) -> None:
    """Work that saves more never makes the steps longer."""
    replayer = replayer_of(record(program))
    ends = [step_ends(replayer, saved) for saved in sorted((one, two))]
    assert ends[1] <= ends[0] <= replayer.recorded_ns.sum()


@settings(max_examples=30, deadline=None)
@given(actions)
def test_never_faster_than_the_gpu(program: list[Action]) -> None:
    """Without any work of the CPU and any wait, the steps still take as long as the busiest stream works."""
    machine = record(program)
    replayer = replayer_of(machine)
    thread_times = {0: whole(machine), 1: whole(machine)}
    change = Change(thread_times, asynchronous=frozenset(range(len(replayer.graph.waits))))
    busy = {7: 0, 8: 0}
    for action, ns, stream in program:
        busy[stream] += {"launch": ns, "other": ns, "copy": ns, "backward": 100 * US}.get(action, 0)
    lengths = step_lengths(replayer.graph, replay_changed(replayer.graph, change).times_ns)
    assert lengths.sum() >= 3 * max(busy.values())


@settings(max_examples=30, deadline=None)
@given(st.lists(durations, min_size=1, max_size=5), st.lists(durations, min_size=1, max_size=5))
def test_additive(one: list[int], two: list[int]) -> None:
    """On the CPU alone, causes that do not overlap add up."""
    machine = Machine()
    for _ in range(3):
        with machine.step():
            for name, times in (("one", one), ("two", two)):
                for ns in times:
                    machine.work(10 * US)
                    with machine.region(name):
                        machine.work(ns)
    replayer = replayer_of(machine)
    wins = [what_if(replayer, Request(without=names)).win_ns for names in (["region:one"], ["region:two"])]
    both = what_if(replayer, Request(without=["region:one", "region:two"]))
    assert both.win_ns == sum(win or 0 for win in wins) == sum(one) + sum(two)


def lengths_with(replayer: Replayer, request: Request) -> list[int]:
    """Return the lengths of the steps in a replay, without what a prediction knows of the steps before them."""
    change = joined(each for _, each in request.changes(replayer))
    return step_lengths(replayer.graph, replay_changed(replayer.graph, change).times_ns).tolist()


def step_ends(replayer: Replayer, saved: float) -> int:
    change = Change(saved=np.full(len(replayer.trace.gpu), saved))
    return int(step_lengths(replayer.graph, replay_changed(replayer.graph, change).times_ns).sum())


def whole(machine: Machine) -> Any:
    return np.array([0]), np.array([max(machine.ends) + 1])
