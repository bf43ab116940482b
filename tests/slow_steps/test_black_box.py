"""The black box: steps, phases, slow steps, alarms."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch

import instrument
from instrument.record.regions import dispatch
from instrument.record.slow_steps.box import BlackBox

from .conftest import Clock

Make = Callable[..., BlackBox]
PARTS = {"data": 2.0, "forward": 3.0, "backward": 4.0, "optimizer": 1.0}


def run(box: BlackBox, clock: Clock, count: int, **parts: float) -> None:
    """Run steps of 11 ms, 1 ms of it outside the phases; ``parts`` changes their times in ms."""
    for _ in range(count):
        for name, ms in {**PARTS, **{name: ms for name, ms in parts.items() if name != "other"}}.items():
            with instrument.annotate(name):
                clock.advance(ms)
        clock.advance(parts.get("other", 1.0))
        box.step()


def test_a_slow_step_is_found_with_its_phase(clock: Clock, make: Make) -> None:
    """The parts of the difference to a usual step add up to it, and the largest is the cause."""
    alarms: list[instrument.SlowStep] = []
    box = make(on_slow=alarms.append)
    run(box, clock, 100)
    run(box, clock, 1, data=202.0, forward=2.5)
    run(box, clock, 100)
    (slow,) = box.slow_steps
    assert alarms == [slow]
    assert (slow.step, slow.cause, slow.usual_ns, slow.duration_ns) == (100, "data", 11_000_000, 210_500_000)
    assert slow.phases["data"] == (202_000_000, 2_000_000)
    assert slow.phases["forward"].delta_ns == -500_000
    assert sum(time.delta_ns for time in slow.phases.values()) == slow.delta_ns
    assert sum(time.ns for time in slow.phases.values()) == slow.duration_ns
    assert sum(time.usual_ns for time in slow.phases.values()) == slow.usual_ns
    assert str(slow) == "step 100 took 210 ms, 200 ms more than usual: 200 ms of it in data"
    assert str(slow) in box.report()


def test_the_cause_is_the_phase_that_took_longer(clock: Clock, make: Make) -> None:
    """A phase that took less time than usual is not the cause, however large the difference is."""
    box = make()
    run(box, clock, 100, data=20.0, forward=5.0)
    run(box, clock, 1, data=1.0, forward=22.0, backward=22.0)
    (slow,) = box.slow_steps
    assert slow.cause == "backward"
    assert [time.delta_ns for time in slow.phases.values()] == [18_000_000, 17_000_000, 0, 0, -19_000_000]
    assert str(slow).endswith("18.0 ms of it in backward")


def test_without_regions_only_the_step_is_known(clock: Clock, make: Make) -> None:
    """The whole difference is outside all phases, and the text does not name a phase."""
    box = make()
    for step in range(60):
        clock.advance(50 if step == 50 else 10)
        box.step()
    (slow,) = box.slow_steps
    assert slow.phases == {"other": (50_000_000, 10_000_000)}
    assert str(slow) == "step 50 took 50.0 ms, 40.0 ms more than usual"


def test_json(clock: Clock, make: Make) -> None:
    """The JSON has the slow steps and the last steps in columns."""
    box = make(32, first_step=7)
    run(box, clock, 50)
    run(box, clock, 1, forward=100.0)
    data = json.loads(box.to_json())
    assert (data["step"], data["alarms"], data["periodic"]) == (58, 1, [])
    assert data["slow_steps"][0]["cause"] == "forward"
    assert data["last_steps"]["step"] == list(range(7, 58))
    assert data["last_steps"]["phases_ns"]["forward"][-2:] == [3_000_000, 100_000_000]


def test_the_ring_keeps_the_last_steps(clock: Clock, make: Make) -> None:
    """The ring holds at least the number of steps given, and their numbers are right after many laps."""
    box = make(64)
    for step in range(1000):
        clock.advance(10 + step / 1000)
        box.step()
    last = box.clock.last_steps()
    assert [times.step for times in last] == list(range(1000 - len(last), 1000))
    assert 64 <= len(last) <= 96
    assert all(abs(times.duration_ns - 1e7 - times.step * 1000) <= 1 for times in last)


def test_names_of_phases(clock: Clock, make: Make) -> None:
    """Names of torch's ranges, qualified names and names that the user adds are phases; others are not."""
    box = make(phases=["log"])
    shown = ["enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "Optimizer.step#AdamW.step"]
    for name in [*shown, "Model.forward", "train/backward", "log", "block", "data"]:
        with instrument.annotate(name):
            clock.advance(1)
    box.step()
    (times,) = box.clock.last_steps()
    assert dict(zip(box.clock.phases, times.phases_ns, strict=True)) == {
        "data": 2_000_000, "forward": 1_000_000, "backward": 1_000_000, "optimizer": 1_000_000,
        "evaluation": 0, "checkpoint": 0, "log": 1_000_000,
    }  # fmt: skip


def phases_of_step(box: BlackBox, step: int = -1) -> dict[str, float]:
    """Return the phases of a step in ms, those that took time."""
    times = box.clock.last_steps()[step]
    return {name: ns / 1e6 for name, ns in zip(box.clock.phases, times.phases_ns, strict=True) if ns}


def test_the_outermost_phase_counts(clock: Clock, make: Make) -> None:
    """A phase in another one does not count, but one in a region that is no phase does; an error ends a phase."""
    box = make()
    with instrument.annotate("step"), instrument.annotate("backward"):
        clock.advance(1)
        with pytest.raises(KeyError), instrument.annotate("forward"):
            clock.advance(2)
            raise KeyError
        clock.advance(4)
    with instrument.annotate("forward"):
        clock.advance(8)
    box.step()
    assert phases_of_step(box) == {"backward": 7, "forward": 8}


def test_phases_in_the_optimizer(clock: Clock, make: Make) -> None:
    """A closure that computes the loss in the optimizer's step is forward and backward, not optimizer."""
    box = make()
    with instrument.annotate("Optimizer.step#LBFGS.step"):
        clock.advance(1)
        for name, ms in (("forward", 2), ("backward", 4)):
            with instrument.annotate(name), instrument.annotate("data"):
                clock.advance(ms)
        box.step()
        clock.advance(8)
    box.step()
    assert (phases_of_step(box, 0), phases_of_step(box)) == (
        {"forward": 2, "backward": 4, "optimizer": 1},
        {"optimizer": 8},
    )


def test_phases_on_other_threads_do_not_count(clock: Clock, make: Make) -> None:
    """A thread that loads data ahead takes no time of the loop; a loop that moves to a thread is followed."""
    box = make()

    def load() -> None:
        with instrument.annotate("data"):
            clock.advance(5)

    def train() -> None:
        for _ in range(40):
            load()
            box.step()

    for target in (load, train):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert phases_of_step(box, 0) == {}
    assert phases_of_step(box) == {"data": 5}
    assert box.step_num == 40


def test_suspended_code_does_not_count(clock: Clock, make: Make) -> None:
    """Regions in coroutines and generators are no phases, as other code runs while they are open."""
    box = make()

    async def wait() -> None:
        async with instrument.annotate("data"):
            await asyncio.sleep(0)
            clock.advance(1)

    @instrument.annotate("data")
    def batches() -> Iterator[int]:
        yield from range(2)

    async def both() -> None:
        await asyncio.gather(wait(), wait())

    asyncio.run(both())
    for _ in batches():
        with instrument.annotate("forward"):
            clock.advance(1)
    box.step()
    assert phases_of_step(box) == {"forward": 2}


def test_a_phase_that_is_open_across_steps(clock: Clock, make: Make) -> None:
    """Each step gets its part; a phase that is never closed hides the others for two steps only."""
    box = make()
    with instrument.annotate("data"):
        clock.advance(1)
        box.step()
        clock.advance(2)
    clock.advance(4)
    box.step()
    assert (phases_of_step(box, 0), phases_of_step(box, 1)) == ({"data": 1}, {"data": 2})
    forgotten = instrument.annotate("data")
    forgotten.__enter__()
    run(box, clock, 3)
    assert phases_of_step(box) == PARTS
    forgotten.__exit__()


def test_pause(clock: Clock, make: Make) -> None:
    """Time in a pause belongs to no step, and no phase; a step that ends in a pause is counted without a time."""
    box = make()
    clock.advance(1)
    with instrument.annotate("data"):
        clock.advance(2)
        box.pause()
        clock.advance(100)
        with instrument.annotate("forward"):
            clock.advance(100)
        box.resume()
        clock.advance(4)
    box.step()
    (first,) = box.clock.last_steps()
    assert (first.duration_ns, phases_of_step(box)) == (7_000_000, {"data": 2})
    box.pause()
    clock.advance(50)
    box.step()
    box.resume()
    clock.advance(3)
    box.step()
    assert [(times.step, times.duration_ns) for times in box.clock.last_steps()] == [
        (0, 7_000_000),
        (2, 3_000_000),
    ]


def test_on_slow_may_pause(clock: Clock, make: Make) -> None:
    """A pause that ``on_slow`` begins, as when a window opens, is no part of the step after it."""

    def pause(_: object) -> None:
        box.pause()
        clock.advance(100)

    box = make(on_slow=pause)
    run(box, clock, 50)
    run(box, clock, 1, data=100.0)
    run(box, clock, 3)
    box.resume()
    run(box, clock, 1)
    assert [times.duration_ns for times in box.clock.last_steps()[-2:]] == [109_000_000, 11_000_000]
    assert box.step_num == 55


def test_cooldown_and_cap(clock: Clock, make: Make) -> None:
    """Alarms are at least ``cooldown`` steps apart and at most ``cap``; every slow step is noted."""
    alarms: list[int] = []
    box = make(cooldown=50, cap=2, on_slow=lambda slow: alarms.append(slow.step))
    slow = [100, 120, 147, 161, 198, 251]
    for step in range(300):
        clock.advance(100 + step % 7 if step in slow else 10)
        box.step()
    assert [each.step for each in box.slow_steps] == slow
    assert alarms == [100, 161]


def test_periodic_steps_are_learned(clock: Clock, make: Make) -> None:
    """A step that recurs gives one alarm and is then known; one that is slow even for its kind is found."""
    alarms: list[int] = []
    box = make(cooldown=0, on_slow=lambda slow: alarms.append(slow.step))
    for step in range(2000):
        clock.advance(400 if step == 1699 else 80 if step % 100 == 99 else 10)
        box.step()
    assert [slow.step for slow in box.slow_steps] == alarms == [99, 199, 1699]
    assert box.periodic[100].step == 1999
    assert "one step in 100 is like this" in box.report()


def test_the_report_says_where_the_time_is(clock: Clock, make: Make) -> None:
    """The words are those of the summary of a run; steps without a time and what ran in a pause are told apart."""
    box = make()
    for step in range(3000):
        clock.advance(2_000 if step == 0 else 110 if step % 10 == 9 else 10)
        box.step()
    said = (
        "2,999 steps in 60.0 s: 45 % in 2,699 steps of about 10.0 ms; "
        "47 % in every 10th step, of about 110 ms (2949, "
    )
    assert f"\n{said}" in box.report()
    even = make()
    run(even, clock, 100)
    assert "99 steps in 1.09 s: 100 % in typical steps of 11.0 ms" in even.report()
    even.pause()
    clock.advance(2_000)
    even.resume()
    run(even, clock, 1)
    assert "100 steps in 3.10 s: 35 % in 100 steps of about 11.0 ms; 65 % in other phases" in even.report()


def test_a_period_that_ends_is_forgotten(clock: Clock, make: Make) -> None:
    """A stall long after a period has ended is no longer a part of it."""
    box = make(cooldown=0)
    for step in range(2000):
        clock.advance(80 if step == 1599 or (step % 100 == 99 and step < 1000) else 10)
        box.step()
    assert [slow.step for slow in box.slow_steps] == [99, 199, 1599]
    assert box.periodic == {}


def test_a_lasting_change_becomes_usual(clock: Clock, make: Make) -> None:
    """A loop that becomes three times slower for good gives one alarm, and its steps are then usual."""
    box = make()
    for step in range(1000):
        clock.advance(10 if step < 300 else 30)
        box.step()
    assert box.alarms == 1
    assert max(slow.step for slow in box.slow_steps) < 300 + 64
    assert (box.usual.usual_ns, box.usual.shifts) == (30_000_000, 1)


def test_on_slow_is_contained(clock: Clock, make: Make, lenient: None) -> None:
    """An error of ``on_slow`` does not reach the loop, and the time that it takes is part of no step."""

    def fail(_: object) -> None:
        clock.advance(1000)
        raise OSError

    box = make(on_slow=fail)
    run(box, clock, 100)
    run(box, clock, 1, data=100.0)
    run(box, clock, 100)
    assert [slow.step for slow in box.slow_steps] == [100]


def test_several_boxes(clock: Clock, make: Make) -> None:
    """Each box has steps of its own, and all see the phases."""
    inner, outer = make(), make()
    for micro in range(8):
        with instrument.annotate("forward"):
            clock.advance(1)
        inner.step()
        if micro % 4 == 3:
            outer.step()
    assert (phases_of_step(inner), phases_of_step(outer)) == ({"forward": 1}, {"forward": 4})


def test_modules_get_no_hooks(make: Make) -> None:
    """While only a box takes regions, modules have no hooks, and only phases are patched."""
    model = torch.nn.Linear(2, 2)
    copy = torch.Tensor.to
    with instrument.annotate_modules(model), instrument.annotate_step():
        box = make()
        assert dispatch.recording
        assert not model._forward_hooks
        assert torch.Tensor.to is copy
        with torch.profiler.profile():
            assert model._forward_hooks
            assert torch.Tensor.to is not copy
        assert not model._forward_hooks
        box.stop()
    assert not dispatch.recording


def test_parts_of_a_torch_loop() -> None:
    """`annotate_step` gives the phases of a plain loop, and updates of the optimizer are its steps."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(64, 8))
    with instrument.annotate_step(), instrument.black_box() as box:
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert box.step_num == 64
    assert set(phases_of_step(box)) == {"data", "backward", "optimizer"}


def test_compiled_code_stays_compiled() -> None:
    """A box that starts and stops between calls of compiled code does not have it compiled again."""
    torch._dynamo.reset()
    model = torch.nn.Linear(4, 4)
    compiled = torch.compile(instrument.annotate("forward")(lambda x: model(x)), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(steps: int) -> None:
        for _ in range(steps):
            compiled(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with instrument.annotate_modules(model), instrument.annotate_step():
        train(3)
        before = dict(torch._dynamo.utils.counters["frames"])
        with instrument.black_box() as box:
            train(5)
        train(3)
    assert dict(torch._dynamo.utils.counters["frames"]) == before
    assert before["ok"]
    assert box.step_num == 5


def test_steps_that_a_profile_counts(tmp_path: Any) -> None:
    """The steps of `instrument.steps` are those of the box."""
    with instrument.black_box() as box:
        for _ in instrument.steps(range(40), tmp_path, at=10**6):
            pass
    assert box.step_num == 40


def test_real_stalls_are_found() -> None:
    """In a real loop, sleeps of several times a step's length are found."""
    at = {60, 90, 133, 171}
    with instrument.black_box(cooldown=0) as box:
        for step in range(200):
            time.sleep(0.002)
            if step in at:
                with instrument.annotate("data"):
                    time.sleep(0.1)
            box.step()
    found = {slow.step: slow.cause for slow in box.slow_steps}
    assert {step: found.get(step) for step in at} == dict.fromkeys(at, "data")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_has_a_copy(clock: Clock, make: Make) -> None:
    """Steps in a forked process do not change the parent's box."""
    box = make()
    run(box, clock, 10)
    pid = os.fork()
    if not pid:
        run(box, clock, 5)
        os._exit(box.step_num)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 15
    assert box.step_num == 10


def test_off() -> None:
    """Under ``INSTRUMENT=0`` a box takes no regions and times no step."""
    code = (
        "import instrument\n"
        "with instrument.black_box() as box:\n"
        "    for _ in range(100): box.step()\n"
        "    from instrument.record.regions import dispatch\n"
        "    assert not dispatch.recording\n"
        "assert box.clock.last_steps() == [] and box.usual.usual_ns == 0, box.report()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "INSTRUMENT": "0"})


@pytest.mark.parametrize(
    "arguments",
    [
        {"steps": 8}, {"steps": 10.0}, {"slow": 1}, {"slow": "2"}, {"slow": float("nan")}, {"cooldown": -1},
        {"cap": True}, {"phases": "data"}, {"phases": ["other"]}, {"phases": [3]}, {"first_step": -1},
        {"on_slow": 3},
    ],
)  # fmt: skip
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    """Wrong arguments raise at once and are named."""
    (name,) = arguments
    with pytest.raises((TypeError, ValueError), match=f'"{name}" must be'):
        instrument.black_box(**arguments)
    assert not dispatch.recording


@pytest.mark.parametrize("behind", [1, 5, 150])
def test_a_worse_stall_is_not_missed(clock: Clock, make: Make, behind: int) -> None:
    """A stall of a second in the cooldown of one of 60 ms gives an alarm, also directly behind it."""
    alarms: list[int] = []
    box = make(on_slow=lambda slow: alarms.append(slow.step))
    for step in range(400):
        clock.advance({100: 60, 100 + behind: 1000, 101 + behind: 1000}.get(step, 10))
        box.step()
    assert alarms == [100, 100 + behind]
    assert [slow.step for slow in box.worst][:2] == [100 + behind, 101 + behind]


def test_a_worse_stall_after_the_cap(clock: Clock, make: Make) -> None:
    """A stall that is worse than all alarms of the last hour gives one, whatever their number."""
    alarms: list[int] = []
    box = make(cooldown=0, cap=2, on_slow=lambda slow: alarms.append(slow.step))
    for step in range(600):
        clock.advance({500: 543}.get(step, 45 + step % 7 if step % 37 == 36 else 10))
        box.step()
    assert len(alarms) == 3
    assert alarms[-1] == 500


def test_the_cap_refills(clock: Clock, make: Make) -> None:
    """The cap counts the alarms of an hour: a run of a day has them in each of its hours."""
    alarms: list[int] = []
    box = make(cap=3, on_slow=lambda slow: alarms.append(slow.step))
    random = Random(1)
    for _ in range(8 * 1200):  # steps of three seconds
        clock.advance(random.uniform(9000, 9900) if random.random() < 0.01 else 3000)
        box.step()
    assert all(1 <= len([step for step in alarms if step // 1200 == hour]) <= 4 for hour in range(8))
    assert box.alarms == len(alarms) >= 16


def test_steps_that_grow_slowly(clock: Clock, make: Make) -> None:
    """Stalls of which each is a little longer than the one before do not each count as a worse one."""
    box = make(cooldown=10_000, cap=5)
    for step in range(2000):
        clock.advance(40 + step / 20 if step % 31 == 17 else 10)
        box.step()
    assert 1 <= box.alarms <= 5


def test_no_alarm_is_a_cap_of_none(clock: Clock, make: Make) -> None:
    """With a cap of 0, no stall gives an alarm; each is noted."""
    box = make(cap=0)
    run(box, clock, 50)
    run(box, clock, 1, data=1000.0)
    assert (box.alarms, len(box.slow_steps), len(box.worst)) == (0, 1, 1)
