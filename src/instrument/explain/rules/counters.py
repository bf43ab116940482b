"""Rules on what sampled counters show: a clock that falls, and memory at its peak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...base.findings import Evidence, Finding, Fix
from ...base.units import duration, size
from ...read.tables.intervals import Intervals, covered_ns, integral
from ...read.tables.table import Array
from ..metrics.counters import ALONE, Counter
from .rule import rule
from .trace_facts import TraceFacts, require

_LEAST = 5  # samples of the clock while the GPU works
_SHORT = 0.05  # of the time: a clock that is only held so long does not count as held
_HIGHEST = 0.97  # of a limit, or of the highest power: the power is at it
_WARMER = 3  # degrees
_ASK = (
    "nvidia-smi -q -d PERFORMANCE says what holds the clock back (on AMD GPUs: amd-smi metric --throttle). If it "
    "is the heat: better cooling. If it is the power: a higher limit (nvidia-smi -pl WATTS), up to that of the "
    "board; else the clock is as high as this work allows."
)


class _Fall(NamedTuple):
    """A clock that falls while a GPU works.

    Attributes:
        device: the GPU.
        held_hz: the clock that it held before.
        low_hz: the mean of the clock since, where it is lower.
        low: when it is lower and the GPU works.
        lost: for each kernel of the window, the share of its time that the lower clock costs.
        lost_ns: the sum of these times.
        known: the share of the time of the kernels for which the clock is known.
    """

    device: int
    held_hz: float
    low_hz: float
    low: Intervals
    lost: Array
    lost_ns: float
    known: float


@rule("throttled-clock", gpu=True, share=0.02, of="compute")
def throttled_clock(facts: TraceFacts, *, fall: float = 0.05) -> Iterator[Finding]:
    """The clock of the multiprocessors falls while kernels run.

    Needs samples of the clock, such as torch 2.14 records with ``custom_profiler_config`` and
    ``enable_environment_counters``, or Nsight Systems with ``--gpu-metrics-devices``. The clock that counts as
    held is the highest at which 5 % of the GPU's work ran; what comes before that is a GPU that wakes up. An idle
    GPU may lower its clock: a sample counts if work runs at its instant and for 95 % of the time until the next
    one. The time to win is the time of each kernel in such samples times the missing share of the clock; kernels
    that communicate, or whose operators the memory bounds, do not count. If power and temperature were sampled,
    the finding says what they were, and whether the power was at its highest, if it was lower in other work, or at
    its limit, if that was sampled. A clock that is low in the whole window does not show.
    """
    clocks = {device: facts.counters.one("clock", device) for device in facts.gpus}
    require(any(clocks.values()), "the trace has no samples of the clock")
    falls = [_fall(facts, device, clock, fall) for device, clock in clocks.items() if clock is not None]
    require(any(falls), f"the clock was sampled less than {_LEAST} times while the GPU worked without a pause")
    worst = max((each for each in falls if each), key=lambda each: each.lost_ns)
    if not worst.lost_ns:
        return
    reason, evidence = _reason(facts, worst)
    where = f" of GPU {worst.device}" if len(facts.gpus) > 1 else ""
    held, low = (f"{hertz / 1e6:,.0f}" for hertz in (worst.held_hz, worst.low_hz))
    yield facts.finding(
        f"The clock{where} falls from {held} to {low} MHz while kernels run{reason}",
        Evidence("held_mhz", worst.held_hz / 1e6, "MHz", "Clock of the multiprocessors before it fell."),
        Evidence("low_mhz", worst.low_hz / 1e6, "MHz", "Its mean since, while it was lower and the GPU worked."),
        facts.step_time(
            "lost_ns", worst.lost_ns, f"Time of kernels{where} per step, times the missing share of the clock."
        ),
        evidence=evidence,
        win_ns=facts.gpu_win(facts.kernel_rows, worst.lost),
        confidence="medium",
        fix=Fix(_ASK),
        coverage=worst.known,
    )


def _fall(facts: TraceFacts, device: int, clock: Counter, fall: float) -> _Fall | None:
    """Return how the clock falls, with no lost time if it does not; None with too few samples."""
    starts, ends = clock.times
    works, in_work = _in_work(facts, device, clock)
    used = np.flatnonzero(in_work & (clock.values > 0))
    if len(used) < _LEAST:
        return None
    by_clock = used[np.argsort(-clock.values[used], kind="stable")]
    done = np.cumsum(works[by_clock])
    held = float(clock.values[by_clock[np.searchsorted(done, _SHORT * done[-1])]])
    first = used[np.argmax(clock.values[used] >= held)]
    low = used[(used > first) & (clock.values[used] < (1 - fall) * held)]
    missing = np.zeros(len(starts))
    missing[low] = 1 - clock.values[low] / held
    kernels = facts.kernels
    mine = np.isin(facts.kernel_rows, facts.gpus[device])
    counts = mine & ~facts.communication[facts.kernel_rows] & ~facts.by_memory[facts.kernel_rows]
    took = np.maximum(kernels.duration_ns, 1)
    lost = np.where(counts, integral(clock.times, missing, kernels.start_ns, kernels.end_ns) / took, 0)
    known_ns = covered_ns((starts[used], ends[used]), kernels.start_ns[mine], kernels.end_ns[mine]).sum()
    low_hz = float(np.average(clock.values[low], weights=works[low])) if len(low) else held
    known = float(known_ns / took[mine].sum()) if mine.any() else 0.0
    low_times = starts[low], ends[low]
    return _Fall(device, held, low_hz, low_times, lost, float((lost * kernels.duration_ns).sum()), min(known, 1.0))


def _in_work(facts: TraceFacts, device: int, counter: Counter) -> tuple[Array, Array]:
    """Return how long a GPU works in each sample, and which samples lie in its work, not in its pauses."""
    starts, ends = counter.times
    times = facts.times_of(facts.gpus[device])
    works = covered_ns(times, starts, ends)
    return works, (works >= ALONE * (ends - starts)) & (covered_ns(times, starts, starts + 1) > 0)


def _reason(facts: TraceFacts, fall: _Fall) -> tuple[str, list[Evidence]]:
    """Return what power and temperature say on a fall, in words and as evidence."""
    evidence, words = list[Evidence](), list[str]()
    power, limit, heat = (
        facts.counters.one(kind, fall.device) for kind in ("power", "power_limit", "temperature")
    )
    watts = power.mean(fall.low)[0] if power else None
    if power and watts is not None:
        evidence.append(Evidence("power_w", watts, "W", "Mean power while the clock was lower."))
        at_work = power.values[_in_work(facts, fall.device, power)[1]]
        most = limit.mean(fall.low)[0] if limit else None
        if most and watts >= _HIGHEST * most:
            words.append(f"the power at its limit ({watts:,.0f} of {most:,.0f} W)")
        elif len(at_work) and at_work.min() < _HIGHEST * at_work.max() <= watts:
            words.append(f"the power at its highest ({watts:,.0f} W)")
    celsius = heat.mean(fall.low)[0] if heat else None
    if heat and celsius is not None:
        evidence.append(Evidence("temperature_c", celsius, "C", "Mean temperature while the clock was lower."))
        coolest = float(heat.values.min())
        if celsius >= coolest + _WARMER:
            words.append(f"{celsius:.0f} C after {coolest:.0f} C")
    return f", with {' and '.join(words)}" if words else "", evidence


@rule("memory-at-peak", gpu=True)
def memory_at_peak(facts: TraceFacts, *, of_peak: float = 0.8, share: float = 0.1) -> Iterator[Finding]:
    """Kernels of one family move bytes as fast as the memory can.

    Needs samples of the traffic of the memory, several while the family runs alone: see `counted_families` of the
    metrics. Such kernels become shorter only if they move fewer bytes.
    """
    rows = [row for row in facts.counters.families if row["dram_share"] is not None]
    require(rows, "the trace has no samples of the memory's traffic while a family of kernels runs alone")
    for row in rows:
        gpu_ns = facts.per_step(row["kernel_ns"])
        if row["dram_share"] < of_peak or facts.share(gpu_ns) < share:
            continue
        rate = row["dram_bytes_per_s"]
        speed = "" if rate is None else f" ({size(rate)}/s)"
        where = f" on GPU {row['device']}" if len(facts.gpus) > 1 else ""
        yield facts.finding(
            f"Kernels of the family {row['family']}{where} use {100 * row['dram_share']:.0f} % of the memory's "
            f"bandwidth{speed}, {duration(gpu_ns)} {facts.each_step}",
            Evidence("dram_share", row["dram_share"], "1", "Sampled traffic / peak, while the family runs alone."),
            facts.step_time("gpu_ns", row["kernel_ns"], "Time during which such a kernel runs, per step."),
            severity="low",
            fix=Fix(
                "Move fewer bytes: fuse such kernels with torch.compile, use a smaller type, or recompute less. "
                "Other kernels for the same work will not be faster."
            ),
            coverage=min(row["dram_ns"] / row["kernel_ns"], 1.0),
        )
