"""Scripts as rank 0 of four: what DistributedDataParallel and FSDP2 send, and who waits for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from instrument.forecast.assumed import Parallel, Plan, as_recorded, assumed
from instrument.forecast.gpus import GPUS
from instrument.forecast.operations import Operation
from instrument.forecast.schedule import Schedule
from instrument.forecast.steps import step_time
from instrument.forecast.table import packaged_table
from instrument.forecast.timeline import StepCall
from instrument.syncs.counting.streams import StreamNote
from instrument.syncs.dryrun.report import DryRunReport
from instrument.syncs.dryrun.run import dry_run_file

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="a build without torch.distributed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one"),
]

WIDTH, BLOCKS, RANKS = 2048, 4, 4
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
SCRIPT = """
import os, sys
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

width, how = int(sys.argv[1]), sys.argv[2]
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(width, width)
    def forward(self, x):
        return self.linear(x).relu()
model = nn.Sequential(*[Block() for _ in range(4)]).cuda()
if how != "alone":
    dist.init_process_group("nccl")
    assert (dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"]) == (0, 4, "0")
if how.startswith("ddp"):
    model = DistributedDataParallel(model, device_ids=[0], find_unused_parameters=how == "ddp-unused")
if how == "fsdp":
    for block in model:
        fully_shard(block)
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(256, width, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def run(script: Path, how: str, *, ranks: int = RANKS, fake: bool = True) -> DryRunReport:
    report = dry_run_file(script, None, fake=fake, args=[str(WIDTH), how], steps=2, ranks=ranks)
    assert report.error is None, report.error
    assert report.counts is not None
    return report


def sent(report: DryRunReport) -> dict[str, tuple[int, int]]:
    assert report.counts is not None
    return {each.name.removeprefix("c10d::"): (each.count, each.bytes) for each in report.counts.step.collectives}


def plan(report: DryRunReport, ranks: int = RANKS) -> Plan:
    assert report.counts is not None
    return as_recorded(report.counts.step.span, report.memory, ranks)


@pytest.mark.parametrize("fake", [True, False])
def test_data_parallel_sends_each_gradient_once(script: Path, fake: bool) -> None:
    """In buckets: the first of 1 MiB, the others of 25 MiB, which hold one or two blocks of 16 MiB."""
    assert sent(run(script, "ddp", fake=fake)) == {"allreduce_": (3, BLOCKS * BLOCK_BYTES)}


def test_parameters_may_be_unused(script: Path) -> None:
    """The ranks also agree on which parameters were used."""
    (reduced,) = sent(run(script, "ddp-unused")).values()
    assert BLOCKS * BLOCK_BYTES <= reduced[1] < BLOCKS * BLOCK_BYTES + 1024


@pytest.mark.parametrize("fake", [True, False])
def test_sharded_models_gather_parameters_and_scatter_gradients(script: Path, fake: bool) -> None:
    """Parameters before the forward and the backward pass, gradients once."""
    assert sent(run(script, "fsdp", fake=fake)) == {
        "_allgather_base_": (2 * BLOCKS, 2 * BLOCKS * BLOCK_BYTES),
        "_reduce_scatter_base_": (BLOCKS, BLOCKS * BLOCK_BYTES),
    }


def test_sharded_memory(script: Path) -> None:
    """A rank keeps a quarter of the parameters, and at the peak a few whole blocks."""
    whole, part = (run(script, how).memory for how in ("ddp", "fsdp"))
    assert whole is not None
    assert part is not None
    blocks = BLOCKS * BLOCK_BYTES
    assert whole.peak_bytes > 3 * blocks  # parameters, gradients and buckets
    assert blocks / 4 < part.by_category().get("other", 0) + part.by_category().get("parameters", 0) < blocks / 2
    assert part.peak_bytes < 2 * blocks


def test_the_environment_is_restored(script: Path) -> None:
    """The variables of torchrun and the process group end with the run."""
    run(script, "ddp")
    assert "WORLD_SIZE" not in os.environ
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("gpu", ["h100", "t4", "mi300x"])
def test_communication_lengthens_a_step_by_its_time_at_most(script: Path, how: str, gpu: str) -> None:
    """Some of it is hidden behind the backward pass."""
    found = plan(run(script, how))
    time = step_time(found.calls, GPUS[gpu], packaged_table(), found.notes)
    silent = [call._replace(collective=None) for call in found.calls]
    alone = step_time(silent, GPUS[gpu], packaged_table(), found.notes)
    assert alone.communication_ns == alone.exposed_ns == 0
    assert 0 < time.exposed_ns < time.communication_ns
    assert alone.ns <= time.ns <= alone.ns + time.communication_ns + 1e6  # of the launches


@pytest.mark.parametrize(("how", "parallel"), [("ddp", "dp"), ("fsdp", "fsdp")])
def test_what_is_assumed_is_what_the_wrapped_model_does(script: Path, how: str, parallel: str) -> None:
    """The same bytes in as many collectives; about the same time and memory."""
    wrapped, single = run(script, how), run(script, "alone", ranks=1)
    assert single.counts is not None
    assert single.memory is not None
    assert single.allocations is not None
    kind: Parallel = "dp" if parallel == "dp" else "fsdp"
    expected = plan(wrapped)
    found = assumed(kind, single.counts.step.span, single.memory, single.allocations.models, RANKS)
    collectives = [sorted(call.collective for call in each.calls if call.collective) for each in (found, expected)]
    assert collectives[0] == collectives[1]
    times = [step_time(each.calls, GPUS["l4"], packaged_table(), each.notes) for each in (found, expected)]
    assert times[0].communication_ns == pytest.approx(times[1].communication_ns)
    assert times[0].ns == pytest.approx(times[1].ns, rel=0.1)
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.15)
    assert found.assumed


def test_streams_run_side_by_side(tmp_path: Path) -> None:
    """Work on another stream takes no time of its own, unless the default stream waits for it."""
    file = tmp_path / "streams.py"
    file.write_text(
        "import sys, torch\n"
        "side, x = torch.cuda.Stream(), torch.ones(8192, 8192, device='cuda')\n"
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1, device='cuda'))])\n"
        "for _ in range(2):\n"
        "    with torch.cuda.stream(side):\n"
        "        y = x + 1\n"
        "    if sys.argv[1] == 'waits':\n"
        "        torch.cuda.current_stream().wait_stream(side)\n"
        "    z = x * 2\n"
        "    optimizer.step()\n"
    )
    times = []
    for how in ("waits", "goes on"):
        report = dry_run_file(file, None, fake=True, args=[how], steps=2)
        found = plan(report, 1)
        times.append(step_time(found.calls, GPUS["h100"], packaged_table(), found.notes).ns)
    assert times[0] > 1.8 * times[1]


