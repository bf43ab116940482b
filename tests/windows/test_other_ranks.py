"""The summary says which rank the others wait for, from a small file that each rank leaves beside its trace."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import instrument
from instrument.finish.file_keeping import StoredWindows
from instrument.finish.other_ranks import gather_times
from instrument.finish.stored_windows import files_on_disk
from instrument.read.jobs.ranks import read_ranks
from instrument.read.jobs.read import read_trace

from ..support import programs, warm
from ..support.finishing import NORMAL_PRIORITY
from .training import train

pytestmark = pytest.mark.process

JOB = f"""
import os, sys, time, torch, torch.distributed as dist, instrument
{NORMAL_PRIORITY}
out, late, dead = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
with instrument.profile(out, schedule=instrument.schedule("1-3")) as prof:
    for step in range(5):
        if rank == late:
            time.sleep(0.3)
        x = torch.ones(4)
        if step < 4:
            dist.all_reduce(x)
        if rank == dead and step == 3:
            time.sleep(1)
            os._exit(0)
        prof.step()
if dead < 0:
    dist.barrier()  # gloo aborts now and then where a rank leaves before the other is done
    dist.destroy_process_group()
os._exit(0)
"""


def run_job(folder: Path, ranks: int, late: int, dead: int = -1) -> tuple[Path, str]:
    """Run a job; return the folder of its window, and what it printed, on one line."""
    script = folder / "job.py"
    script.write_text(JOB)
    out = folder / "out"
    command = programs.python(script, [str(out), str(late), str(dead)])
    done = warm.run(command, programs.environment({"OMP_NUM_THREADS": "1"}), timeout=200, check=True, ranks=ranks)
    return out / "window-0001", " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A job of two ranks, of which rank 1 is late."""
    window, text = run_job(tmp_path_factory.mktemp("job"), 2, 1)
    return SimpleNamespace(window=window, text=text)


@pytest.fixture
def window(recorded: SimpleNamespace, tmp_path: Path) -> Path:
    """A copy of the window of two ranks."""
    return Path(shutil.copytree(recorded.window.parent, tmp_path / "run")) / recorded.window.name


def times_file(window: Path, rank: int) -> Path:
    (path,) = window.glob(f"rank{rank}.*.times.jsonl")
    return path


def test_the_late_rank_of_two(recorded: SimpleNamespace) -> None:
    """The rank that sleeps before its collectives is the last to arrive."""
    assert "Rank 1 arrives last at 3 of 3 collectives" in recorded.text
    assert "Not compared" not in recorded.text
    assert ["rank0", "rank1"] == sorted(path.name.split(".")[0] for path in recorded.window.glob("*.times.jsonl"))


def test_the_late_rank_of_four(tmp_path: Path) -> None:
    """All ranks are compared by the one that prints the summary."""
    _, text = run_job(tmp_path, 4, 2)
    assert "Rank 2 arrives last at 3 of 3 collectives" in text
    assert "Not compared" not in text


def test_a_rank_that_dies(tmp_path: Path) -> None:
    """A rank that ends in the window leaves nothing; the others are compared, and it is named."""
    _, text = run_job(tmp_path, 3, 2, dead=1)
    assert "Rank 2 arrives last at 3 of 3 collectives" in text
    assert "Not compared, as they left no times beside the trace: rank 1." in text


def test_a_damaged_file(window: Path) -> None:
    """The file counts as missing."""
    path = times_file(window, 1)
    path.write_bytes(path.read_bytes()[:-20] + b"\xff")
    times, missing = gather_times([(times_file(window, 0), [0, 1])], 0)
    assert ([0], [1]) == (list(times), missing)


def test_the_file_of_another_run(window: Path) -> None:
    """A file of the same steps, recorded a minute earlier, is of another run into the folder."""
    path = times_file(window, 1)
    head, *steps = path.read_text().splitlines(keepends=True)
    earlier = json.loads(head)
    for key in ("start_ns", "end_ns"):
        earlier[key] -= 60_000_000_000
    path.write_text(json.dumps(earlier) + "\n" + "".join(steps))
    assert [1] == gather_times([(times_file(window, 0), [0, 1])], 0)[1]
    own = times_file(window, 0)
    own.unlink()
    assert ({}, []) == gather_times([(own, [0, 1])], 0)


def test_a_late_file_is_waited_for(window: Path) -> None:
    """Files that come after this rank's own are found, until the time is over."""
    path = times_file(window, 1)
    hidden = path.rename(window / "later")
    windows = [(times_file(window, 0), [0, 1])]
    assert [1] == gather_times(windows, time.monotonic() + 0.3)[1]
    hidden.rename(path)
    times, missing = gather_times(windows, 0)
    assert ([0, 1], []) == (list(times), missing)


def test_readers_of_the_folder(window: Path) -> None:
    """Readers of traces leave the files out, and what removes a window removes them with its trace."""
    assert {0, 1} == set(read_ranks(window, read_trace)) == set(read_ranks(window.parent, read_trace))
    assert not read_ranks(window, read_trace).failed
    assert not instrument.diagnose(window).job.failed
    (stored,) = StoredWindows(window.parent).of_rank(1)
    assert times_file(window, 1) in files_on_disk(window.parent, stored)


def test_a_single_rank_leaves_no_file(tmp_path: Path) -> None:
    """Without other ranks, nothing is written, and nobody is waited for."""
    with instrument.profile(tmp_path, schedule="1") as prof:
        train(3, prof.step)
    assert not list(tmp_path.glob("window-*/*.times.jsonl"))
