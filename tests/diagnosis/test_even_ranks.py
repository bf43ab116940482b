"""The prediction of a step whose ranks are all as fast as the median."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median, median_high

import pytest
from typer.testing import CliRunner

from instrument.explain.metrics.job import job_of
from instrument.start.cli import app
from tests.support import programs, warm
from tests.support.finishing import NORMAL_PRIORITY

from .test_job import job

PROGRAM = f"""
import os, sys, time, torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule
{NORMAL_PRIORITY}
out, late = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=0, warmup=1, active=6, repeat=1),
    on_trace_ready=lambda found: (dist.barrier(), found.export_chrome_trace(f"{{out}}/rank{{rank}}.json")),
) as window:
    for _ in range(7):
        for part in range(2):
            time.sleep(0.2 + (late if rank == 2 and part == 1 else 0))
            dist.all_reduce(torch.ones(4))
        window.step()
dist.barrier()
os._exit(0)
"""


def recorded(folder: Path, late: float) -> Path:
    """Record four ranks that sleep 0.2 s twice in a step, one of them so much longer."""
    script, out = folder / "job.py", folder / f"late{late}"
    script.write_text(PROGRAM)
    out.mkdir()
    command = programs.python(script, [str(out), str(late)])
    warm.run(command, programs.environment({"OMP_NUM_THREADS": "1"}), timeout=200, check=True, ranks=4)
    return out


@pytest.mark.process
def test_the_prediction_against_a_run_with_even_ranks(tmp_path: Path) -> None:
    """Without the sleep of one rank, a step takes as long as predicted from the job with it."""
    slow, even = recorded(tmp_path, 0.12), job_of(recorded(tmp_path, 0.0), "auto").ranks.values()
    found = job_of(slow, "auto").even
    assert found
    measured = median(trace.window_ns / len(trace.steps) for trace in even)
    assert found.even_ns == pytest.approx(measured, rel=0.05)
    assert found.step_ns > 1.2 * measured
    shown = {
        command: " ".join(CliRunner().invoke(app, [command, str(slow)]).output.split())
        for command in ("summarize", "whatif")
    }
    assert "Rank 2 arrives last at" in shown["summarize"]
    for text in shown.values():
        assert re.search(r"With all ranks as fast as the median: 4\d\d ms instead of 5\d\d ms per step\.", text)


@pytest.mark.parametrize("computes", [[[100] * 4] * 3, [[850] * 4, [200] * 4, [200] * 4], [[850, 100] * 2] * 3])
def test_the_median_of_the_own_work(computes: list[list[int]]) -> None:
    """On GPUs, each collective begins when the median rank would arrive."""
    found = job_of(job(*computes), "auto").even
    assert found
    late = [max(times) - median_high(times) for times in zip(*computes, strict=True)]
    assert found.even_ns == pytest.approx(found.step_ns - 1000 * sum(late) / len(late), rel=0.001)


def test_a_rank_that_recorded_fewer_steps() -> None:
    """What is saved in the steps that all ranks recorded counts for the others, too."""
    whole, fewer = (job_of(job([850] * 4, [200] * 4, [200] * steps), "auto").even for steps in (4, 3))
    assert whole
    assert fewer
    assert fewer.even_ns == pytest.approx(whole.even_ns, rel=0.01)


def test_too_few_collectives() -> None:
    """Nothing is predicted from one collective, or for a single rank."""
    assert job_of(job([100], [200]), "auto").even is None
    assert job_of(job([100, 100]), "auto").even is None
