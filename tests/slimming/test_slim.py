"""Slim traces: the same metrics and findings, fewer steps, overlaps that viewers drop, damaged and odd files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument import SlimTrace, TraceError, slim
from instrument.base.trace_marks import SLIM

from .random_traces import BACKWARD, MAIN, PID, RandomTrace

Event = dict[str, Any]


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def content_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return content


def complete(category: str, name: str, start: float, end: float, tid: int = MAIN, **more: Any) -> Event:
    times = {"ts": start, "dur": round(end - start, 3)}
    return {"ph": "X", "cat": category, "name": name, "pid": PID, "tid": tid} | times | more


def overlapping(events: list[Event]) -> list[tuple[str, str]]:
    """Return the names of events that overlap on a thread without being nested."""
    found = []
    lanes: dict[Any, list[Event]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for lane in lanes.values():
        open_: list[tuple[int, str]] = []
        for event in sorted(lane, key=lambda each: (each["ts"], -each["dur"])):
            start, end = round(1000 * event["ts"]), round(1000 * event["ts"]) + round(1000 * event["dur"])
            while open_ and open_[-1][0] <= start:
                open_.pop()
            if open_ and end > open_[-1][0]:
                found.append((open_[-1][1], event["name"]))
            open_.append((end, event["name"]))
    return found


@pytest.mark.corpus
@pytest.mark.parametrize("seed", range(30))
def test_random_traces(seed: int, tmp_path: Path) -> None:
    """Metrics and findings of a slim trace are those of its trace, and a slim trace of it is the same file."""
    path = write(tmp_path / "trace.json", RandomTrace(seed, whole_us=bool(seed % 2)).content)
    once = slim(path)
    again = slim(once.path, tmp_path / "again.json.gz")
    assert (once.changed, again.changed) == ((), ())
    assert again.path.read_bytes() == once.path.read_bytes()
    assert not overlapping(content_of(once.path)["traceEvents"])
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "again.json.gz",
        "trace.json",
        "trace.slim.json.gz",
    ]


@pytest.mark.parametrize("seed", range(6))
def test_few_steps(seed: int, tmp_path: Path) -> None:
    """The steps of the middle stay with the work that they launched, and the diagnosis says so."""
    path = write(tmp_path / "trace.json", RandomTrace(seed, steps=5).content)
    whole = instrument.read_trace(path)
    steps = whole.steps.number.tolist()
    made = slim(path, steps=len(steps) - 2)
    trace = instrument.read_trace(made.path)
    assert (made.changed, made.steps) == ((), (len(steps) - 2, len(steps)))
    assert trace.steps.number.tolist() == steps[1:-1]
    launched = [int((whole.gpu.step == row).sum()) for row in range(1, len(steps) - 1)]
    assert [int((trace.gpu.step == row).sum()) for row in range(len(steps) - 2)] == launched
    (found,) = (each for each in instrument.diagnose(trace).findings if each.rule == "selected-steps")
    assert f"{len(steps) - 2} of {len(steps)} recorded steps" in found.title.replace("the ", "")
    assert slim(made.path, tmp_path / "again.json.gz").steps == made.steps


def test_all_steps(tmp_path: Path) -> None:
    """More steps than there are keep all, and nothing is said of them."""
    path = write(tmp_path / "trace.json", RandomTrace(3).content)
    assert slim(path, steps=99).steps is None


def test_a_step_that_overlaps_a_function_moves_the_function(tmp_path: Path) -> None:
    """torch.profiler begins a step inside a function: the function gets a lane, which the reader puts back."""
    events = [
        complete("python_function", "train.py(1): main", 0, 900),
        complete("python_function", "torch/profiler/profiler.py(8): step", 10, 30),
        complete("user_annotation", "ProfilerStep#4", 20, 800),
        complete("cuda_runtime", "cudaDeviceSynchronize", 25, 28),
        complete("cpu_op", "aten::add", 100, 200),
    ]
    made = slim(write(tmp_path / "trace.json", {"traceEvents": events}))
    written = content_of(made.path)
    places = {event["name"]: event["tid"] for event in written["traceEvents"] if event["ph"] == "X"}
    assert places["ProfilerStep#4"] == places["aten::add"] == MAIN
    assert places["torch/profiler/profiler.py(8): step"] != MAIN
    assert not overlapping(written["traceEvents"])
    read = instrument.read_trace(made.path)
    assert {read.threads[number].thread for number in read.frames.thread.tolist()} == {MAIN}
    assert made.changed == ()


def test_arrows_from_launches_to_their_work(tmp_path: Path) -> None:
    """A flow leaves each launch and arrives at its work, which the reader links by it."""
    made = slim(write(tmp_path / "trace.json", RandomTrace(5).content))
    events = content_of(made.path)["traceEvents"]
    out = {event["bind_id"] for event in events if event.get("flow_out")}
    into = {event["bind_id"] for event in events if event.get("flow_in")}
    assert out == into == set(range(1, len(out) + 1))
    read = instrument.read_trace(made.path)
    assert int((read.gpu.launch >= 0).sum()) == len(into)


def test_names_of_threads_and_processes_stay(tmp_path: Path) -> None:
    """Threads keep their names and their order."""
    path = write(tmp_path / "trace.json", RandomTrace(8).content)
    before, after = (instrument.read_trace(each).threads for each in (path, slim(path).path))
    used = [(thread.thread, thread.name) for thread in after if thread.process == PID]
    assert used == [(thread.thread, thread.name) for thread in before if (thread.thread, thread.name) in used]
    assert ((BACKWARD, "pt_autograd_0") in used) == any(thread.thread == BACKWARD for thread in after)


def test_a_damaged_file_stays_known_as_damaged(tmp_path: Path) -> None:
    """What could not be read of the file is a finding of its slim trace as well."""
    text = json.dumps(RandomTrace(4).content)
    path = tmp_path / "cut.json"
    path.write_text(text[: len(text) * 2 // 3])
    made = slim(path)
    assert made.changed == ()
    lost = instrument.read_trace(made.path).lost
    assert lost.reasons == instrument.read_trace(path).lost.reasons
    assert "damaged-trace" in {found.rule for found in instrument.diagnose(made.path).findings}
    assert slim(made.path, tmp_path / "again.json.gz").changed == ()


@pytest.mark.parametrize(
    "content",
    [
        [complete("cpu_op", "aten::add", 1, 2)],
        {"traceEvents": [complete("cpu_op", "x" * 3_000_000, 1, 2)]},
        {"traceEvents": [complete("cpu_op", '</script>"\\\u202e\n', 1, 2), complete("cpu_op", "aten::add", 1, 2)]},
        {"traceEvents": [complete("cpu_op", "aten::add", 1, 2, args={"Input Dims": [[1e400]], "x": "\ud800"})]},
        {"traceEvents": [complete("kernel", "k", 1, 2, 7, args={"stream": 7, "device": 0, "correlation": 2**70})]},
        {"traceEvents": [complete("other", "o", 1, 2), complete("cpu_op", "p", 1, 2) | {"pid": "two"}]},
        {"traceEvents": [complete("cpu_op", "p", 1, 2) | {"pid": number} for number in (1, 2, 1)]},
        {"traceEvents": [{"ph": "C", "name": "n", "pid": 1, "tid": 1, "ts": 1, "args": {"a": 1, "b": 2}}]},
        {"traceEvents": [], "deviceProperties": "none", SLIM: [1]},
        {"traceEvents": [complete("cpu_op", "p", 1, 2)], SLIM: {"lanes": [[1, 2], [PID, MAIN, {}]], "lost": 3}},
    ],
)  # fmt: skip
def test_odd_files(content: Any, tmp_path: Path) -> None:
    """Arrays, huge and hostile names, impossible numbers, and files of several processes keep their numbers."""
    made = slim(write(tmp_path / "trace.json", content), tmp_path / "out.json.gz")
    assert made.changed == ()
    assert slim(made.path, tmp_path / "again.json.gz").bytes <= made.bytes


def test_plain_text(tmp_path: Path) -> None:
    """A name without ".gz" makes a plain file, with one event on each line."""
    made = slim(write(tmp_path / "trace.json", RandomTrace(2).content), tmp_path / "out.json")
    lines = made.path.read_text().splitlines()
    assert len(json.loads(made.path.read_text())["traceEvents"]) == len(lines) - 2


def test_what_is_refused(tmp_path: Path) -> None:
    """Wrong arguments and files of other profilers raise, and leave no file."""
    path, empty = write(tmp_path / "trace.json", RandomTrace(1).content), tmp_path / "empty.json"
    empty.touch()
    for arguments, reason in (
        ({"out": path}, "another file"),
        ({"out": tmp_path}, "must be a file"),
        ({"steps": 0}, "integer >= 1: 0"),
        ({"key": "k"}, "without"),
    ):
        with pytest.raises(ValueError, match=reason):
            slim(path, **arguments)
    made = slim(path).path
    with pytest.raises(ValueError, match='"out" must be given for a trace that has the name of a slim trace'):
        slim(made)
    made.unlink()
    with pytest.raises(TraceError, match="give one file"):
        slim(tmp_path)
    with pytest.raises(TypeError, match="steps"):
        slim(path, steps=1.5)
    with pytest.raises(ValueError, match="has no steps"):
        slim(write(tmp_path / "none.json", [complete("cpu_op", "a", 1, 2)]), steps=1)
    with pytest.raises(OSError, match="cannot write to"):
        slim(path, tmp_path / "missing" / "out.json.gz")
    with pytest.raises(TraceError, match="empty"):
        slim(empty)
    assert {each.name for each in tmp_path.iterdir()} == {"trace.json", "none.json", "empty.json"}


def test_what_could_not_be_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric that differs in the file is named."""
    from instrument.explain.slimming import slim as module

    trace_bytes = module.trace_bytes

    def without_kernels(trace: Any, parts: Any, *args: Any, **more: Any) -> Iterator[bytes]:
        return trace_bytes(trace, {name: each for name, each in parts.items() if name != "gpu"}, *args, **more)

    monkeypatch.setattr(module, "trace_bytes", without_kernels)
    made: SlimTrace = slim(write(tmp_path / "trace.json", RandomTrace(5).content))
    assert {"metric kernels", "metric span_ns", "verdict"} <= set(made.changed)


@pytest.mark.parametrize("anonymize", [False, True])
def test_counters_stay(tmp_path: Path, *, anonymize: bool) -> None:
    """What rules and metrics read of sampled counters is the same, also where names are replaced."""
    events = [complete("user_annotation", f"ProfilerStep#{at // 1000}", at, at + 1000) for at in (0, 1000, 2000)]
    for at in (0, 1000, 2000):
        work = {"correlation": at + 1, "device": 0, "stream": 7}
        events.append(complete("cuda_runtime", "cudaLaunchKernel", at + 1, at + 2, args=work))
        events.append(complete("kernel", "gemm", at + 5, at + 995, 7, args=work))
    for at in range(0, 3000, 10):
        for name, value in (("SM Clock (MHz)", 990 + 990 * (at < 1000)), ("DRAM BW (%)", 90), ("Power (W)", 700)):
            events.append({"ph": "C", "name": name, "pid": "GPU 0 Counters", "ts": at, "args": {"": value}})
    path = write(tmp_path / "trace.json", {"traceEvents": events})
    made = slim(path, anonymize=anonymize)
    assert made.changed == ()
    assert {"throttled-clock", "memory-at-peak"} <= {each.rule for each in instrument.diagnose(made.path).findings}
