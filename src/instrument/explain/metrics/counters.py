"""What sampled counters say: their means, SM activity and DRAM traffic of each kernel family, and energy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...base.trace_marks import SAMPLES
from ...read.tables.counters import UNITS
from ...read.tables.intervals import Intervals, covered_ns, integral, merge_overlaps, total_ns
from ...read.tables.lanes import distinct, group_rows
from ...read.tables.table import KERNEL, Array, Table
from ...read.tables.trace import Trace
from ...read.tables.work_classes import gpu_numbers
from .roofline import peak_of_trace
from .tables import Rows

_BOUND = re.compile(r"\b(?:limit|cap|max|min|target|threshold|default)", re.IGNORECASE)  # of a value
_KINDS = {
    "sm_active": ("share", re.compile(r"SMs? Active\b|sm__cycles_active\.")),
    "dram_share": ("share", re.compile(r"(?:DRAM|HBM) (?:BW|Read|Write)\b|(?:gpu__)?dram_+(?:\w+_)?throughput\.")),
    "dram_rate": ("rate", re.compile(r"(?:DRAM|HBM)(?: \d+)?[ /](?:BW|Read|Write)\b|dram__bytes")),
    "power": ("watts", re.compile(r"(?:GPU )?Power\b")),
    "power_limit": ("watts", re.compile(r"(?!.*\b(?i:min|max|default))(?:GPU )?Power\b.*\b(?:Limit|Cap)\b")),
    "clock": ("hertz", re.compile(r"(?:SM|GPC|AI Core) (?:Clock|Freq)")),
    "temperature": ("celsius", re.compile(r"(?:GPU )?Temperature\b")),
}
"""The counters that are judged, by the begin of their name and their unit: of torch, CUPTI, Nsight Systems and
torch_npu."""
_PART = re.compile("read|write", re.IGNORECASE)  # of the traffic
_STACK = re.compile(r"HBM \d")  # of the memory
_HELD = 1.5  # periods: what follows a longer gap is not known
ALONE = 0.95  # the share of a sample in which only the work in question runs, for the sample to count
_LEAST_SAMPLES, _LEAST_SHARE = 3, 0.1  # of a family's time, to be told
_KNOWN = 0.9  # of the window, for a sum over it
_MOST = 200  # counters; the others have fewer samples
_PLAUSIBLE = 1e18
_SHOWN = (("power", "Power", "W", 1), ("clock", "SM clock", "MHz", 1e-6), ("temperature", "Temperature", "C", 1))


@dataclass(frozen=True)
class Counter:
    """The values of one counter of one device. Each holds until the next, but for 1.5 periods at most.

    Attributes:
        name: the name in the file.
        unit: its unit there.
        device: the GPU; -1 if it is not known.
        samples: all values.
        times: when those hold that no other one of the same time replaces.
        values: these.
        period_ns: the median time from one value to the next; None of one value.
    """

    name: str
    unit: str
    device: int
    samples: Array
    times: Intervals
    values: Array
    period_ns: float | None

    def mean(self, times: Intervals) -> tuple[float | None, int]:
        """Return the mean over the part of these times for which it is known, and the length of that in ns."""
        known = int(covered_ns(self.times, *times).sum())
        sums = integral(self.times, self.values, *times).sum()
        return (float(sums) / known if known else None), known

    def mean_and_range(self, window: tuple[int, int]) -> tuple[float, float, float] | None:
        """Return the mean, the least and the greatest value in a window; None if nothing is known there."""
        start, end = window
        mean, _ = self.mean((np.array([start]), np.array([end])))
        inside = self.values[(self.times[0] < end) & (self.times[1] > start)]
        return None if mean is None else (mean, float(inside.min()), float(inside.max()))


class Counters:
    """The counters of a trace.

    Args:
        trace: the trace.

    Attributes:
        all: those with the most samples, in order of name.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        rows = trace.counters
        gpus = np.unique(gpu_numbers(trace.gpu)) if rows else np.empty(0, np.int64)
        self.gpus = gpus.tolist()
        device = np.where(rows.device < 0, gpus[0] if len(gpus) == 1 else -1, rows.device)
        _, of = distinct(rows.name, device) if rows else (None, device)
        groups = sorted((each for _, each in group_rows(of)), key=len, reverse=True)[:_MOST]
        self.all = sorted((_counter(rows, each, int(device[each[0]])) for each in groups), key=_place)

    def of(self, kind: str, device: int) -> list[Counter]:
        """Return the counters of a kind on a device, in SI units.

        Several are parts: what is read and what is written, or the stacks of the memory.
        """
        quantity, pattern = _KINDS[kind]
        found: dict[tuple[bool, bool], list[Counter]] = {}
        for each in self.all:
            measures, scale = UNITS.get(each.unit, ("", 0.0))
            is_bound = _BOUND.search(each.name) is not None
            asked = (each.device, measures, is_bound) == (device, quantity, kind == "power_limit")
            if asked and pattern.match(each.name):
                part = _PART.search(each.name) is not None, _STACK.match(each.name) is not None
                found.setdefault(part, []).append(replace(each, values=each.values * scale))
        if not found:
            return []
        first = min(found)  # the whole before its parts
        return found[first] if any(first) else found[first][:1]

    def one(self, kind: str, device: int) -> Counter | None:
        """Return the counter of a kind on a device; None without one."""
        return next(iter(self.of(kind, device)), None)

    def table(self) -> Rows:
        """Return each counter with its number of samples, their period, mean, least and greatest value."""
        return [
            {
                "name": each.name,
                "device": each.device,
                "unit": each.unit,
                "samples": len(each.samples),
                "period_ns": each.period_ns,
                "mean": float(each.samples.mean()),
                "min": float(each.samples.min()),
                "max": float(each.samples.max()),
            }
            for each in self.all
            if len(each.samples)
        ]

    @cached_property
    def families(self) -> Rows:
        """The kernel families of each GPU with SM activity and DRAM traffic while they run alone."""
        peak = peak_of_trace(self.trace)
        most = peak.memory_bytes_per_s if peak else None
        rows = list[dict[str, Any]]()
        for device, own in group_rows(gpu_numbers(self.trace.gpu)) if self.all else ():
            active, share, rate = (self.of(kind, device) for kind in ("sm_active", "dram_share", "dram_rate"))
            if not (active or share or rate):
                continue
            work = self.trace.gpu.where(own)
            kernel = work.category == KERNEL
            for family in np.unique(work.family[kernel]).tolist():
                mine = kernel & (work.family == family)
                times, others = (merge_overlaps(work.start_ns[at], work.end_ns[at]) for at in (mine, ~mine))
                sm_active, sm_ns = _alone(active, times, others)
                dram_share, dram_ns = _alone(share, times, others)
                bytes_per_s, rate_ns = _alone(rate, times, others)
                if bytes_per_s is None and dram_share is not None and most:
                    bytes_per_s = dram_share * most
                if dram_share is None and bytes_per_s is not None and most:
                    dram_share = bytes_per_s / most
                rows.append(
                    {
                        "device": device,
                        "family": work.strings[family],
                        "kernel_ns": total_ns(times),
                        "sm_active": sm_active,
                        "sm_active_ns": sm_ns,
                        "dram_share": dram_share,
                        "dram_bytes_per_s": bytes_per_s,
                        "dram_ns": max(dram_ns, rate_ns),
                    }
                )
        return rows

    def known(self) -> float | None:
        """Return the share of the kernels' time in samples of SM activity or DRAM traffic of their family."""
        of_ns = sum(row["kernel_ns"] for row in self.families)
        known_ns = sum(max(row["sm_active_ns"], row["dram_ns"]) for row in self.families)
        return known_ns / of_ns if of_ns else None

    def energy(self, window: tuple[int, int] | None, steps: int) -> tuple[dict[str, float | None], float | None]:
        """Return the power in a window, the energy in it, of a step and of a sample, and the share that is known.

        Args:
            window: its start and end in ns.
            steps: how many it has.
        """
        start, end = window or (0, 0)
        times = np.array([start]), np.array([end])
        powers = [self.of("power", device) for device in self.gpus]
        means = [part.mean(times) for parts in powers for part in parts[:1]]
        all_ns = len(powers) * (end - start)
        share = sum(ns for _, ns in means) / all_ns if means and all_ns else None
        known = [mean for mean, _ in means if mean is not None]
        watts = sum(known) if known and len(known) == len(powers) else None
        joules = watts * (end - start) / 1e9 if watts is not None and share and share >= _KNOWN else None
        per_step = joules / steps if joules is not None and steps else None
        told = str(self.trace.metadata.get(SAMPLES, ""))
        per_sample = per_step / int(told) if per_step is not None and told.isdecimal() and int(told) else None
        each = {"joules_per_step": per_step, "joules_per_sample": per_sample}
        return {"watts": watts, "joules": joules} | each, share

    def text(self, window: tuple[int, int], steps: int) -> str:
        """Return power, energy, clock and temperature in a window as a sentence; empty without samples of them.

        Args:
            window: its start and end in ns.
            steps: how many it has.
        """
        parts = list[str]()
        joules = self.energy(window, steps)[0]["joules_per_step"]
        for kind, word, unit, scale in _SHOWN:
            found = filter(None, (self.one(kind, device) for device in self.gpus))
            means = [mean for each in found if (mean := each.mean_and_range(window))]
            if not means:
                continue
            mean, least, most = np.array(means).T * scale
            shown = [f"{value:,.0f}" for value in (mean.mean(), least.min(), most.max())]
            between = f" ({shown[1]} to {shown[2]})" if shown[1] != shown[2] else ""
            parts.append(f"{word} {shown[0]} {unit}{between}")
            if kind == "power" and joules is not None:
                parts[-1] += f", {joules:{',.0f' if joules >= 100 else '.3g'}} J a step"
        each = f"Mean of {len(self.gpus)} GPUs, energy of all: " if len(self.gpus) > 1 else ""
        return f"{each}{'; '.join(parts)}." if parts else ""