@pytest.mark.parametrize(
    ("wait", "waits"),
    [
        ("torch.cuda.synchronize()", True),
        ("side.synchronize()", True),
        ("after.synchronize()", True),
        ("before.synchronize()", False),
        ("torch.cuda.current_stream().synchronize()", False),
        ("small.item()", False),
        ("small.cpu()", False),
    ],
)
def test_the_cpu_waits_for_what_it_is_told_to(tmp_path: Path, wait: str, waits: bool) -> None:
    """For all streams, one of them, or an event; a copy and `item` wait for the current stream."""
    file = tmp_path / "streams.py"
    file.write_text(
        "import torch\n"
        "side, x = torch.cuda.Stream(), torch.ones(8192, 8192, device='cuda')\n"
        "small = torch.ones(1, device='cuda')\n"
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1, device='cuda'))])\n"
        "for _ in range(2):\n"
        "    with torch.cuda.stream(side):\n"
        "        before = side.record_event()\n"
        "        y = x + 1\n"
        "        after = side.record_event()\n"
        f"    {wait}\n"
        "    z = x * 2\n"
        "    optimizer.step()\n"
    )
    report = dry_run_file(file, None, fake=True, steps=2)
    assert report.error is None
    found = plan(report, 1)
    assert "synchronize" in {note.kind for note in found.notes}
    one = step_time(found.calls[:1], GPUS["h100"], packaged_table()).ns
    time = step_time(found.calls, GPUS["h100"], packaged_table(), found.notes).ns
    assert (time > 1.8 * one) == waits


def test_a_collective_leaves_the_program_on_its_stream() -> None:
    """What follows a collective on another stream stays there; the events of each schedule begin anew."""
    work = StepCall(Operation("copy", "fp32", 0, 8, (0,)))
    schedules = [Schedule([work, work], [StreamNote(0, "select", 7)], RANKS) for _ in range(2)]
    assert schedules[0].send(1, "all-reduce", 8) == schedules[1].send(1, "all-reduce", 8)
    calls, notes = schedules[0].result()
    assert [call.collective is None for call in calls] == [True, False, True]
    selected = [(note.position, note.stream) for note in notes if note.kind == "select"]
    assert selected == [(0, 7), (1, 0), (2, 7)]
