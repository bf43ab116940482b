"""Several ranks of one job record into one folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import instrument
from instrument.read.jobs.ranks import read_ranks
from instrument.read.jobs.read import read_trace
from instrument.record.stepping.explicit_steps import program_steps

from ..support import programs, warm
from .training import Recorder, content, train

pytestmark = pytest.mark.process

JOB = """
import sys, torch, torch.distributed as dist, instrument
dist.init_process_group("gloo")
chosen = eval(sys.argv[2])
with instrument.profile(sys.argv[1], schedule=instrument.schedule("1-2,4"), ranks=chosen) as prof:
    for _ in range(5):
        with instrument.annotate("reduce"):
            x = torch.ones(4)
            dist.all_reduce(x)
        prof.step()
assert x.tolist() == [2, 2, 2, 2]
dist.barrier()  # gloo aborts now and then where a rank leaves before the other is done
dist.destroy_process_group()
"""


def run_job(folder: Path, ranks: str) -> tuple[list[dict[str, object]], str]:
    script = folder / "job.py"
    script.write_text(JOB)
    out = folder / "out"
    command = programs.python(script, [str(out), ranks])
    done = warm.run(command, programs.environment(), timeout=100, check=True, ranks=2)
    lines = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda entry: (entry["window"], entry["rank"])), done.stderr


def test_all_ranks(tmp_path: Path) -> None:
    """Each rank writes its own file and its own complete lines; rank 0 alone prints the summary."""
    lines, stderr = run_job(tmp_path, "None")
    assert [(entry["window"], entry["rank"], entry["status"]) for entry in lines] == [
        (1, 0, "recorded"),
        (1, 1, "recorded"),
        (2, 0, "recorded"),
        (2, 1, "recorded"),
    ]
    names = [path.name.split(".")[0] for path in sorted((tmp_path / "out/window-0001").glob("*.gz"))]
    assert names == ["rank0", "rank1"]
    assert stderr.count("Where the step went") == 1


def test_chosen_ranks(tmp_path: Path) -> None:
    """Only the chosen ranks record; the others neither write nor wait."""
    lines, stderr = run_job(tmp_path, "[1]")
    assert [(entry["window"], entry["rank"]) for entry in lines] == [(1, 1), (2, 1)]
    assert stderr.count("Where the step went") == 1


def test_a_rank_that_is_not_chosen_counts_steps(tmp_path: Path) -> None:
    """A rank that is not chosen records nothing, also in a second loop; listeners receive its steps."""
    ended: list[int] = []
    batches = instrument.steps(range(3), tmp_path, at="1,4", ranks=[1], exporter=Recorder())

    def listener() -> None:
        ended.append(batches.profile.step_num)

    program_steps.listen(listener)
    try:
        for _ in range(2):
            list(batches)
    finally:
        program_steps.remove(listener)
        batches.profile.stop()
    assert [1, 2, 3, 4, 5, 6] == ended
    assert [] == list(tmp_path.iterdir())


HOGWILD = """
    import sys
    import torch, torch.multiprocessing, instrument

    def work(number, out):
        with instrument.profile(out, schedule="1") as prof:
            for _ in range(3):
                torch.ones(3).sum()
                prof.step()

    if __name__ == "__main__":
        torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)
"""


def test_processes_that_share_a_rank_are_distinguished(tmp_path: Path) -> None:
    """Files of children without a process group are named by process; the reader shows the process."""
    out = tmp_path / "out"
    command = programs.python(programs.program(HOGWILD, tmp_path), [str(out)])
    warm.run(command, programs.environment({"INSTRUMENT_SUMMARY": "0"}), check=True)
    names = [path.name for path in out.glob("window-0001/*")]
    processes = {name.split(".")[0] for name in names}
    assert 2 == len(names) == len(processes)
    assert all(process.startswith("rank0-pid") for process in processes)
    traces = read_ranks(out / "window-0001", read_trace)
    ((path, label),) = traces.left_out.items()
    assert f"rank 0, process {path.name.split('.')[0].removeprefix('rank0-pid')}, step 1, another run" == label


def test_the_rank_in_the_environment_is_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace has the rank for other tools; torch writes it only where there is a process group."""
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with instrument.profile(tmp_path, schedule="1") as prof:
            train(3, prof.step)
    infos = [content(path)["distributedInfo"] for path in sorted(tmp_path.glob("window-*/*"))]
    assert [{"backend": "none", "rank": rank, "world_size": 2} for rank in (0, 1)] == infos


def test_holistic_trace_analysis_loads_both_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HTA finds the rank in the first lines of each trace."""
    pytest.importorskip("hta")
    from hta.common.trace_file import get_trace_files

    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with instrument.profile(tmp_path, schedule="1") as prof:
            train(3, prof.step)
    assert {0, 1} == set(get_trace_files(str(tmp_path / "window-0001")))
