"""Programs for the tests of `instrument run`, and helpers that run them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import warm
from tests.support.programs import ROOT, environment

SOURCE = ROOT / "src"
RUN = [sys.executable, "-m", "instrument", "run"]
SHOW = """
import json, os, sys
main = sys.modules["__main__"]
print(json.dumps([sys.argv, __name__, main.__file__, sys.path, sys.flags.dev_mode, sys.stdin.read(), os.getcwd()]))
"""


TRAIN = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def run(folder: Path, command: list[str], given: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(variables), input=given, capture_output=True, text=True, timeout=300
    )


def run_warm(
    folder: Path, command: list[str], given: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command for which it makes no difference when torch is imported."""
    return warm.run(command, cwd=folder, env=environment(variables), input=given)


def entries_in(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the manifest."""
    return [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
