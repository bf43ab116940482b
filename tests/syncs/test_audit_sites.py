"""`audit_syncs` finds idle time, call sites, and what live detection missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from instrument.explain.waits.audit import audit_syncs, unexplained
from instrument.explain.waits.events import Recorder, SyncEvent
from instrument.explain.waits.report import SyncReport
from tests.diagnosis.small_traces import Row, kernel, memcpy, on_cpu, trace_of
from tests.syncs.audits import DTOH, audit, item, launch, merged, only_finding
from tests.traces.nsys_report import MEMCPY, RUNTIME, SYNC, Database, thread


@pytest.mark.parametrize(
    ("later", "idle"),
    [
        ([kernel("k", 300, 400)], 100),
        ([kernel("k", 250, 400)], 60),
        ([kernel("k", 195, 400)], 0),
        ([kernel("k", 150, 400)], 0),
        ([], None),
    ],
)
def test_idle_time_until_next_work(later: list[Row], idle: int | None) -> None:
    """The GPU is idle from the end of its work to the next, at most for the blocked time; 0 if work was queued."""
    calls = [launch(0, 10, 1), on_cpu("cudaStreamSynchronize", 100, 200, thread=1), launch(205, 206, 5)]
    found = only_finding(audit(runtime=calls, gpu=[kernel("k", 50, 190, correlation=1), *later]))
    assert idle == found.idle_ns


def test_idle_gap_counts_once() -> None:
    """Two synchronizations with no work between them share the idle time."""
    calls = [launch(0, 10, 1), on_cpu("cudaStreamSynchronize", 100, 200), on_cpu("cudaEventSynchronize", 210, 220)]
    work = [kernel("k", 50, 190, correlation=1), kernel("k", 300, 310, correlation=2)]
    found = only_finding(audit(runtime=[*calls, launch(290, 295, 2)], gpu=work))
    assert (found.count, found.idle_ns) == (2, 110)


def test_long_gap_after_short_synchronization() -> None:
    """Later host work, such as loading data, does not add to the idle time."""
    calls = [
        launch(0, 10, 1),
        on_cpu("cudaDeviceSynchronize", 100_000, 112_500),
        launch(128_200_000, 128_200_010, 2),
        on_cpu("cudaMemcpyAsync", 128_300_000, 129_300_000, correlation=3),
        launch(129_400_000, 129_400_010, 4),
    ]
    work = [
        kernel("k", 50, 100_100, correlation=1),
        kernel("k", 128_200_100, 128_250_000, correlation=2),
        memcpy(DTOH, 128_300_100, 129_299_000, bytes=4, correlation=3),
        kernel("k", 129_500_000, 129_600_000, correlation=4),
    ]
    report = audit(runtime=calls, gpu=work, operators=[on_cpu("DataLoader.__next__", 113_000, 128_000_000)])
    found = {one.op: one for one in report.findings}
    assert (12_500, 12_500) == (found["synchronize"].blocked_ns, found["synchronize"].idle_ns)
    assert ("low", "high") == (report.severity(found["synchronize"]), report.severity(report.findings[0]))
    text = str(report)
    assert "waited 12.5 us, which left the GPU without work for 12.5 us; less than 0.1 % of the time" in " ".join(
        text.split()
    )
    assert "128 ms" not in text


def test_idle_time_per_gpu() -> None:
    """The idle time belongs to the GPU on which the thread launched work."""
    calls = [
        launch(0, 10, 1),
        launch(0, 10, 2, thread=1),
        on_cpu("cudaStreamSynchronize", 100, 200),
        launch(250, 260, 3),
    ]
    work = [
        kernel("k", 50, 190, correlation=1, device=0),
        kernel("k", 50, 1000, correlation=2, device=1),
        kernel("k", 270, 280, correlation=3, device=0),
    ]
    assert only_finding(audit(runtime=calls, gpu=work)).idle_ns == 80


def test_functions_of_user_and_library() -> None:
    """A finding has the innermost function of the user and the innermost function of a library."""
    frames = [
        on_cpu("mine/train.py(3): main", 0, 5000),
        on_cpu("mine/model.py(7): forward", 900, 1900),
        on_cpu("transformers/unheard/of.py(70): mask", 950, 1800),
        on_cpu("torch/nn/modules/module.py(17): _call_impl", 960, 1700),
        on_cpu("<built-in method item of Tensor object at 0x7f>", 990, 1300),
    ]
    report = audit(**merged(item(1000), {"frames": frames}))
    found = only_finding(report)
    assert found.site and (found.site.file, found.site.function) == ("mine/model.py", "forward")
    assert found.via and (found.via.file, found.via.function) == ("transformers/unheard/of.py", "mask")
    assert not any("with_stack" in sentence or "Unattributed" in sentence for sentence in report.coverage)


def test_functions_with_one_name_stay_separate() -> None:
    """Several functions named `forward` in one file have separate findings."""
    frames = [on_cpu("mine/model.py(7): forward", 900, 1300), on_cpu("mine/model.py(90): forward", 1900, 2300)]
    report = audit(**merged(item(1000, 1), item(2000, 3), {"frames": frames}))
    functions = {found.site.function for found in report.findings if found.site}
    assert functions == {"forward (line 7)", "forward (line 90)"}


SOURCE = """
class Net:
    @decorated
    def forward(self, x):
        def inner():
            return x.item()

        return inner(), [
            y.item()  # instrument: allow-sync a test
            for y in x
        ], (x
            .tolist()), (
            x.tolist())

    def backward(self, x):
        return x.item()


