"""A training whose steps are CUDA graphs, under `instrument run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from instrument.traces.read import read_trace

from .test_run import RUN, entries_in, run, write

TRAIN = """
import sys
sys.path.insert(0, {root!r})
import pytest
from tests.support.cuda_graphs import Training, emulate

patch = pytest.MonkeyPatch()
device = emulate(patch)
training = Training({warmups})
training.run(100)
print(device.violations, device.replays)
"""
ROOT = str(Path(__file__).parents[2])


@pytest.mark.parametrize("warmups", [3, 4])
@pytest.mark.parametrize("steps", ["3-5", "50-52", "102-104"])
def test_a_whole_step_in_a_graph(tmp_path: Path, warmups: int, steps: str) -> None:
    """Replays are steps; the capture is a part of the first; a window ends, at the latest with the program."""
    torch = pytest.importorskip("torch")
    if torch.backends.cuda.is_built():
        pytest.skip("this build of torch has CUDA graphs of its own")
    write(tmp_path, TRAIN.format(root=ROOT, warmups=warmups))
    done = run(tmp_path, [*RUN, "--steps", steps, "--", "train.py"])
    assert done.stdout.splitlines()[0] == "[] 100", done.stderr
    (entry,) = entries_in(tmp_path / "runs/instrument")
    first, last = map(int, steps.split("-"))
    count = warmups + 100
    assert entry["steps"] == [first, min(last, count - 1)]
    assert entry["status"] == ("recorded" if last < count else "partial")
    trace = read_trace(tmp_path / "runs/instrument" / entry["files"][0]["path"])
    assert trace is not None
