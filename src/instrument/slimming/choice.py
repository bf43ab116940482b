"""Chooses what a slim trace keeps: what a metric, a rule or the replay reads."""

from __future__ import annotations

import re

import numpy as np

from ..diagnosis.diagnosis_data import DiagnosisData
from ..diagnosis.idle_causes import COLLECTION, COMPILATION, INPUT
from ..diagnosis.memory_use import OPTIMIZER
from ..diagnosis.rules.compiled import LOOK_UP, REGION
from ..traces.table import Array, Table
from ..traces.trace import Trace
from .frames import kept_frames
from .gpu import kept_gpu, kept_runtime, kept_syncs, named_by_external
from .memory import ARGS, kept_memory
from .operators import kept_operators
from .parts import ALL_ARGS, Part, extremes, part

_MARK = re.compile("^instrument_steps=")
_NAMED = (INPUT, COMPILATION, COLLECTION, OPTIMIZER, REGION, LOOK_UP, _MARK)


def chosen_parts(trace: Trace, diagnosis: DiagnosisData) -> dict[str, Part]:
    """Return what stays of each table.

    Args:
        trace: the trace as it was read.
        diagnosis: its diagnosis, whose facts say where it looked.
    """
    facts, rules = diagnosis.facts, {found.rule for found in diagnosis.findings}
    if facts is None:
        raise ValueError("only a diagnosis from instrument.diagnose says where it looked")
    named = named_by_external(trace)
    begin, end = _whole(trace)
    edges = {name: extremes(table, begin, end) for name, table in _tables(trace).items()}
    memory = kept_memory(trace, facts.memory_events) | edges["memory"]
    return {
        "steps": part(trace.steps, np.ones(len(trace.steps), bool)),
        "regions": part(trace.regions, np.ones(len(trace.regions), bool)),
        "others": part(trace.others, _named(trace) | edges["others"]),
        "frames": part(trace.frames, kept_frames(facts) | edges["frames"]),
        "operators": kept_operators(trace, named),
        "runtime": kept_runtime(facts, named, queries="occupancy-queries" in rules),
        "gpu": kept_gpu(trace, named),
        "gpu_regions": part(trace.gpu_regions, edges["gpu_regions"]),
        "syncs": kept_syncs(trace),
        "memory": part(trace.memory, memory, ((ARGS, True),)),
        "counters": part(trace.counters, edges["counters"], ((ALL_ARGS, True),)),
    }


def _tables(trace: Trace) -> dict[str, Table]:
    return {name: value for name, value in vars(trace).items() if isinstance(value, Table)}


def _whole(trace: Trace) -> tuple[int, int]:
    """Return the first start and the last end of all events, which are the window of some metrics."""
    some = [table for table in _tables(trace).values() if table]
    if not some:
        return 0, 0
    return min(int(table.start_ns[0]) for table in some), max(int(table.end_ns.max()) for table in some)


def _named(trace: Trace) -> Array:
    """Return a mask of the other events that a rule knows by name, or of all that last if a device is not read."""
    others = trace.others
    if trace.unread_devices:
        return others.duration_ns > 0
    found = np.zeros(len(others), bool)
    for pattern in _NAMED:
        found |= others.matching("name", pattern)
    return found
