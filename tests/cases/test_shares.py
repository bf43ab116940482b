"""Shares of the regions in a summary: together with "(in no region)", the outermost ones are the whole."""

from __future__ import annotations

from pathlib import Path

from instrument.read.kineto.kineto import read_kineto
from instrument.read.measures.summary import summarize
from tests.traces.test_summary import region, write


def test_region_that_goes_on_after_the_last_step(tmp_path: Path) -> None:
    """A region counts up to the end of the last step; one inside it that begins later takes no time."""
    events = [region("ProfilerStep#1", 0, 50), region("ProfilerStep#2", 50, 50)]
    events += [region("micro-step", 10, 50), region("micro-step", 60, 60), region("log", 105, 10)]
    summary = summarize(read_kineto(write(tmp_path, events)))
    (micro_step,) = summary.regions
    assert (micro_step.calls, micro_step.cpu_ns, micro_step.self_ns) == (2, 90_000, 90_000)
    assert summary.no_region_ns == 10_000
