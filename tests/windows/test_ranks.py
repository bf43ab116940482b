"""Several ranks of one job record into one folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


def job(folder: Path, ranks: str) -> tuple[list[dict[str, object]], str]:
    script = folder / "job.py"
    script.write_text(JOB)
    out = folder / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), str(out), ranks], check=True, capture_output=True, text=True, timeout=100
    )
    lines = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda entry: (entry["window"], entry["rank"])), done.stderr


def test_all_ranks(tmp_path: Path) -> None:
    """Each rank writes its own file into the window's folder and its own whole lines; rank 0 alone sums up."""
    lines, stderr = job(tmp_path, "None")
    assert [(entry["window"], entry["rank"], entry["status"]) for entry in lines] == [
        (1, 0, "recorded"),
        (1, 1, "recorded"),
        (2, 0, "recorded"),
        (2, 1, "recorded"),
    ]
    names = [path.name.split(".")[0] for path in sorted((tmp_path / "out/window-0001").iterdir())]
    assert names == ["rank0", "rank1"]
    assert stderr.count("Where the step went") == 1


def test_chosen_ranks(tmp_path: Path) -> None:
    """Only the ranks that were chosen record; the others neither write nor wait."""
    lines, stderr = job(tmp_path, "[1]")
    assert [(entry["window"], entry["rank"]) for entry in lines] == [(1, 1), (2, 1)]
    assert stderr.count("Where the step went") == 1
