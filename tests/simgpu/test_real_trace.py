"""The trace of a program on the simulated GPU against that of the same program on an H100, which is public."""

from __future__ import annotations

import gzip
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile, schedule

import instrument
from tests import simgpu
from tests.simgpu.bert import TOKENS, BertSmall
from tests.support.shared_traces import shared

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]
Event = dict[str, Any]
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# What torch 2.14 writes and 2.6 did not
NEW_ARGUMENTS = {"channel", "channel_type", "graph id", "graph node id", "occupancy", "CallFrom", "finished"}
NEW_OPERATORS = {"aten::gather": "aten::index_select"}  # that an embedding is made of


class Recorded:
    """The events of a trace, and of each work of the GPU, in order, the event and its launch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        self.events: list[Event] = [event for event in json.loads(text)["traceEvents"] if "cat" in event]
        launches = {
            event["args"]["correlation"]: event
            for event in self.events
            if event["cat"] in ("cuda_runtime", "cuda_driver")
        }
        work = sorted((event for event in self.events if event["cat"] in WORK), key=lambda event: event["ts"])
        self.work = [(event, launches[event["args"]["correlation"]]) for event in work]

    def operators(self) -> list[str]:
        """Return the operator that launched each work."""
        names = {event["args"]["External id"]: event["name"] for event in self.of("cpu_op")}
        return [names[event["args"]["External id"]] for event, _ in self.work]

    def arguments(self) -> dict[str, set[str]]:
        """Return the names of the arguments of each category."""
        found: dict[str, set[str]] = defaultdict(set)
        for event in self.events:
            found[event["cat"]] |= set(event.get("args", {}))
        return found

    def of(self, category: str) -> list[Event]:
        return [event for event in self.events if event["cat"] == category]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """One step in evaluation, recorded as the public trace says that it was recorded."""
    model = BertSmall().to("cuda", torch.bfloat16).eval()
    tokens, kinds, mask = torch.zeros(3, 1, TOKENS, dtype=torch.long, device="cuda")
    path = tmp_path_factory.mktemp("bert") / "trace.json"
    plan = schedule(wait=1, warmup=5, active=1)
    recording = profile(
        schedule=plan, record_shapes=True, with_stack=True, profile_memory=True, with_flops=True, with_modules=True
    )
    with torch.inference_mode(), recording:
        for _ in range(7):
            model(tokens, kinds, mask)
            torch.cuda.synchronize()
            recording.step()
    recording.export_chrome_trace(str(path))
    return Recorded(path)


@pytest.fixture(scope="module")
def real() -> Recorded:
    return Recorded(shared("tl_h100_bert_small.json.gz"))


def test_categories_and_arguments(simulated: Recorded, real: Recorded) -> None:
    ours, theirs = simulated.arguments(), real.arguments()
    assert ours.keys() == theirs.keys()
    assert {category: names - NEW_ARGUMENTS for category, names in ours.items()} == dict(theirs)


def test_the_order_of_work(simulated: Recorded, real: Recorded) -> None:
    """The same operators launch the same number of kernels and copies, in the same order."""
    made = [NEW_OPERATORS.get(name, name) for name in simulated.operators()]
    assert made == real.operators()
    assert [event["cat"] for event, _ in simulated.work] == [event["cat"] for event, _ in real.work]


def test_links(simulated: Recorded, real: Recorded) -> None:
    """A flow leads from each launch to its work, and a matmul is launched by the driver."""
    for trace in (simulated, real):
        starts = {event["id"]: event["ts"] for event in trace.of("ac2g") if event["ph"] == "s"}
        ends = {event["id"]: event["ts"] for event in trace.of("ac2g") if event["ph"] == "f"}
        for work, launch in trace.work:
            number = work["args"]["correlation"]
            assert (starts[number], ends[number]) == (launch["ts"], work["ts"])
            assert launch["args"]["External id"] == work["args"]["External id"]
    driven = [
        {
            name
            for name, (_, launch) in zip(trace.operators(), trace.work, strict=True)
            if launch["cat"] == "cuda_driver"
        }
        for trace in (simulated, real)
    ]
    assert driven == [{"aten::addmm"}, {"aten::addmm"}]


def test_the_delay_of_a_start(simulated: Recorded, real: Recorded) -> None:
    """A work starts 6.5 us after the call that launches it, where the GPU is idle."""
    delays = [
        statistics.median(work["ts"] - launch["ts"] for work, launch in trace.work) for trace in (simulated, real)
    ]
    assert delays == [pytest.approx(6.5, abs=0.2)] * 2


def test_readers(simulated: Recorded, real: Recorded) -> None:
    """Torch's validator finds nothing wrong with either, and our reader nothing missing."""
    from torch.profiler._trace_validator import validate_trace  # not in each version

    for trace in (simulated, real):
        assert validate_trace(str(trace.path)) == (True, [])
        read = instrument.read_trace(trace.path)
        assert (len(read.kernels), len(read.gpu)) == (60, 61)
        assert (read.gpu.launch >= 0).all()
    operators = [
        {row.name: row.calls for row in instrument.summarize(trace.path).operators if row.gpu_ns}
        for trace in (simulated, real)
    ]
    assert {NEW_OPERATORS.get(name, name): count for name, count in operators[0].items()} == operators[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pandas, which HTA calls
def test_holistic_trace_analysis(simulated: Recorded, real: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """HTA finds as long a time of kernels in both as the records have, in microseconds."""
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    hta = pytest.importorskip("hta.trace_analysis")
    for trace in (simulated, real):
        analysis = hta.TraceAnalysis(trace_files={0: str(trace.path)}, trace_dir=str(trace.path.parent))
        (busy,) = analysis.get_temporal_breakdown(visualize=False)["compute_time(us)"]
        durations = sum(work["dur"] for work, _ in trace.work if work["cat"] == "kernel")
        assert busy == pytest.approx(durations, abs=1)
