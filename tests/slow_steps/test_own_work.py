"""The work of a rank is what its thread computes in the phases of a sampled step; waits are no work."""

from __future__ import annotations

import time
from threading import Thread

import pytest

import instrument
from instrument.record.slow_steps.box import BlackBox
from instrument.record.slow_steps.own_work import OwnWork


def compute(ms: float) -> None:
    end = time.thread_time() + ms / 1e3
    while time.thread_time() < end:
        pass


def step(box: BlackBox, backward_ms: float = 0, other_ms: float = 0) -> None:
    with instrument.annotate("data"):
        time.sleep(0.002)
    with instrument.annotate("backward"):
        time.sleep(0.002)
        compute(backward_ms)
    compute(other_ms)
    box.step()


def test_cpu_time_of_a_phase() -> None:
    """Of ten steps the third is sampled: its computing counts with its phase, waits hardly, nor other steps."""
    with instrument.black_box() as box:
        box.step()
        work = OwnWork(box.clock)
        usual = box.clock.now
        work.sample(10)
        for number in range(10):
            step(box, *((5, 3) if number == 2 else (1, 0)))
            assert (box.clock.now == usual) == (number > 2)  # the rest of the interval costs nothing
        sampled = work.result()["cpu"]
    assert 5e6 == pytest.approx(sampled["backward"], rel=0.3)
    assert 3e6 == pytest.approx(sampled["other"], rel=0.3)
    assert sampled["data"] < 1e6


def test_a_loop_without_regions() -> None:
    """All of its work is outside of phases."""
    with instrument.black_box() as box:
        box.step()
        work = OwnWork(box.clock)
        work.sample(1)
        compute(4)
        box.step()
        sampled = work.result()["cpu"]
    assert {"other"} == set(sampled)
    assert 4e6 == pytest.approx(sampled["other"], rel=0.3)


def test_an_optimizer_that_computes_the_loss() -> None:
    """A phase in that of the optimizer counts instead of it."""
    with instrument.black_box() as box:
        box.step()
        work = OwnWork(box.clock)
        work.sample(1)
        with instrument.annotate("optimizer"), instrument.annotate("backward"):
            compute(4)
        box.step()
        sampled = work.result()["cpu"]
    assert 4e6 == pytest.approx(sampled["backward"], rel=0.3)
    assert sampled["optimizer"] < 1e6


def test_regions_of_other_threads_and_steps_that_are_recorded() -> None:
    """The one are no work of the loop, and the other no usual work: a profiler computes too."""
    with instrument.black_box() as box:
        box.step()
        work = OwnWork(box.clock)
        work.sample(1)

        def beside() -> None:
            with instrument.annotate("backward"):
                compute(4)

        thread = Thread(target=beside)
        thread.start()
        thread.join()
        box.step()
        assert work.result()["cpu"].get("backward", 0) == 0
        work.sample(4)
        box.hold()
        for _ in range(4):
            step(box, 1)
        box.resume()
        assert {} == work.result()
        box.step()
        assert {} == work.result()  # nothing was sampled since


def test_what_runs_between_the_steps() -> None:
    """Functions of on_steps and pauses, as for an evaluation, are no work, nor a reason to drop the sample."""
    with instrument.black_box(on_steps=instrument.every(1, lambda _: compute(5))) as box:
        box.step()
        work = OwnWork(box.clock)
        work.sample(10)
        box.step()
        for _ in range(2):
            box.pause()
            compute(5)
            box.resume()
            step(box, 2)
        sampled = work.result()["cpu"]
    assert 2e6 == pytest.approx(sum(sampled.values()), rel=0.5)


def test_evaluation_and_checkpoint() -> None:
    """They are part of no step, so that a rank that writes checkpoints is not slow."""
    with instrument.black_box() as box:
        box.step()
        work = OwnWork(box.clock)
        work.sample(1)
        for phase in ("evaluation", "checkpoint", "backward"):
            with instrument.annotate(phase):
                compute(1)
        box.step()
        assert {"backward", "other"} == set(work.result()["cpu"])


def test_other_steps_in_each_interval() -> None:
    """So that work every ten steps is in few samples; the first two steps of an interval are in none."""
    names = [f"step {number}" for number in range(10)]
    with instrument.black_box(phases=names) as box:
        work = OwnWork(box.clock)
        sampled: list[str] = []
        for _ in range(64):
            work.sample(10)
            for name in names:
                with instrument.annotate(name):
                    compute(0.02)
                box.step()
            sampled += {*work.result()["cpu"]} - {"other"}
    assert set(names[2:]) == set(sampled)
    assert max(map(sampled.count, names)) <= 10


def test_the_clock_gets_its_time_back() -> None:
    """Also where the loop ends before the sampled step."""
    with instrument.black_box() as box:
        box.step()
        usual = box.clock.now
        work = OwnWork(box.clock)
        work.sample(10)
        box.step()
        assert {} == work.result()
        assert box.clock.now == usual


@pytest.mark.gpu
def test_time_on_the_gpu() -> None:
    """Where the program uses a GPU, one step is timed there without its pauses, and CPU time shows nothing."""
    import torch

    x = torch.ones(512, 512, device="cuda")
    with instrument.black_box() as box:
        box.step()
        work = OwnWork(box.clock)
        work.sample(1)
        with instrument.annotate("forward"):
            for _ in range(20):
                x = x @ x
        box.pause()
        time.sleep(0.5)
        box.resume()
        box.step()
        torch.cuda.synchronize()
        sampled = work.result()
    assert {"gpu"} == set(sampled)
    assert sampled["gpu"]["forward"] > 0
    assert sum(sampled["gpu"].values()) < 0.5e9