def forward(x):
    return (x
        .sum()
        .item())

forward(1).item()
"""


@pytest.mark.parametrize(
    ("frame", "inner", "function", "line"),
    [
        ("(3): forward", "<built-in method item of Tensor object at 0x7f>", "Net.forward", 9),
        ("(4): forward", "<built-in method item of Tensor object at 0x7f>", "Net.forward", 9),
        ("(3): forward", "<built-in method tolist of Tensor object at 0x7f>", "Net.forward", 0),
        ("(3): forward", "torch/cuda/__init__.py(3): synchronize", "Net.forward", 0),
        ("(3): forward", "", "Net.forward", 0),
        ("(5): inner", "<built-in method item of Tensor object at 0x7f>", "Net.forward.<locals>.inner", 6),
        ("(15): backward", "<built-in method item of Tensor object at 0x7f>", "Net.backward", 16),
        ("(19): forward", "<built-in method item of Tensor object at 0x7f>", "forward", 22),
        ("(24): <module>", "<built-in method item of Tensor object at 0x7f>", "<module>", 24),
        ("(21): forward", "<built-in method item of Tensor object at 0x7f>", "forward", 0),  # which of the two?
        ("(40): backward", "<built-in method item of Tensor object at 0x7f>", "backward", 0),  # another version
        ("(3): gone", "<built-in method item of Tensor object at 0x7f>", "gone", 0),
    ],
)
def test_line_from_source(tmp_path: Path, frame: str, inner: str, function: str, line: int) -> None:
    """The line is known if the function has only one matching call and has not changed."""
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    frames = [on_cpu(f"{path}{frame}", 900, 1300), *([on_cpu(inner, 990, 1250)] if inner else [])]
    found = only_finding(audit(**merged(item(1000), {"frames": frames})))
    assert found.site and (found.site.file, found.site.function) == (str(path), function)
    assert line == found.site.line
    assert found.allowed == ("a test" if line == 9 else None)


def test_regions_stay_separate_without_functions() -> None:
    """Without functions, findings are separated by region."""
    regions = [on_cpu("data", 900, 1300), on_cpu("loss", 1900, 2300)]
    report = audit(**merged(item(1000, 1), item(2000, 3), {"regions": regions}))
    assert {found.region for found in report.findings} == {("data",), ("loss",)}
    assert any("with_stack=True" in sentence for sentence in report.coverage)


def total_of(value: torch.Tensor) -> float:
    total = value.sum()

    return total.item()


def test_line_in_a_real_recording(tmp_path: Path) -> None:
    """Torch records the first line of a function; the line of the call follows from the callee."""
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as recorded:
        total_of(torch.ones(2))
        torch.ones(2).mul(2)
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    first = total_of.__code__.co_firstlineno
    assert any(f"({first}): total_of" in event["name"] for event in events if "name" in event)
    (read,) = [event for event in events if event.get("name") == "aten::_local_scalar_dense"]
    call = {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "args": {"correlation": 5}}
    events.append({**read, **call, "ts": read["ts"] + read["dur"] / 4, "dur": read["dur"] / 2})
    path.write_text(json.dumps(content))
    found = only_finding(audit_syncs(path))
    assert found.site
    assert (found.op, found.site.function, found.site.line) == ("item", "total_of", first + 3)
    assert Path(__file__) == Path(found.site.file)


@pytest.mark.parametrize("file", ["/dev/zero", "a" * 5000, "/dev/null\0", "<string>", "x(((((", "C:\\\\train.py"])
def test_stack_frames_without_source(file: str) -> None:
    """Stack frames without readable source keep the name from the trace."""
    found = only_finding(audit(**merged(item(1000), {"frames": [on_cpu(f"{file}(3): main", 900, 1300)]})))
    assert found.op == "item"
    assert found.site is None or (found.site.line, found.site.function) == (0, "main")


def test_nsight_systems_report(tmp_path: Path) -> None:
    """Call names with version suffixes, operators as NVTX ranges and the table of synchronizations are read."""
    database, tid = Database(), thread(7, 1)
    where = {"globalPid": tid & ~0xFFFFFF}
    database.span("train", 0, 5000, tid)
    database.span("aten::item, seq = 0, op_id = 3", 900, 1400, tid)
    database.call("cudaLaunchKernel_v7000", 100, 110, tid, 1)
    database.kernel("k", 120, 1100, correlationId=1, **where)
    database.call("cudaMemcpyAsync_v3020", 1000, 1010, tid, 2)
    database.add(MEMCPY, 1110, 1120, bytes=4, copyKind=2, srcKind=2, dstKind=1, correlationId=2, **where)
    database.call("cudaStreamSynchronize_v3020", 1020, 1130, tid, 3)
    database.add(SYNC, 1021, 1129, syncType=3, correlationId=3, **where)
    database.call("cuCtxSynchronize", 2000, 2050, tid, 4)
    database.call("cudaLaunchKernel_v7000", 2100, 2110, tid, 5)
    database.kernel("k", 2120, 2130, correlationId=5, **where)
    assert RUNTIME
    found = {each.op: each for each in audit_syncs(database.write(tmp_path / "report.sqlite")).findings}
    assert found.keys() == {"item", "synchronize"}
    assert (found["item"].blocked_ns, found["item"].direction, found["item"].bytes) == (110, "D2H", 4)
    assert found["item"].region == ("train",)
    assert (found["item"].idle_ns, found["synchronize"].idle_ns, found["synchronize"].blocked_ns) == (110, 50, 50)


@pytest.mark.parametrize(
    ("tables", "expected"), [({}, "no calls of the CUDA"), ({}, "no work on a GPU"), ({}, "No steps")]
)
def test_coverage_names_what_the_trace_lacks(tables: dict[str, list[Row]], expected: str) -> None:
    """A trace without a GPU has no findings, and the report says that nothing could be checked."""
    report = audit(operators=[on_cpu("aten::mm", 0, 10)], **tables)
    assert not report.findings
    assert any(expected in sentence for sentence in report.coverage)


def test_wrong_trace_argument(tmp_path: Path) -> None:
    """A wrong argument raises an error that names it; a missing file raises FileNotFoundError."""
    with pytest.raises(TypeError, match='"trace" must be one trace'):
        audit_syncs(5)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        audit_syncs(tmp_path / "none.json")


def live_report(*events: SyncEvent) -> SyncReport:
    recorder = Recorder()
    for event in events:
        recorder.add(event)
    return SyncReport("live", recorder.findings)


def test_synchronizations_missed_live_are_listed() -> None:
    """Findings are compared by operation and step; `float` in live detection is `item` in a trace."""
    steps = {"regions": [on_cpu("ProfilerStep#1", 900, 1500), on_cpu("ProfilerStep#2", 1900, 2500)]}
    trace = trace_of(**merged(item(1000, 1), item(2000, 3), steps))
    report = audit_syncs(trace)
    once = live_report(SyncEvent("float", "read", step=1))
    (missed,) = unexplained(report, once)
    assert (missed.op, missed.count, missed.steps, missed.blocked_ns) == ("item", 1, {2: 1}, None)
    assert only_finding(report).count == 2
    twice = live_report(SyncEvent("float", "read", step=1), SyncEvent("item", "read", step=2))
    assert not unexplained(report, twice)
    other = live_report(SyncEvent("item", "read", step=70), SyncEvent("item", "read", step=71))
    assert not unexplained(report, other)
    assert unexplained(report, live_report())[0].blocked_ns == 200
    sentence = audit_syncs(trace, live=once).coverage[-1]
    assert sentence == "Unattributed: in the trace, but not reported by live detection: item (1)."
    assert (
        audit_syncs(trace, live=twice).coverage[-1]
        == "Live detection explains every synchronization in the trace."
    )


def test_live_synchronization_explains_one_in_the_trace() -> None:
    """One live synchronization explains one in the trace, whichever finding it belongs to."""
    regions = [on_cpu("data", 900, 1300), on_cpu("loss", 1900, 2300)]
    report = audit(**merged(item(1000, 1), item(2000, 3), {"regions": regions}))
    (missed,) = unexplained(report, live_report(SyncEvent("item", "read")))
    assert missed.count == 1
