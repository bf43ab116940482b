"""A notebook that trains under `instrument run`: its summary is in the output of the cell that trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bootstrap.programs import RUN, entries_in, run, write

pytest.importorskip("ipykernel")
pytest.importorskip("jupyter_client")

pytestmark = pytest.mark.process

# Runs the cells, one list of outputs each, and ends the kernel by a request or by SIGKILL.
NOTEBOOK = """
import json, sys
from jupyter_client.manager import start_new_kernel

cells, kill = json.loads(sys.argv[1]), bool(int(sys.argv[2]))
manager, client = start_new_kernel()
outputs = []
for cell in cells:
    texts = []
    client.execute_interactive(
        cell, timeout=120, output_hook=lambda message: texts.append(str(message["content"].get("text", "")))
    )
    outputs.append("".join(texts))
client.stop_channels()
manager.shutdown_kernel(now=kill)
print(json.dumps(outputs))
"""
MODEL = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


def run_cells(folder: Path, *cells: str, kill: bool, options: tuple[str, ...] = ()) -> list[str]:
    """Run the cells of a notebook in a kernel, and return what each printed."""
    write(folder, NOTEBOOK, "notebook.py")
    line = [*RUN, "--out", "out", *options, "--", "notebook.py", json.dumps(cells), str(int(kill))]
    done = run(folder, line)
    assert done.returncode == 0, done.stderr
    outputs: list[str] = json.loads(done.stdout.splitlines()[-1])
    return outputs


@pytest.mark.parametrize("kill", [False, True])
def test_the_summary_is_in_the_output_of_the_cell(tmp_path: Path, kill: bool) -> None:
    """It comes with the end of the cell that trains, however the kernel ends later, and only once."""
    defined, trained, idle = run_cells(tmp_path, MODEL, "train(8)", "print('idle')", kill=kill)
    assert trained.count("Where the step went") == 1
    assert (defined, idle) == ("", "idle\n")
    (entry,) = entries_in(tmp_path / "out")
    assert (entry["status"], entry["steps"]) == ("recorded", [2, 4])


def test_a_window_across_cells(tmp_path: Path) -> None:
    """A cell that ends inside a window writes what it recorded; the next cell that trains records the rest."""
    cells = (MODEL, "train(4)", "1 + 1", "train(3)", "train(3)", "1 / 0")
    outputs = run_cells(tmp_path, *cells, kill=True)
    assert ["Where the step went" in text for text in outputs] == [False, True, False, True, False, False]
    parts: list[Any] = [(entry["window"], entry["steps"]) for entry in entries_in(tmp_path / "out")]
    assert parts == [(1, [2, 3]), (1, [4, 4])]
