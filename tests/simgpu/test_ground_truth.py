"""What is read from a recording, against the simulated GPU's own log, by its exact clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import instrument
from instrument.traces.summary import summarize
from tests import simgpu
from tests.simgpu.programs import output

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]
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

    with instrument.profile(tmp_path / "out", schedule=instrument.schedule("2-4", warmup=1)) as prof:
        for number, batch in enumerate(batches):
            if number == 2:
                torch.cuda.synchronize()  # so that nothing of the warm-up is in the window
                log = simgpu.log()
                entries = log.__enter__()
            step(batch)
            if number == 4:
                torch.cuda.synchronize()
                log.__exit__(None, None, None)
            prof.step()
    (trace,) = instrument.read_traces(tmp_path / "out").values()
    return trace, [entry for entry in entries if entry.kind in ("kernel", "memcpy", "memset")]


def test_the_metrics(recorded: tuple[instrument.Trace, list[simgpu.Entry]]) -> None:
    """Numbers, durations, busy and idle time are those of the log."""
    trace, entries = recorded
    numbers = instrument.metrics(trace)
    of = {kind: [entry for entry in entries if entry.kind == kind] for kind in ("kernel", "memcpy", "memset")}
    assert [len(of[kind]) for kind in of] == [numbers[name] for name in ("kernels", "memcpys", "memsets")]
    within = 2 * ROUNDING_NS * len(entries)
    span = max(entry.end for entry in entries) - min(entry.start for entry in entries)
    busy = sum(end - start for start, end in merged(entries))
    for name, expected in {
        "kernel_sum_ns": sum(entry.duration for entry in of["kernel"]),
        "memcpy_ns": sum(entry.duration for entry in of["memcpy"]),
        "memset_ns": sum(entry.duration for entry in of["memset"]),
        "span_ns": span,
        "busy_ns": busy,
        "idle_ns": span - busy,
    }.items():
        assert abs(expected - numbers[name]) <= within, name


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


def test_the_time_of_each_region(recorded: tuple[instrument.Trace, list[simgpu.Entry]]) -> None:
    """The GPU's time of a region is that of the work that it launched, by the log's times."""
    trace, entries = recorded
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
