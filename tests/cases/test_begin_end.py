"""Traces with begin and end events, as Composer, Horovod and others write Chrome's format."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from instrument.explain.diagnosis.diagnose import diagnose
from instrument.explain.slimming.slim import slim
from instrument.read.jobs.read import read_trace
from instrument.read.measures.region_steps import steps_found
from instrument.read.tables.trace import Trace

Event = dict[str, Any]


def begin(name: str, at: float, **more: Any) -> Event:
    return {"ph": "B", "name": name, "cat": "train", "ts": at, "pid": 1, "tid": 1} | more


def end(name: str, at: float, **more: Any) -> Event:
    return begin(name, at, **more) | {"ph": "E"}


def step(number: int) -> list[Event]:
    at = 10_000 * number
    forward = [begin("forward", at + 100), end("forward", at + 4100)]
    backward = [begin("backward", at + 4100), end("backward", at + 9100)]
    return [begin(f"step_{number}", at), *forward, *backward, end(f"step_{number}", at + 9500)]


STEPS = list(chain.from_iterable(map(step, range(3))))


def read(folder: Path, events: list[Event]) -> Trace:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return read_trace(path)


def ranges(trace: Trace) -> set[tuple[str, int, int]]:
    regions = trace.regions
    times = (regions.start_ns // 1000, regions.duration_ns // 1000)
    return set(zip(regions.text("name"), *(column.tolist() for column in times), strict=True))


def test_begin_and_end(tmp_path: Path) -> None:
    """Each begin and its end are one range, nothing is lost, and the steps are found."""
    trace = read(tmp_path, STEPS)
    assert {(0, 9500), (4100, 5000)} < {(start, long) for _, start, long in ranges(trace)}
    assert not trace.lost
    assert steps_found(trace).steps.duration_ns.tolist() == [9_500_000] * 3
    found = diagnose(tmp_path / "trace.json")
    assert (found.findings, found.verdict.startswith("The trace has 9 regions")) == ((), True)


def test_a_bare_array_without_its_bracket(tmp_path: Path) -> None:
    """Chrome's format lets an array end without its bracket; one that ends within an event is cut off."""
    path = tmp_path / "timeline.json"
    text = "[\n" + "".join(json.dumps(event) + ",\n" for event in STEPS)
    path.write_text(text)
    assert not read_trace(path).lost
    assert len(read_trace(path).regions) == 9
    path.write_text(text[:-40])
    assert "the file is cut off: its array of events does not end" in read_trace(path).lost.reasons


def test_whole_events_beside_begins(tmp_path: Path) -> None:
    """Whole events without a known category on the same thread are regions as well."""
    data = {"ph": "X", "name": "data", "cat": "io", "ts": 9100, "dur": 300, "pid": 1, "tid": 1}
    trace = read(tmp_path, [*STEPS, data, data | {"tid": 2}])
    assert ("data", 9100, 300) in ranges(trace)
    assert (len(trace.regions), len(trace.others)) == (10, 1)


def test_known_categories(tmp_path: Path) -> None:
    """A begin with a category of torch.profiler goes to the table of that category."""
    trace = read(tmp_path, [begin("aten::mm", 5, cat="cpu_op", args={"External id": 7}), end("", 9)])
    assert (trace.operators.duration_ns.tolist(), trace.operators.external.tolist()) == ([4000], [7])


def test_ends_that_do_not_nest(tmp_path: Path) -> None:
    """Ends find the open range of their name; an end without a name closes the innermost."""
    events = [begin("a", 0), begin("b", 1), end("a", 2), begin("c", 3)]
    last = [{"ph": "E", "ts": 4, "pid": 1, "tid": 1}, end("b", 5)]
    assert ranges(read(tmp_path, events + last)) == {("a", 0, 2), ("b", 1, 4), ("c", 3, 1)}


def test_unbalanced_ends(tmp_path: Path) -> None:
    """Ranges without an end or a begin are named, and the others are read."""
    events = [end("epoch", 1), begin("train", 2), *STEPS, begin("tail", 29_600, tid=2)]
    trace = read(tmp_path, events)
    assert len(trace.regions) == 9
    assert trace.lost.events == 3
    assert {*trace.lost.reasons} == {"ranges with no end: train, tail", "ranges with no begin: epoch"}


def test_a_slim_trace(tmp_path: Path) -> None:
    """A slim trace has the same ranges."""
    data = {"ph": "X", "name": "data", "cat": "io", "ts": 9100, "dur": 300, "pid": 1, "tid": 1}
    trace = read(tmp_path, [*STEPS, data])
    slim(tmp_path / "trace.json", tmp_path / "slim.json.gz")
    again = read_trace(tmp_path / "slim.json.gz")
    assert (len(again.regions), sorted(again.regions.duration_ns)) == (10, sorted(trace.regions.duration_ns))


def test_asynchronous_events(tmp_path: Path) -> None:
    """Events that no table holds are left out, which is said, and is no damage."""
    odd = [{"ph": phase, "cat": "io", "id": 1, "name": "r", "ts": 5, "pid": 1, "tid": 1} for phase in "ben"]
    trace = read(tmp_path, [*STEPS, *odd])
    assert trace.lost.left_out == {f"events of phase '{phase}'": 1 for phase in "ben"}
    assert not trace.lost


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from(["", "a", "b"])), max_size=30))
def test_any_order_of_begins_and_ends(tmp_path_factory: Any, odd: list[tuple[int, bool, str]]) -> None:
    """Every event is half of a range or lost."""
    made = [begin if opens else end for _, opens, _ in odd]
    events = [make(name, at, tid=tid) for at, (make, (tid, _, name)) in enumerate(zip(made, odd, strict=True))]
    events.append({"ph": "X", "name": "x", "cat": "cpu_op", "ts": 0, "dur": 1, "pid": 1, "tid": 1})
    trace = read(tmp_path_factory.mktemp("odd"), events)
    assert 2 * len(trace.regions) + trace.lost.events == len(odd)
    assert (trace.regions.duration_ns > 0).all()
