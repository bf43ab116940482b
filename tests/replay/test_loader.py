"""Replays of loops whose DataLoader has workers: the batches come at the pace of the workers."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from instrument.explain.replay.replay import Replayer
from instrument.explain.replay.requests import Request
from instrument.explain.replay.step_waits import step_waits
from instrument.explain.replay.what_if import WhatIf, what_if

from .machine import Loader, Machine

US, MS = 1_000, 1_000_000
PHASES = (Phase.explicit, Phase.generate)


class Program(NamedTuple):
    """A loop that trains with the batches of a loader, and waits for the GPU at the end of each step."""

    workers: int
    load_ns: int
    gpu_ns: int
    cpu_ns: int = 200 * US
    micro_steps: int = 1
    pause_ns: int = 0  # before the first recorded step
    steps: int = 12


def run(program: Program) -> Machine:
    machine, loader = Machine(), Loader(program.workers, program.load_ns)

    def train() -> None:
        for _ in range(program.micro_steps):
            machine.next_batch(loader)
            with machine.region("forward"):
                machine.work(program.cpu_ns)
            machine.launch(program.gpu_ns)
            machine.synchronize()

    for _ in range(24):
        train()
    machine.work(program.pause_ns)
    for _ in range(program.steps):
        with machine.step():
            train()
    return machine


def mean_of(program: Program) -> float:
    return sum(run(program).lengths) / program.steps


def predicted(program: Program, **change: Any) -> WhatIf:
    guess = what_if(Replayer(run(program).trace()), Request(**change))
    assert guess.abstained is None
    return guess


programs = st.builds(
    Program,
    workers=st.integers(1, 4),
    load_ns=st.integers(500, 8_000).map(lambda us: us * US),
    gpu_ns=st.integers(100, 3_000).map(lambda us: us * US),
    cpu_ns=st.integers(50, 1_000).map(lambda us: us * US),
    micro_steps=st.integers(1, 3),
    pause_ns=st.just(0),
    steps=st.just(12),
)


def is_late(program: Program) -> bool:
    """Return whether the workers do not keep up."""
    return program.load_ns / program.workers > 1.1 * (program.cpu_ns + program.gpu_ns + 20 * US)


@settings(max_examples=40, deadline=None, phases=PHASES)
@given(programs.filter(is_late), st.sampled_from([0.1, 0.5, 0.8, 2, 10]))
def test_faster_and_slower_kernels(program: Program, factor: float) -> None:
    """The loop waits longer if kernels are faster, and less or not at all if they are slower."""
    true_ns = mean_of(program._replace(gpu_ns=round(program.gpu_ns / factor)))
    assert predicted(program, speed={"compute": factor}).step_ns == pytest.approx(true_ns, rel=0.01)


@settings(max_examples=20, deadline=None, phases=PHASES)
@given(programs.filter(is_late), st.sampled_from([2, 3]))
def test_more_workers(program: Program, factor: int) -> None:
    """With more workers, batches come faster, and other changes win as far as these allow."""
    more = program._replace(workers=factor * program.workers)
    assert predicted(program, workers=f"{factor}x").step_ns == pytest.approx(mean_of(more), rel=0.02)
    both = predicted(program, workers=f"{factor}x", speed={"compute": 4})
    true_ns = mean_of(more._replace(gpu_ns=program.gpu_ns // 4))
    assert both.step_ns == pytest.approx(true_ns, rel=0.02)


LATE = Program(workers=2, load_ns=20 * MS, gpu_ns=6 * MS, cpu_ns=1 * MS)


@pytest.mark.parametrize("change", [{"without": "region:forward"}, {"without": "sync"}, {"launch": "0.1x"}])
def test_only_the_loader_bounds(change: dict[str, Any]) -> None:
    """Nothing but faster loading wins where workers do not keep up, and the bound says so."""
    replayer = Replayer(run(LATE).trace())
    assert what_if(replayer, Request(**change)).step_ns == pytest.approx(10 * MS, rel=0.01)
    assert what_if(replayer, Request(without="dataloader")).step_ns == pytest.approx(7 * MS, rel=0.01)
    waits = step_waits(replayer)
    assert waits.bounds(10 * MS) == ["input"]


def test_workers_that_keep_up() -> None:
    """Calls that find a batch at once tell nothing of the pace of the workers."""
    program = LATE._replace(workers=8)
    true_ns = mean_of(program._replace(gpu_ns=3 * MS))
    assert predicted(program, speed={"compute": 2}).step_ns == pytest.approx(true_ns, rel=0.01)


def test_a_window_that_begins_with_batches() -> None:
    """The pace of the workers is that of the batches for which the loop waits, after those that are there."""
    program = LATE._replace(pause_ns=200 * MS)
    for factor in (0.2, 4):
        true_ns = mean_of(program._replace(gpu_ns=round(program.gpu_ns / factor)))
        assert predicted(program, speed={"compute": factor}).step_ns == pytest.approx(true_ns, rel=0.12)


def test_a_wait_for_the_first_batch_of_an_epoch() -> None:
    """Two waits that are far apart, as where the workers start, do not say that they are slow."""
    machine, loader = Machine(), Loader(8, 10 * MS)
    for number in range(40):
        with machine.step():
            if number % 20 == 0:
                loader = Loader(8, 10 * MS, since=machine.now)
            machine.next_batch(loader)
            machine.launch(2 * MS)
            machine.synchronize()
    replayer = Replayer(machine.trace())
    without_kernels = what_if(replayer, Request(speed={"compute": 10})).step_ns
    assert without_kernels is not None and without_kernels < 1.3 * MS
