"""`diagnose`: reads a trace, applies the rules, and says what is slow and what a fix would win."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ...base.errors import TraceError
from ...base.run_folder import COMPILE_LOG, Phase, entry_of, phases_beside
from ...base.trace_marks import OPENED_BY
from ...read.measures.region_steps import with_steps
from ...read.measures.timing import Timing
from ...read.profilers.compile_log import PATTERN, CompileLog, read_compile_logs
from ...read.tables.notes import about_ranks
from ...read.tables.work_classes import Collectives, compile_collectives
from ..rules import (
    allocator,
    attention,
    communication,
    compiled,
    copies,
    counters,
    fusion,
    host,
    idle,
    matmul,
    memory,
    ranks,
    recording,
    recurring,
    utilization,
)
from ..rules.rule import RULES, Rule, apply_rules, load_rules, rule
from ..rules.trace_facts import TraceFacts
from .chosen_trace import Source, chosen_trace, snapshot_of
from .diagnosis import Diagnosis
from .longest import longest_gaps, outermost_regions
from .verdict import Verdict, goodput_of, timing_of, verdict_of, verdict_text

__all__ = ["Diagnosis", "diagnose", "rule"]  # from here, so that a user's rule comes after those of the library

BUILT_IN = (
    idle, host, copies, utilization, matmul, attention, fusion, compiled, memory,
    allocator, communication, ranks, recurring, recording, counters,
)  # fmt: skip
"""The modules that define rules, in the order of docs/rules.md."""
_LIBRARY = dict(RULES)


def diagnose(
    trace: Source,
    *,
    ignore: Collection[str] = (),
    thresholds: Mapping[str, Mapping[str, float]] | None = None,
    collectives: Collectives = "auto",
    steps_from: str | None = None,
    rank: int | None = None,
    executor: Executor | None = None,
    compile_log: str | os.PathLike[str] | None = None,
    what_if: bool = True,
    timing: Timing | None = None,
) -> Diagnosis:
    """Return what is slow in a trace, why, and what a fix would win.

    Of several ranks, the one that the others wait for is diagnosed, else the one that takes longest; the files are
    read one after the other, so that any number of ranks fits into memory. Of the folder of a run, the last window
    is read; `Diagnosis.source` says which file was chosen. The manifest beside the trace says how long steps take
    outside the window.

    Args:
        trace: a trace or its path; or the ranks of one job: their traces, their paths, a folder, or a pattern.
        ignore: the names of rules to leave out.
        thresholds: by rule, the thresholds to change: ``{"input-wait": {"share": 0.1}}``.
        collectives: which kernels communicate, as in `instrument.metrics`.
        steps_from: a regular expression for the names of the regions that are the steps; without it, a trace
            without steps takes the one outermost region that repeats and takes most of the time.
        rank: the rank to diagnose, of several.
        executor: reads the files of several ranks; by default processes of this machine, one for each core.
        compile_log: the structured log of torch.compile, a file or the folder that ``TORCH_TRACE`` named; by
            default the logs beside the trace, and those that the windows of a run wrote (``compile_log=True``).
        what_if: whether the steps are replayed without the cause of each finding that may be worth more than 1 %
            of a step; findings are then ordered by the time that the replay wins. The verdict and the plan rest on
            replays in any case.
        timing: how long steps take outside the window, by default as the manifest says.

    Raises:
        TypeError: an argument has another type.
        ValueError: a rule, a threshold, a rank or a region does not exist, or a regular expression is invalid.
        TraceError, OSError: the file cannot be read.
    """
    thresholds = {} if thresholds is None else thresholds
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise TypeError(f'"executor" must be a concurrent.futures.Executor: {executor!r:.200}')
    broken = {name: repr(error) for name, error in load_rules()}
    rules = chosen_rules(ignore, thresholds)
    read = read_facts(
        trace,
        collectives=collectives,
        steps_from=steps_from,
        rank=rank,
        executor=executor,
        compile_log=compile_log,
        timing=timing,
    )
    diagnosis = diagnosis_of(read.facts, rules, thresholds, what_if=what_if)
    return replace(
        diagnosis,
        failed=broken | dict(diagnosis.failed),
        ignored=tuple(ignore),
        replaced=tuple(each.name for each in rules if _LIBRARY.get(each.name, each) is not each),
        tuned={name: dict(values) for name, values in thresholds.items()},
        source=read.source,
        view=(*_option("--steps-from", steps_from), *_option("--collectives", collectives)),
        phases=_phases(read.facts.trace.path) if read.source else (),
        left_out={str(path): reason for path, reason in read.left_out.items()},
    )


def _option(name: str, given: object) -> tuple[str, ...]:
    return (name, given) if isinstance(given, str) and given != "auto" else ()


class ReadFacts(NamedTuple):
    """What is known of a trace.

    Attributes:
        facts: the facts of the trace.
        source: which file was chosen, in words; empty if it was named.
        left_out: the files and folders that were not read, each with the reason.
    """

    facts: TraceFacts
    source: str
    left_out: Mapping[Path, str]


def read_facts(
    trace: Source,
    *,
    collectives: Collectives = "auto",
    steps_from: str | None = None,
    rank: int | None = None,
    executor: Executor | None = None,
    compile_log: str | os.PathLike[str] | None = None,
    timing: Timing | None = None,
) -> ReadFacts:
    """Return the facts of a trace with all that lies beside it; arguments and errors are those of `diagnose`."""
    pattern = compile_collectives(collectives)
    chosen = chosen_trace(trace, rank, pattern, executor, steps_from)
    recorded = chosen.trace
    log = _compile_log(recorded.path if compile_log is None else Path(compile_log), given=compile_log is not None)
    (snapshot, unreadable), steps = snapshot_of(recorded), with_steps(recorded, steps_from)
    facts = TraceFacts(steps, pattern, timing or timing_of(recorded.path), chosen.job, log, snapshot)
    return ReadFacts(facts, chosen.text, {**chosen.left_out, **unreadable})


def _phases(trace: Path) -> tuple[Phase, ...]:
    """Return the phases that the run of a trace recorded beside what is in it."""
    entry = entry_of(trace)
    return tuple(phases_beside(trace.parent.parent, entry)) if entry else ()


def chosen_rules(ignore: Collection[str], thresholds: Mapping[str, Mapping[str, float]]) -> list[Rule]:
    """Return the rules that are not ignored.

    Raises:
        TypeError: ``ignore`` is not a collection of names, or ``thresholds`` is not a mapping of mappings.
        ValueError: a rule or a threshold that does not exist, or a threshold that is not a finite number.
    """
    if isinstance(ignore, str) or not isinstance(ignore, Collection):
        raise TypeError(f'"ignore" must be a collection of names of rules: {ignore!r:.200}')
    if not isinstance(thresholds, Mapping):
        raise TypeError(f'"thresholds" must be a mapping from rules to thresholds: {thresholds!r:.200}')
    for name in (*ignore, *thresholds):
        if name not in RULES:
            raise ValueError(f"unknown rule {name!r}{_similar(name)}; docs/rules.md lists all rules")
    for name, values in thresholds.items():
        RULES[name].check(values)
    return [each for each in RULES.values() if each.name not in ignore]


def _similar(name: str) -> str:
    """Return the rules whose names are close to this name, or to one of the names in it, in words."""
    words = re.split(r"[\s,]+", str(name))
    close = [rule for word in words for rule in get_close_matches(word, RULES, 3 if len(words) == 1 else 1)]
    return f"; similar: {', '.join(dict.fromkeys(close))}" if close else ""


def _compile_log(path: Path, *, given: bool) -> CompileLog | None:
    """Return the log at this path or, if none is given, the logs beside the trace, which may be damaged."""
    if given and not path.is_dir():
        return read_compile_logs([path])
    logs = sorted((path if given else path.parent).glob(PATTERN))
    if not given:  # code that a window runs was perhaps compiled in an earlier one
        logs += sorted(path.parent.parent.glob(f"window-*/{path.name.partition('.')[0]}.*{COMPILE_LOG}"))
    if given and not logs:
        raise FileNotFoundError(2, f"No file named {PATTERN}", str(path))
    try:
        return read_compile_logs(logs) if logs else None
    except (TraceError, OSError):
        if given:
            raise
        return None


def diagnosis_of(
    facts: TraceFacts,
    rules: Collection[Rule] = RULES.values(),
    thresholds: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    *,
    what_if: bool = True,
) -> Diagnosis:
    """Return what the rules find in the facts of one trace."""
    applied = apply_rules(facts, rules, thresholds, what_if=what_if)
    verdict: Verdict = verdict_of(facts)
    idle = facts.idle.totals() if facts.gpu else {}
    return Diagnosis(
        path=str(facts.trace.path),
        verdict=verdict_text(facts, verdict.text),
        bound=verdict.bound,
        parts=verdict.parts,
        coverage=verdict.coverage,
        waits=verdict.waits,
        findings=applied.findings,
        hidden=applied.hidden,
        rank=facts.trace.rank,
        has_steps=bool(facts.trace.steps),
        steps=facts.steps,
        step_ns=facts.step_ns,
        idle_by_cause={cause: facts.per_step(ns) for cause, ns in idle.items()},
        stretch=facts.stretch and facts.stretch.ratio,
        stretch_range=facts.stretch and (facts.stretch.low, facts.stretch.high),
        goodput=goodput_of(facts),
        memory=facts.memory_use,
        snapshot=facts.snapshot,
        abstained=applied.abstained,
        failed=applied.failed,
        metrics=facts.metrics,
        roofline=facts.roofline,
        regions=outermost_regions(facts),
        idle_gaps=longest_gaps(facts) if facts.gpu else (),
        job=facts.job,
        steps_from=facts.trace.steps_from,
        merged_ranks=tuple(about_ranks(facts.trace.metadata)),
        opened_by=str(facts.trace.metadata.get(OPENED_BY, "")),
        facts=facts,
    )
