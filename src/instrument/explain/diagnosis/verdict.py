"""The verdict: the parts of a step and what bounds it; its goodput, and how much longer recording made it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from ...base.run_folder import entries_of, entry_of
from ...base.units import counted, duration
from ...read.measures.timing import Timing
from ...read.memory.snapshot import peak_text
from ...read.tables.intervals import total_ns
from ...read.tables.table import Array, Table
from ..metrics.idle import CAUSES, INPUT
from ..metrics.matmul_table import tile_of
from ..metrics.operator_work import HEAVY
from ..metrics.steps import CPU_PARTS, cpu_parts
from ..metrics.tables import one_of
from ..replay.step_waits import CLOSE, StepWaits
from ..rules.trace_facts import TraceFacts
from .chosen_trace import FORMAT
from .longest import outermost_regions

Bound = Literal["overhead", "compute", "memory", "communication", "copies", "input", "synchronization", "latency"]

PARTS = {
    "compute": "kernels that compute, and memsets",
    "communication": "communication while nothing computes",
    "copies": "memcpys while nothing computes or communicates",
    "input": "an idle GPU while the loop waits for its next batch",
    "synchronization": "an idle GPU after the CPU has waited for it",
    "overhead": "an idle GPU while the CPU launches, compiles, allocates or collects garbage",
    "latency": "an idle GPU between kernels that were launched in time, in gaps of less than 30 us",
    "other": "an idle GPU while the driver starts, or for a reason that the trace does not show",
}
"""The parts of the recorded time, which add up to it exactly."""

_ELSEWHERE = "idles while the CPU does something other than launching its work"
_OVERHEAD = {
    "launch_overhead": "idles because the CPU is too slow to launch its work",
    "compilation": "idles while torch.compile compiles",
    "garbage_collection": "idles while Python collects garbage",
    "allocation": "idles while the driver allocates or frees memory",
    "module_loading": "idles while the driver loads the code of kernels",
}
_ON_CPU = {
    "compilation": "torch.compile to compile",
    "garbage_collection": "Python to collect garbage",
    "initialization": "a driver call of over 100 ms, as when the driver starts",
    "allocation": "the driver to allocate or free memory",
    "module_loading": "the driver to load the code of kernels",
    "optimizer": "the CPU to run the optimizer",
    "operators": "the CPU to launch work",
    "between_operators": "the CPU, mostly between operators (Python or other code)",
}
_OTHER = ("initialization", "other", "unknown")
PART_OF_CAUSE = {
    "input": "input",
    "synchronization": "synchronization",
    "launch_latency": "latency",
    **dict.fromkeys(_OVERHEAD, "overhead"),
    **dict.fromkeys(_OTHER, "other"),
}
"""The part to which each cause of idle time belongs."""
_COMPUTE, _MEMORY = ("gemm", "convolution", "attention"), (
    "normalization", "softmax", "elementwise", "reduction", "copy", "optimizer", "embedding", "memory",
)  # fmt: skip
_THIN = 16  # rows of a tile: a matmul with so few rows spends its time reading its other factor
_LEAST = 1 / 3  # of the step: a smaller part does not bound it
_UNEVEN, _LISTED_GPUS = 0.2, 8  # of the window; the GPUs of a process that are named
_COVERAGE = 0.5  # of the kernels' time: with less known, compute and memory are not distinguished

_WAITS: dict[Bound, str] = {
    "input": "the next batch",
    "synchronization": "work that the CPU does late because it waited for the GPU",
    "communication": "communication",
    "compute": "kernels limited by arithmetic",
    "memory": "kernels limited by memory bandwidth",
    "copies": "copies",
    "latency": "the delays before GPU work",
}
_SENTENCES: dict[Bound, str] = {
    "input": "idles while the loop waits for the next batch",
    "synchronization": "idles after calls that make the CPU wait for it",
    "communication": "communicates without computing",
    "compute": "runs kernels limited by arithmetic",
    "memory": "runs kernels limited by memory bandwidth",
}


@dataclass(frozen=True)
class Verdict:
    """What bounds a step.

    Attributes:
        bound: the class without which a step is shortest in a replay, where compute is split by what limits the
            kernels. Of classes that win the same within 5 % of a step, it is the one with most time on the path;
            None if no class wins 5 %. Where the replay abstains, it is the part with the largest share of the
            time; None if that has no third of it, if latency or other is larger, or if the evidence is missing.
        text: the verdict in one sentence.
        parts: the time of each of `PARTS` per step in ns; they add up to the step.
        coverage: why it abstains, or on what it rests.
        waits: what a step waits for; None where the verdict is by how busy the GPU is.
    """

    bound: Bound | None
    text: str
    parts: Mapping[str, int]
    coverage: str
    waits: StepWaits | None = None


def verdict_of(facts: TraceFacts) -> Verdict:
    """Return what bounds the recorded steps."""
    if uses_no_gpu(facts):
        return cpu_verdict(facts)
    if facts.unknown_gpu:
        return Verdict(None, _without_gpu(facts), {}, facts.unknown_gpu)
    parts = _parts(facts)
    if facts.step_waits is not None:
        return _of_replay(facts, facts.step_waits, {name: facts.per_step(ns) for name, ns in parts.items()})
    return _of_busy_gpu(facts, parts)


def _of_replay(facts: TraceFacts, waits: StepWaits, parts: Mapping[str, int]) -> Verdict:
    """Return the verdict by what the steps wait for, and what they win without it."""
    percent = 100 / max(facts.step_ns, 1)
    named = waits.bounds(facts.step_ns)
    if not named:
        return _of_balance(facts, waits, parts)
    _, evidence = _memory_share(facts)
    bounds = [bound_of(facts, name) for name in named]
    said = [
        f"{waits.parts[name] * percent:.0f} % {verb}for {_waited_for(waits, bound)} "
        f"({waits.wins[name] * percent:.0f} % shorter without)"
        for name, bound, verb in zip(named, bounds, ("is waiting ", ""), strict=False)
    ]
    text = f"Bound by {bounds[0] or 'kernels'}: of {_what(facts)}, {', '.join(said)}." + _uneven_gpus(facts)
    coverage = _evidence_of_replay(facts) + f"; compute or memory: {evidence}" * ("compute" in named)
    return Verdict(bounds[0], text, parts, coverage, waits)


def bound_of(facts: TraceFacts, name: str) -> Bound | None:
    """Return the bound by the name of a class of the critical path; None for kernels whose limit is unknown."""
    if name != "compute":
        return cast(Bound, name)
    memory, _ = _memory_share(facts)
    return None if memory is None else "memory" if memory > 1 / 2 else "compute"


def _of_balance(facts: TraceFacts, waits: StepWaits, parts: Mapping[str, int]) -> Verdict:
    """Return the verdict where no class of work alone wins 5 % of a step."""
    name, most = max(waits.wins.items(), key=lambda item: item[1])
    share = 100 * most / max(facts.step_ns, 1)
    wins = f"wins more than {share:.1f} % alone ({name})" if share >= 0.05 else "wins anything alone"
    text = f"No single bound: in {_what(facts)}, several things take about equally long: no class of work {wins}."
    return Verdict(None, text + _uneven_gpus(facts), parts, _evidence_of_replay(facts), waits)


def _evidence_of_replay(facts: TraceFacts) -> str:
    error = 100 * float(np.median(facts.replayer.errors))
    what = "steps" if facts.trace.steps else "recording"
    return f"replays of the {what} without each class of work; without a change, the replay is {error:.1f} % off"


def _waited_for(waits: StepWaits, bound: Bound | None) -> str:
    if bound is None:
        return "kernels; it is unknown whether arithmetic or memory limits them"
    if bound != "overhead":
        return _WAITS[bound]
    return _ON_CPU[max(waits.work, key=lambda name: waits.work[name])]


def _longest_cause(facts: TraceFacts, causes: Collection[str]) -> str | None:
    """Return the cause of most idle time; None for late launches in gaps too long for what launches cost."""
    cause = max(causes, key=facts.idle.total)
    return None if cause == "launch_overhead" and facts.idle.long_gaps(cause) is not None else cause


def _of_busy_gpu(facts: TraceFacts, parts: Mapping[str, int]) -> Verdict:
    """Return the verdict by how busy the GPU is."""
    memory, coverage = _memory_share(facts)
    busy = parts["compute"]
    named: tuple[Bound, ...] = ("input", "synchronization", "overhead", "communication")
    classes: dict[Bound, float] = {name: parts[name] for name in named}
    if memory is None:
        classes["memory"] = parts["copies"]
    else:
        classes |= {"compute": busy * (1 - memory), "memory": busy * memory + parts["copies"]}
    window = max(facts.window_ns, 1)
    order = sorted(classes, key=lambda name: -classes[name])
    bound: Bound | None = order[0]
    per_step = {name: facts.per_step(ns) for name, ns in parts.items()}
    rest = max(("latency", "other"), key=lambda name: parts[name])
    if parts[rest] >= max(_LEAST * window, classes[order[0]], busy if memory is None else 0):
        bound, coverage = None, _of_rest(facts, rest, parts[rest] / window)
    elif memory is None and busy > classes[order[0]]:
        bound, coverage = None, "whether compute or memory limits the kernels is unknown: " + coverage
    elif classes[order[0]] < _LEAST * window:
        bound, coverage = None, "no part takes a third of the time"
    text = _sentence(facts, bound, order, classes, parts) + _uneven_gpus(facts)
    return Verdict(bound, text, per_step, coverage)


def definition_of_part(name: str, gpu: bool) -> str:
    """Return what a part of the step is, in a trace with or without work of a GPU."""
    return PARTS[name] if gpu else CPU_PARTS[name]


def _of_rest(facts: TraceFacts, name: str, share: float) -> str:
    """Return why a step has no bound whose largest part is latency or other."""
    what = PARTS[name]
    if name == "other":
        what = f"the GPU idles while {CAUSES[max(_OTHER, key=facts.idle.total)]}"
    return f"{'most' if share > 0.5 else f'{100 * share:.0f} %'} of the time is {name}: {what}"


def _parts(facts: TraceFacts) -> dict[str, int]:
    done = facts.activity
    compute, working, busy = map(total_ns, (done.compute, done.working, done.busy))
    parts = dict.fromkeys(PARTS, 0) | {
        "compute": compute,
        "communication": working - compute,
        "copies": busy - working,
    }
    for cause, ns in facts.idle.totals().items():
        parts[PART_OF_CAUSE[cause]] += ns
    assert sum(parts.values()) == facts.window_ns
    return parts


def _memory_share(facts: TraceFacts) -> tuple[float | None, str]:
    """Return the share of the compute time that memory limits, and the evidence for it, in words."""
    line, kernels = facts.roofline, facts.kernels
    kernel_ns = int(kernels.duration_ns[~facts.communication[facts.kernel_rows]].sum())
    limits = _limits_by_name(kernels)
    by_roofline = [line.bound_ns("compute"), line.bound_ns("memory")]
    by_name = [int(kernels.duration_ns[limits == sign].sum()) for sign in (1, -1)]
    priced, named = (min(sum(parts) / kernel_ns, 1) if kernel_ns else 0 for parts in (by_roofline, by_name))
    if priced >= _COVERAGE:
        evidence = f"the rooflines of operators with {100 * priced:.0f} % of the GPU time"
        return by_roofline[1] / sum(by_roofline), evidence
    if named < _COVERAGE:
        return None, f"the limit is known only for kernels with {100 * named:.0f} % of the GPU time"
    evidence = f"the names of kernels with {100 * named:.0f} % of the GPU time; rooflines are known for "
    return by_name[1] / sum(by_name), f"{evidence}{100 * priced:.0f} %"


def _limits_by_name(kernels: Table) -> Array:
    """Return 1 for kernels that arithmetic limits by their family, -1 for those that memory limits, 0 if unknown.

    A matmul is judged by the tile in its name, and is unknown without one: a matmul of few rows, which memory
    limits, can take as long as one of many rows.
    """
    limits = one_of(kernels, "family", _COMPUTE).astype(int) - one_of(kernels, "family", _MEMORY)
    matmul = one_of(kernels, "family", ("gemm",))
    for code in np.unique(kernels.short_name[matmul]).tolist():
        name = kernels.strings[code]
        tile = (1, 1) if "gemv" in name.lower() else tile_of(name)
        limits[matmul & (kernels.short_name == code)] = 0 if tile is None else 1 if min(tile) > _THIN else -1
    return limits


def _sentence(
    facts: TraceFacts,
    bound: Bound | None,
    order: list[Bound],
    classes: Mapping[Bound, float],
    parts: Mapping[str, int],
) -> str:
    window, busy, copies = max(facts.window_ns, 1), parts["compute"], parts["copies"]
    what, said = _what(facts), _SENTENCES | {"overhead": _of_overhead(facts)}
    if copies > classes.get("memory", 0) / 2:
        said["memory"] = "copies data while nothing computes"
    if bound is None and "compute" not in classes and busy > (1 - _LEAST) * window:
        share = 100 * busy / window
        return f"For {share:.0f} % of {what}, the GPU computes; whether arithmetic or memory limits it is unknown."
    if bound is None:
        idle_ns = window - facts.busy_ns
        text = f"No clear bound, by how busy the GPU is: of {what}, the GPU idles {100 * idle_ns / window:.0f} %"
        for cause, ns in [*facts.idle.totals().items()][:1]:
            text += f" (mostly while {CAUSES[cause]})" if ns > max(idle_ns / 2, _LEAST * window) else ""
        return f"{text} and computes {100 * busy / window:.0f} %."
    second = order[1]
    share = 100 * classes[bound] / window
    text = f"Bound by {bound}, by how busy the GPU is: for {share:.0f} % of {what}, the GPU {said[bound]}"
    if classes[bound] - classes[second] < CLOSE * window:
        text += f"; for {100 * classes[second] / window:.0f} % it {said[second]}"
    return text + "."


def _uneven_gpus(facts: TraceFacts) -> str:
    """Return for how much of the window each GPU is busy, if they differ: the parts are those of all together."""
    window = max(facts.window_ns, 1)
    shares = {gpu: total_ns(facts.times_of(rows)) / window for gpu, rows in facts.gpus.items()}
    if max(shares.values(), default=0) - min(shares.values(), default=0) < _UNEVEN:
        return ""
    each = [f"GPU {gpu} is busy {100 * share:.0f} %" for gpu, share in shares.items()]
    return f" Of that time, {', '.join(each[:_LISTED_GPUS])}{', ...' * (len(each) > _LISTED_GPUS)}."


def _of_overhead(facts: TraceFacts) -> str:
    """Return the part of the sentence on overhead: what the CPU does meanwhile, by the longest cause."""
    cause = _longest_cause(facts, _OVERHEAD)
    return _OVERHEAD[cause] if cause else _ELSEWHERE


def _what(facts: TraceFacts) -> str:
    on = f" on {len(facts.gpus)} GPUs" if len(facts.gpus) > 1 else ""
    on += f" on rank {facts.trace.rank or 0}" if facts.job and facts.job.world_size > 1 else ""
    if not facts.trace.steps:
        return f"the {duration(facts.window_ns)} recorded{on}"
    if facts.steps == 1:
        return f"the recorded step of {duration(facts.step_ns)}{on}"
    steps = counted(facts.steps, "overlapping step" if facts.steps_overlap else "step")
    return f"{steps} of {duration(facts.step_ns)} each{on}"


def _without_gpu(facts: TraceFacts) -> str:
    if facts.trace.gpu:
        return f"The bound of {_what(facts)} is unknown: {facts.unknown_gpu}."
    left = sum(device.events for device in facts.trace.unread_devices.values())
    if left:
        names = ", ".join(facts.trace.unread_devices)
        return f"The GPU work is unknown: {counted(left, 'event')} of {names} could not be interpreted."
    if facts.trace.format == FORMAT and facts.snapshot is not None:  # which has no times
        return peak_text(facts.snapshot)
    if not facts.trace.operators and not facts.trace.regions:
        calls = counted(len(facts.trace.runtime), "call") + " of the runtime"
        seen = f", only {calls}: the profiler saw none of the work, which ran on another thread or at another time"
        return f"The trace has neither operators nor GPU work{seen if facts.trace.runtime else ''}."
    if not facts.trace.operators and not facts.trace.runtime:
        return f"The trace has {counted(len(facts.trace.regions), 'region')}, and neither operators nor GPU work."
    return "The trace has no GPU work, so what bounds the step is unknown."


CpuBound = Literal["input", "communication", "compute", "overhead"]
_LEAST_REGION = 0.1  # of the step: a smaller one explains nothing
_BOUND_BY: dict[CpuBound, str] = {
    "input": "The DataLoader bounds the step: the loop waits for it for",
    "communication": "Communication bounds the step: collectives take",
    "compute": "Operators on the CPU bound the step: they run for",
    "overhead": "Python bounds the step: no operator runs for",
}


def uses_no_gpu(facts: TraceFacts) -> bool:
    """Return whether a trace is of a program without a GPU, with operators; not one whose GPU work is lost."""
    trace = facts.trace
    return (
        bool(trace.operators) and not (trace.gpu or trace.runtime or trace.unread_devices) and facts.window_ns > 0
    )


def cpu_verdict(facts: TraceFacts) -> Verdict:
    """Return what bounds the steps of a program without a GPU."""
    parts = cpu_parts(facts.trace, facts.window)
    largest = max(_BOUND_BY, key=lambda name: parts[name])
    share = parts[largest] / facts.window_ns
    bound = largest if share >= _LEAST else None
    said = _BOUND_BY[bound] if bound else f"No clear bound: the largest part, {largest}, is"
    text = f"{said} {100 * share:.0f} % of {_what(facts)}"
    regions = [region for region in outermost_regions(facts) if not INPUT.search(region.name)]
    part = regions[0].cpu_ns / facts.step_ns if regions else 0.0
    if largest in ("compute", "overhead") and _LEAST_REGION <= part <= 1:
        text += f"; the largest region is {regions[0].name}, with {100 * part:.0f} %"
    elif largest in ("compute", "overhead") and part < _LEAST_REGION:
        text += ", most of it in no region: name its parts with instrument.annotate"
    per_step = {name: facts.per_step(ns) for name, ns in parts.items()}
    because = "what the thread of the loop does" if bound else "no part takes a third of the time"
    return Verdict(bound, f"{text}. No GPU is used.", per_step, because)


def timing_of(path: Path) -> Timing | None:
    """Return the timing of the window in this file, from the manifest beside it; None if there is none."""
    return with_steps_of_run(Timing.from_manifest(entry_of(path)), path)


def with_steps_of_run(timing: Timing | None, path: Path) -> Timing | None:
    """Return the timing of the window in this file, with the steps outside it.

    A window without a timed step around it, as the first of a run often is, has the steps around the other windows
    of the same run and rank.
    """
    if timing is None or timing.around_ns or (entry := entry_of(path)) is None:
        return timing
    for other in entries_of(path.absolute().parent.parent):
        same = all(other.get(key) == entry.get(key) for key in ("run", "rank"))
        if same and (neighbor := Timing.from_manifest(other)) and neighbor.around_ns:
            around = timing + neighbor
            timing = replace(
                timing,
                around_ns=around.around_ns,
                around_steps=around.around_steps,
                around_each_ns=around.around_each_ns,
            )
    return timing


def verdict_text(facts: TraceFacts, text: str | None = None) -> str:
    """Return a verdict, by default that of `verdict_of`, with how long recording made the steps, if it did."""
    text = verdict_of(facts).text if text is None else text
    stretch = facts.stretch
    if stretch is None or not stretch.differs:
        return text
    if stretch.ratio < 1:
        return f"{text} A recorded step took {stretch:.2f} times as long as the steps outside the window."
    return f"{text} Recording made a step {stretch:.2f} times as long."


_MOSTLY = 0.8  # of the time: with less known, the utilization would say too little


def goodput_of(facts: TraceFacts) -> dict[str, Any]:
    """Return the useful work of the window.

    ``flops`` are the operations of matmuls, attention and convolutions per step, ``recomputed_flops`` those that a
    backward pass computes again, ``mfu`` the time that the others would take at the peak of all GPUs / the time of
    the step, ``hfu`` the same with the recomputed ones, ``coverage`` the share of the kernels' time whose
    operations are known, and ``unknown`` why there is no ``mfu``. Above 1, the figures or the peak are wrong, as
    ``unknown`` says.
    """
    line = facts.roofline
    share, reason = _known_share(facts), None
    if facts.unknown_gpu:
        reason = facts.unknown_gpu
    elif facts.lacks_operators:
        reason = f"{facts.lacks_operators}: record with {facts.to_record(detail='full')}"
    elif not line.flops:
        shapes = facts.to_record(record_shapes=True)
        reason = f"no operator with known operations ran on the GPU: record with {shapes}"
    elif line.peak_ns is None:
        reason = "the peaks of the GPU are not known" if line.peak is None else "the peak of a type is not known"
    elif share < _MOSTLY:
        reason = f"the operations of only {100 * share:.0f} % of the time of matmuls and the like are known"
    mfu = hfu = None
    if not reason and line.peak_ns and facts.window_ns:
        whole_ns = facts.window_ns * max(len(facts.gpus), 1)
        hfu = line.peak_ns / whole_ns
        mfu = hfu - (line.recomputed_peak_ns or 0) / whole_ns
    if hfu is not None and hfu > 1:
        reason = "more operations than the peak allows: the recorded shapes or the peak cannot be right"
    return {
        "flops": facts.per_step(line.flops),
        "recomputed_flops": facts.per_step(line.recomputed_flops),
        "mfu": mfu,
        "hfu": hfu,
        "coverage": line.coverage,
        "peak": line.peak.name if line.peak else None,
        "unknown": reason,
    }


def _known_share(facts: TraceFacts) -> float:
    """Return the share of the time of matmuls, attention and convolutions whose operations are known."""
    gpu, line = facts.gpu, facts.roofline
    heavy = np.array([row.work.kind in HEAVY for row in line.rows] + [False])
    priced = heavy[line.of_work]
    either = priced | one_of(gpu, "family", _COMPUTE)
    return float(gpu.duration_ns[priced].sum() / max(gpu.duration_ns[either].sum(), 1))
