"""What is read from a recording, against the simulated GPU's own log, by its exact clock."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch

import instrument
from instrument.read.measures.summary import summarize
from tests import simgpu
from tests.simgpu.programs import output

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]
BATCH_BYTES = 16 * 64 * 4
ROUNDING_NS = 2  # Kineto reads the TSC, and converts both ends of each work


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[instrument.Trace, list[simgpu.Entry]]:
    """Return the trace of three steps with regions, and the log of the same work."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.ones(16, 64).pin_memory() for _ in range(5)]

    def step(batch: torch.Tensor) -> None:
        with instrument.annotate("data"):
            x = batch.to("cuda", non_blocking=True)
        with instrument.annotate("forward"):
            loss = model(x).square().mean()
        with instrument.annotate("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.current_stream().synchronize()

    with instrument.profile(tmp_path / "out", schedule=instrument.schedule("2-4", warmup=1)) as prof:
        for number, batch in enumerate(batches):
            if number == 2:
                log = simgpu.log()
                entries = log.__enter__()
            step(batch)
            if number == 4:
                log.__exit__(None, None, None)
            prof.step()
    (trace,) = instrument.read_traces(tmp_path / "out").values()
    return trace, entries


@pytest.fixture
def worked(recorded: tuple[instrument.Trace, list[simgpu.Entry]]) -> tuple[instrument.Trace, list[simgpu.Entry]]:
    """Return the same without the calls that waited."""
    trace, entries = recorded
    return trace, [entry for entry in entries if entry.kind in ("kernel", "memcpy", "memset")]


def test_the_metrics(worked: tuple[instrument.Trace, list[simgpu.Entry]]) -> None:
    """Each metric of the GPU's work is that of the log."""
    trace, entries = worked
    numbers = instrument.metrics(trace)
    of = {kind: [entry for entry in entries if entry.kind == kind] for kind in ("kernel", "memcpy", "memset")}
    intervals = list(merged(entries))
    span, busy = intervals[-1][1] - intervals[0][0], total(entries)
    gaps = [start - end for (_, end), (start, _) in pairwise(intervals)]
    for name, count in {
        "gpu_events": len(entries),
        "kernels": len(of["kernel"]),
        "memcpys": len(of["memcpy"]),
        "memsets": len(of["memset"]),
        "kernels_lt_10us": sum(entry.duration < 10_000 for entry in of["kernel"]),
        "comm_ns": 0,
        "exposed_comm_ns": 0,
        "overlap_comm_compute_ns": 0,
        "tensor_core_ns": 0,
        "n_gaps": len(gaps),
    }.items():
        assert numbers[name] == count, name
    inside = [entry for entry in of["memcpy"] if entry.bytes != BATCH_BYTES]
    assert (numbers["dtod"]["n"], numbers["dtod"]["bytes"]) == (len(inside), sum(entry.bytes for entry in inside))
    assert (numbers["launch_to_start_ns"]["matched"], numbers["launch_to_start_ns"]["unmatched"]) == (
        len(of["kernel"]),
        0,
    )
    assert numbers["launch_calls_ns"]["n"] == len(entries)
    (stream,) = numbers["idle_streams_ns"].values()
    assert stream["n"] == len(entries)
    (gpu,) = numbers["per_gpu"]
    assert gpu["gpu_events"] == len(entries)
    within = 2 * ROUNDING_NS * len(entries)
    compute = total(of["kernel"] + of["memset"])
    for name, ns, expected in (
        ("kernel_sum_ns", numbers["kernel_sum_ns"], sum(entry.duration for entry in of["kernel"])),
        ("memcpy_ns", numbers["memcpy_ns"], sum(entry.duration for entry in of["memcpy"])),
        ("memset_ns", numbers["memset_ns"], sum(entry.duration for entry in of["memset"])),
        ("dtod", numbers["dtod"]["ns"], sum(entry.duration for entry in inside)),
        ("compute_ns", numbers["compute_ns"], compute),
        ("kernel_compute_ns", numbers["kernel_compute_ns"], total(of["kernel"])),
        ("exposed_memcpy_ns", numbers["exposed_memcpy_ns"], busy - compute),
        ("span_ns", numbers["span_ns"], span),
        ("busy_ns", numbers["busy_ns"], busy),
        ("idle_ns", numbers["idle_ns"], span - busy),
        ("max_gap_ns", numbers["max_gap_ns"], max(gaps)),
        ("gaps_device_ns", sum(numbers["gaps_device_ns"].values()), sum(gaps)),
        ("idle_streams_ns", sum(ns for cause, ns in stream.items() if cause != "n"), sum(gaps)),
        ("work_ns", gpu["work_ns"], sum(entry.duration for entry in entries)),
        ("kernel_util_span", numbers["kernel_util_span"] * span, total(of["kernel"])),
        ("busy_pct", numbers["busy_pct"] / 100 * span, busy),
        ("idle_pct", numbers["idle_pct"] / 100 * span, span - busy),
    ):
        assert abs(expected - ns) <= within, name


def test_the_metrics_of_grids(worked: tuple[instrument.Trace, list[simgpu.Entry]]) -> None:
    """How much of the multiprocessors the kernels fill, by the blocks and threads that the log has of each."""
    trace, entries = worked
    numbers = instrument.metrics(trace)
    gpu = torch.cuda.get_device_properties(0)
    kernels = [entry for entry in entries if entry.kind == "kernel"]
    runs = sum(kernel.duration for kernel in kernels)  # one after the other, on one stream
    used = sum(min(1, kernel.blocks / gpu.multi_processor_count) * kernel.duration for kernel in kernels)
    held = [
        kernel.blocks / gpu.multi_processor_count * kernel.threads / gpu.max_threads_per_multi_processor
        for kernel in kernels
    ]
    limit = sum(min(1, part) * kernel.duration for part, kernel in zip(held, kernels, strict=True)) / runs
    span = max(entry.end for entry in entries) - min(entry.start for entry in entries)
    assert numbers["sm_eff_span"] == pytest.approx(used / span, rel=1e-3)
    assert numbers["sm_eff_kernel_time"] == pytest.approx(used / runs, rel=1e-3)
    assert numbers["occ_limit_weighted"] == pytest.approx(100 * limit, rel=1e-3)


def test_the_metrics_of_waits(recorded: tuple[instrument.Trace, list[simgpu.Entry]]) -> None:
    """The calls that synchronize are those of the log, and take at least as long as they waited."""
    trace, entries = recorded
    numbers = instrument.metrics(trace)
    waits = [entry for entry in entries if entry.kind in ("wait_stream", "wait_device", "wait_event")]
    waited = sum(entry.returned - entry.start for entry in waits)
    assert len(waits) == 3
    assert numbers["sync_calls"] == 3 + 1  # and the one by which the window ends
    assert waited <= numbers["sync_union_ns"]


def test_the_metrics_of_launches(worked: tuple[instrument.Trace, list[simgpu.Entry]]) -> None:
    """Delays, the queue and the work of each step, for which the log says when each call put work into its stream.

    That is within the call, and so later than its start, by which the metrics count.
    """
    trace, entries = worked
    numbers = instrument.metrics(trace)
    call = numbers["launch_calls_ns"]["max"]
    delays = sorted(entry.start - entry.enqueued for entry in entries if entry.kind == "kernel")
    assert 0 <= numbers["launch_to_start_ns"]["median"] - delays[(len(delays) - 1) // 2] <= call
    changes = [(entry.enqueued, 1) for entry in entries] + [(entry.end, -1) for entry in entries]
    assert 0 <= numbers["queue_length"]["max"] - max(accumulate(change for _, change in sorted(changes))) <= 1
    bounds = (trace.steps.start_ns + trace.epoch_ns).tolist()
    lengths = numbers["step_lengths"]
    for number, length in enumerate(lengths):
        after = bounds[number + 1] if number + 1 < len(bounds) else entries[-1].enqueued + 1
        own = [entry for entry in entries if bounds[number] <= entry.enqueued < after]
        taken = max(entry.end for entry in own) - min(entry.start for entry in own)
        assert abs(length["gpu_ns"] - taken) <= 2 * ROUNDING_NS
    kernels = Counter(entry.name for entry in entries if entry.kind == "kernel")
    assert kernels == {row["name"]: row["count"] for row in numbers["kernel_table"]}


def total(entries: list[simgpu.Entry]) -> int:
    """Return for how long any of them ran."""
    return sum(end - start for start, end in merged(entries))


def merged(entries: list[simgpu.Entry]) -> Iterator[tuple[int, int]]:
    """Yield the times in which anything ran."""
    begun, ended = 0, 0
    for entry in sorted(entries, key=lambda one: one.start):
        if entry.start > ended:
            if ended:
                yield begun, ended
            begun = entry.start
        ended = max(ended, entry.end)
    yield begun, ended


def test_the_time_of_each_region(worked: tuple[instrument.Trace, list[simgpu.Entry]]) -> None:
    """The GPU's time of a region is that of the work that it launched, by the log's times."""
    trace, entries = worked
    duration = {entry.correlation: entry.duration for entry in entries}
    rows = {int(trace.gpu.correlation[row]): row for row in range(len(trace.gpu))}
    assert duration.keys() == rows.keys()
    regions = {region.path[-1]: region for region in summarize(trace).regions}
    for name in ("data", "forward", "backward"):
        launched = {number for number, row in rows.items() if name in ancestors(trace, int(trace.gpu.region[row]))}
        expected = sum(duration[number] for number in launched)
        assert launched
        assert abs(expected - (regions[name].gpu_ns or 0)) <= ROUNDING_NS * len(launched)


def ancestors(trace: instrument.Trace, region: int) -> set[str]:
    """Return the names of a region and of those around it."""
    names = set()
    while region >= 0:
        names.add(trace.regions.strings[trace.regions.name[region]])
        region = int(trace.regions.parent[region])
    return names


FIFTY_WINDOWS = """
    import json, sys, torch, instrument

    x = torch.ones(8, device="cuda")
    schedule = instrument.schedule(wait=1, warmup=int(sys.argv[2]), active=1, repeat=50)
    with instrument.profile(sys.argv[1], schedule=schedule) as prof:
        for _ in range(50 * (2 + int(sys.argv[2]))):
            for _ in range(7):
                x.add_(1)
            prof.step()
    prof.stop()
    print(json.dumps([[line["status"], *list(line["trace"].values())[-2:]] for line in prof.windows]))
"""


@pytest.mark.parametrize("warmup", [0, 1])
def test_fifty_windows_of_one_process(tmp_path: Path, warmup: int) -> None:
    """Each launch of each window has its kernel."""
    lines = json.loads(output(FIFTY_WINDOWS, str(tmp_path / "out"), str(warmup)).splitlines()[-1])
    assert [["recorded", 7, 7]] * 50 == lines
