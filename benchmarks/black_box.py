"""The cost of the black box and of ``on_steps``, as ratios, and the detections of the box: ``make bench``.

The detections are of simulated times, as steps of this machine have stalls of its own.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from measure import ROUNDS, medians, show, verdict
from torch.profiler import ProfilerActivity

import instrument
from instrument.record.regions.region import make
from instrument.record.slow_steps import step_clock
from instrument.record.slow_steps.box import BlackBox

STEPS = 2_000
RUNS = 40
STALL_EVERY = 50
Series = Callable[[random.Random], Iterator[float]]


def costs() -> None:
    """Measure a step, and the boundaries of a phase."""
    region, other = (make(name, None, None, None, None) for name in ("forward", "block"))
    annotated = instrument.annotate("forward")(lambda: None)
    idle = medians({"idle": annotated}, 2000)["idle"]
    schedule = torch.profiler.schedule(wait=10**9, warmup=1, active=1)
    torchs = torch.profiler.profile(activities=[ProfilerActivity.CPU], schedule=schedule)
    with instrument.black_box(slow=1e9) as box, torchs:  # no step of a benchmark is slow
        clock = box.clock

        def phase() -> None:
            clock.pop(clock.push(region))

        def no_phase() -> None:
            clock.pop(clock.push(other))

        def nothing() -> None:
            ignore(ignore(region))

        box.step()  # ends the search for steps
        candidates = {
            "torch.profiler.profile.step": torchs.step,
            "box.step": box.step,
            "a phase: push and pop": phase,
            "another region: push and pop": no_phase,
            "two calls of an empty function": nothing,
            "@annotate, a phase": annotated,
        }
        times = medians(candidates, 1000)
    show("The black box", times, "torch.profiler.profile.step")
    boundary = (times["a phase: push and pop"] - times["two calls of an empty function"]) / 2
    verdict("box.step() to torch's prof.step()", times["box.step"] / times["torch.profiler.profile.step"], 1 / 20)
    verdict("a boundary of a phase", boundary, 150, "ns")
    print(f"        with the call of the emitter: {(times['@annotate, a phase'] - idle) / 2:.0f} ns")


def numbers() -> None:
    """Measure what ``on_steps`` adds to a step between two calls, and a call: 100,000 trivial steps of each."""
    far = instrument.every(100_000, ignore)
    never = instrument.schedule(at=10**9, active=1)
    with ExitStack() as loops, TemporaryDirectory() as folder:

        def box(**options: Any) -> Callable[[], object]:
            return loops.enter_context(instrument.black_box(slow=1e9, **options)).step

        def profile(**options: Any) -> Callable[[], object]:
            prof = loops.enter_context(instrument.profile(folder, schedule=never, **options))
            if prof._profile_box is not None:
                prof._profile_box.box.usual.slow = 1e9  # no step of a benchmark is slow
            return prof.step

        candidates = {
            "box.step": box(),
            "box.step, on_steps": box(on_steps=far),
            "box.step, on_steps every 100 steps": box(on_steps=ignore),
            "prof.step": profile(),
            "prof.step, black_box": profile(black_box=True),
            "prof.step, black_box and on_steps": profile(black_box=True, on_steps=far),
            "prof.step, on_steps": profile(on_steps=far),
        }
        for step in candidates.values():
            step()  # ends the search for steps
        times = medians(candidates, 100_000 // ROUNDS)
    show("on_steps", times, "prof.step")
    for name in ("box.step", "prof.step, black_box"):
        joined = f"{name}, on_steps" if name == "box.step" else f"{name} and on_steps"
        verdict(f"on_steps beside {name}", times[joined] - times[name], 100, "ns")
    alone = times["prof.step, on_steps"]
    verdict("prof.step: on_steps alone to a black box", alone / times["prof.step, black_box"], 1.1)
    print(f"        on_steps alone adds {alone - times['prof.step']:.0f} ns to prof.step")
    each = times["box.step, on_steps every 100 steps"] - times["box.step, on_steps"]
    print(f"        a call with the numbers of 100 steps: {each / 10:.0f} us")


def ignore(_: object) -> None:
    """Do nothing, as the least that an emitter can do."""


def noisy(sigma: float, drift: float = 1.0, every: int = 0) -> Series:
    """Return steps with lognormal noise, slower by ``drift`` at the end; one in ``every`` takes four times."""

    def series(rng: random.Random) -> Iterator[float]:
        for step in range(STEPS):
            level = 1 + (drift - 1) * step / STEPS
            yield level * rng.lognormvariate(0, sigma) * (4 if every and step % every == every - 1 else 1)

    return series


def simulate(durations: Iterator[float]) -> BlackBox:
    """Return a box after steps of these durations, in units of 10 ms."""
    now = 0
    with mock.patch.object(step_clock, "perf_counter_ns", lambda: now):
        box = BlackBox()
        box.start()
        for duration in durations:
            now += int(duration * 1e7)
            box.end_step()
        box.stop()
    return box


def detection() -> None:
    """Count false alarms and slow steps of loops without stalls, then the stalls found."""
    loops = {
        "quiet": noisy(0.02),
        "noise 10 %": noisy(0.1),
        "noise 20 %": noisy(0.2),
        "noise 30 %": noisy(0.3),
        "noise 10 %, 2 x slower at the end": noisy(0.1, 2.0),
        "noise 20 %, 2 x slower at the end": noisy(0.2, 2.0),
    }
    print(f"\nDetection, {RUNS} runs of {STEPS:,} steps each; stalls of 2 to 10 times the median")
    for name, series in loops.items():
        alarms, false, found, exact = [], [], [], []
        for seed in range(RUNS):
            box = simulate(series(random.Random(seed)))
            alarms.append(box.alarms)
            false.append(len(box.slow_steps))
            for hits, least, most in ((found, 2, 10), (exact, 2, 2)):
                rng = random.Random(seed)
                at = {step + rng.randrange(20) for step in range(100, STEPS - 20, STALL_EVERY)}
                stalled = [
                    took + (rng.uniform(least, most) if step in at else 0)
                    for step, took in enumerate(series(random.Random(seed)))
                ]
                box = simulate(iter(stalled))
                slow = {slow.step for slow in box.slow_steps}
                hits.append(len(slow & at) / len(at))
        per_1000 = 1000 / STEPS
        print(
            f"  {name:36} slow {statistics.mean(false) * per_1000:5.2f} and alarms "
            f"{statistics.mean(alarms) * per_1000:5.2f} in 1,000 steps without a stall; found "
            f"{statistics.mean(found):6.1%}, of 2 x alone {statistics.mean(exact):6.1%}"
        )
        verdict(f"{name}: false alarms in 1,000 steps", statistics.mean(alarms) * per_1000, 1, "")
        verdict(f"{name}: stalls not found", 1 - statistics.mean(found), 0.05, "")
    for every in (50, 100, 250):
        alarms = [simulate(noisy(0.1, every=every)(random.Random(seed))).alarms for seed in range(RUNS)]
        print(f"  one step in {every} takes 4 times: {statistics.mean(alarms):.1f} alarms in {STEPS:,} steps")


if __name__ == "__main__":
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, medians of {ROUNDS} rounds")
    costs()
    numbers()
    detection()