def _place(counter: Counter) -> tuple[str, int]:
    return counter.name, counter.device


def _counter(rows: Table, own: Array, device: int) -> Counter:
    """Return the counter with these rows, which are in order of time."""
    name, unit = (rows.strings[rows[column][own[0]]] for column in ("name", "unit"))
    own = own[np.abs(rows.value[own]) < _PLAUSIBLE]
    start, duration, values = (rows[name][own] for name in ("start_ns", "duration_ns", "value"))
    apart = np.diff(start)
    period = float(np.median(apart[apart > 0])) if apart.any() else None
    held = np.minimum(np.append(apart, [period or 0] * (len(own) > 0)), _HELD * (period or 0)).astype(np.int64)
    lasts = np.where(duration > 0, np.minimum(duration, np.append(apart, duration[-1:])), held)
    good = lasts > 0
    return Counter(name, unit, device, values, (start[good], (start + lasts)[good]), values[good], period)


def _alone(parts: Sequence[Counter], times: Intervals, others: Intervals) -> tuple[float | None, int]:
    """Return the sum of the means of counters over the samples in which a family runs alone, and their time in ns.

    None if they are few: a period longer than the kernels, and than runs of kernels of the family, has none.
    """
    total, least_ns = 0.0, total_ns(times)
    for each in parts:
        starts, ends = each.times
        took, own, other = ends - starts, covered_ns(times, starts, ends), covered_ns(others, starts, ends)
        alone = (own >= ALONE * took) & (other <= (1 - ALONE) * took)
        known_ns = int(own[alone].sum())
        if alone.sum() < _LEAST_SAMPLES or known_ns < _LEAST_SHARE * total_ns(times):
            return None, known_ns
        total += float((each.values[alone] * took[alone]).sum() / took[alone].sum())
        least_ns = min(least_ns, known_ns)
    return (total, least_ns) if parts else (None, 0)
