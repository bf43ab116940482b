"""`instrument run --memory snapshot`: how a program ends is its own, and the manifest has what became of it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import instrument
from tests.bootstrap.programs import RUN, entries_in, write
from tests.bootstrap.programs import run_warm as run
from tests.support import warm
from tests.support.finishing import eventually, processes
from tests.support.programs import ROOT, environment

pytestmark = pytest.mark.process

# A program that "uses a GPU", by the stub of its allocator.
TRAIN = """
import sys
sys.path.append({root!r})
import pytest, torch
from tests.support.allocator import Allocator

allocator = Allocator()
allocator.install(pytest.MonkeyPatch())
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range({count}):
    allocator.allocate()
    loss = model(torch.ones(1, 2)).sum()
    {body}
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), flush=True)
"""


def program(folder: Path, count: int, body: str = "pass") -> None:
    write(folder, TRAIN.format(root=str(ROOT), count=count, body=body))


def memory_of(folder: Path) -> dict[str, Any]:
    """Return what the manifest has about the memory of the only window; its file is whole."""
    (line,) = entries_in(folder / "runs/instrument")
    memory: dict[str, Any] = line["memory"]
    path = folder / "runs/instrument" / memory["file"]
    assert memory["entries"] == len(instrument.read_memory(path).events)
    assert memory["file"] in [file["path"] for file in line["files"]]
    return memory


def test_out_of_memory_ends_the_program(tmp_path: Path) -> None:
    """The losses, the error and the exit code are those of the program alone; the snapshot is there, and named."""
    program(tmp_path, 9, "if number == 4: allocator.run_out(9)")
    alone = run(tmp_path, [RUN[0], "train.py"])
    recorded = run(tmp_path, [*RUN, "--memory", "snapshot", "--steps", "2-8", "--", sys.executable, "train.py"])
    assert 1 == alone.returncode == recorded.returncode
    assert alone.stdout == recorded.stdout
    assert alone.stderr in recorded.stderr
    assert "OutOfMemoryError: CUDA out of memory." in alone.stderr
    assert "1 memory snapshot, shown by: instrument memory runs/instrument" in recorded.stderr
    memory = memory_of(tmp_path)
    assert ("recorded", 9) == (memory["status"], memory["out_of_memory"]["requested_bytes"])


@pytest.mark.parametrize(
    ("handler", "code"),
    [("pass", -signal.SIGTERM), ("import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))", 3)],
)
def test_sigterm(tmp_path: Path, handler: str, code: int) -> None:
    """The snapshot of the open window is written, and the process ends by the signal or as its handler says."""
    program(tmp_path, 10**9)
    script = tmp_path / "train.py"
    script.write_text(script.read_text().replace("import sys\n", f"import sys\n{handler}\n", 1))
    command = [*RUN, "--memory", "snapshot,entries=50", "--steps", "2-1000000000", "--", "train.py"]
    with warm.started(command, environment({"INSTRUMENT_SUMMARY": "0"}), cwd=tmp_path) as training:
        for _ in range(5):
            training.readline()
        training.send_signal(signal.SIGTERM)
        assert code == training.wait().returncode
    memory = memory_of(tmp_path)
    assert ("recorded", None) == (memory["status"], memory["out_of_memory"])


@pytest.mark.parametrize("written", [True, False])
def test_sigkill_before_the_line_is_written(tmp_path: Path, written: bool) -> None:
    """The line says whether the snapshot is there: whole, or not at all."""
    hang = "import time; from instrument.record.allocator_history import window_memory; "
    hang += "window_memory.publish = lambda *_: time.sleep(99)"
    program(tmp_path, 10**9, "pass" if written else f"exec({hang!r})")
    out = tmp_path / "runs/instrument/window-0001"
    command = [*RUN, "--memory", "snapshot", "--steps", "2-3", "--", "train.py"]
    with warm.started(command, environment({"INSTRUMENT_SUMMARY": "0"}), cwd=tmp_path) as training:
        for _ in range(6):  # before the end of step 4, nobody but the training knows of the window
            training.readline()
        eventually(
            lambda: bool(
                list(out.glob("*.json.gz" if written else "*.json"))  # compressed after the snapshot
                and list(out.glob("*.memory.pickle" if written else ".*.memory.pickle.*"))
            )
        )
    eventually(lambda: not processes(training.pid))
    if written:
        assert "recorded" == memory_of(tmp_path)["status"]
        return
    (line,) = entries_in(out.parent)
    assert ("recorded", "failed") == (line["status"], line["memory"]["status"])
    assert "it was not written yet when this line was" == line["memory"]["reason"]
