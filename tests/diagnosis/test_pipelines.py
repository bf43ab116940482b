"""Pipelines: the idle time of each stage by cause, and the share that the schedule makes unavoidable."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import instrument
from instrument.explain.metrics.job import job_of
from instrument.explain.metrics.pipelines import CAUSES, Pipeline, pipelines_of
from instrument.start.cli import app
from tests.support import programs, warm
from tests.support.finishing import NORMAL_PRIORITY
from tests.support.stages import MadeStage, two_stages

RANKS, MICROBATCHES = 4, 4

PROGRAM = f"""
import os, sys, time, torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.profiler import ProfilerActivity, profile, schedule
{NORMAL_PRIORITY}
out, kind, slow = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
forward, backward = (seconds * (2 if rank == slow else 1) for seconds in (0.1, 0.2))

class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        y = x * self.w
        y.register_hook(lambda gradient: time.sleep(backward))
        time.sleep(forward)  # after the operator: the profiler records nothing of it
        return y

stage = PipelineStage(Part(), rank, world, torch.device("cpu"))
made = {{"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}}[kind]
steps = made(stage, n_microbatches={MICROBATCHES}, loss_fn=lambda found, wanted: (found - wanted).pow(2).mean())
x, y = torch.randn(2, {2 * MICROBATCHES}, 4)
with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
    record_shapes=True,
    on_trace_ready=lambda found: (dist.barrier(), found.export_chrome_trace(f"{{out}}/rank{{rank}}.json")),
) as window:
    for _ in range(3):
        steps.step(*(x,) if rank == 0 else (), **{{"target": y}} if rank == world - 1 else {{}})
        window.step()
dist.barrier()
os._exit(0)
"""


def recorded(folder: Path, kind: str, slow: int = -1) -> Path:
    """Record a pipeline whose stages sleep 0.1 s in forward and 0.2 s in backward passes; one sleeps longer."""
    script = folder / "job.py"
    script.write_text(PROGRAM)
    out = folder / "out"
    out.mkdir()
    command = programs.python(script, [str(out), kind, str(slow)])
    warm.run(command, programs.environment({"OMP_NUM_THREADS": "1"}), timeout=200, check=True, ranks=RANKS)
    return out


def pipeline_of(folder: Path) -> Pipeline:
    found = pipelines_of(job_of(folder, "auto").exchange)
    assert not found.unknown
    (pipeline,) = found.pipelines
    return pipeline


@pytest.mark.process
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_the_bubble_of_equal_stages(tmp_path: Path, kind: str) -> None:
    """Four equal stages idle for the share that the schedule makes unavoidable, in the phases in which it does."""
    pipeline = pipeline_of(recorded(tmp_path, kind))
    assert [each.rank for each in pipeline.stages] == [*range(RANKS)]
    assert pipeline.microbatches == MICROBATCHES
    assert pipeline.unavoidable_share == (RANKS - 1) / (MICROBATCHES + RANKS - 1)
    assert pipeline.idle_share == pytest.approx(pipeline.unavoidable_share, abs=0.03)
    for place, stage in enumerate(pipeline.stages):
        assert sum(stage.idle_ns.values()) == pytest.approx(stage.step_ns - stage.busy_ns)
        assert stage.idle_ns["warm_up"] + stage.idle_ns["drain"] > 0.85 * (stage.step_ns - stage.busy_ns)
        if kind == "gpipe":  # the gradients come back after the stages that follow, and the last stage ends first
            assert stage.idle_ns["drain"] / stage.step_ns == pytest.approx(0.2 * place / 2.1, abs=0.05)


@pytest.mark.process
def test_a_slow_stage(tmp_path: Path) -> None:
    """The others wait for a stage that takes twice as long, which the diagnosis names."""
    folder = recorded(tmp_path, "1f1b", slow=2)
    pipeline = pipeline_of(folder)
    assert pipeline.slowest.rank == 2
    imbalance = {stage.rank: stage.idle_ns["imbalance"] / stage.step_ns for stage in pipeline.stages}
    assert min(imbalance[1], imbalance[3]) > 0.05 > imbalance[2]
    (found,) = [found for found in instrument.diagnose(folder).findings if found.rule == "pipeline-bubble"]
    assert found.where.rank == 2
    # 1.2 s of work for each stage and 2.4 s for one, divided evenly: 1.5 s, at 7 steps of which 4 are work
    assert found.win_ns == pytest.approx(3.15e9 - 1.5e9 * 7 / 4, rel=0.2)
    shown = CliRunner().invoke(app, ["summarize", str(folder)])
    assert "rank 2 computes longest" in " ".join(shown.output.split())
    assert all(cause.replace("_", "-") in shown.output for cause in CAUSES)


def test_two_stages_on_gpus(tmp_path: Path) -> None:
    """On GPUs, a stage computes while its kernels do; the rest has a cause, and the parts add up."""
    pipeline = pipeline_of(two_stages(tmp_path))
    one, other = pipeline.stages
    assert (0, 1, 1) == (one.rank, other.rank, pipeline.microbatches)
    assert pipeline.unavoidable_share == 1 / 2
    assert (510_000, 390_000) == (one.busy_ns, other.busy_ns)
    # the first step lasts to the first work of the second, 1 ms later, and that one to the last work
    assert (970_000, 760_000) == (one.step_ns, other.step_ns)
    assert {"warm_up": 420_000, "drain": 30_000, "imbalance": 0, "transfer": 0, "other": 10_000} == one.idle_ns


@pytest.mark.parametrize("named", [True, False])
def test_a_stage_that_waits_for_its_neighbor_is_not_late(tmp_path: Path, named: bool) -> None:
    """Sends and receives are no collectives, at which the last rank to arrive keeps the others waiting."""
    found = instrument.diagnose(two_stages(tmp_path, named=named))
    assert found.job is not None
    assert (0, None) == (found.job.arrivals.collectives, found.job.even)
    assert "late-rank" not in {each.rule for each in (*found.findings, *found.hidden)}


def test_microbatches_without_operators(tmp_path: Path) -> None:
    """Where operators are not recorded, launches between the receives tell the microbatches apart."""
    one, other = MadeStage(0), MadeStage(1)
    for step in range(2):
        for start in (0, 300):
            one.compute(step, start + 10, start + 100, operator="")
            one.transfer(step, "send", 1, start + 100, start + 120)
            other.transfer(step, "recv", 0, start + 100, start + 120)
            other.compute(step, start + 150, start + 240, operator="")
    one.write(tmp_path, range(2))
    other.write(tmp_path, range(2))
    pipeline = pipeline_of(tmp_path)
    assert (pipeline.microbatches, pipeline.unavoidable_share) == (2, 1 / 3)
    assert pipeline.slowest_text == "the stages compute about equally long, 180 us per step"


def test_ranks_in_a_ring_are_no_pipeline(tmp_path: Path) -> None:
    """Ranks that all send first, and to each other, have no first stage."""
    for rank in range(2):
        stage = MadeStage(rank)
        for step in range(2):
            stage.compute(step, 10, 100)
            stage.transfer(step, "send", 1 - rank, 100, 120)
            stage.transfer(step, "recv", 1 - rank, 130, 150)
        stage.write(tmp_path, range(2))
    found = pipelines_of(job_of(tmp_path, "auto").exchange)
    assert not found.pipelines
    assert found.unknown == "the sends of rank 0, 1 form no chain from a first stage to a last one"
