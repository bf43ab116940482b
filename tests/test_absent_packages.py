"""Recording needs none of the packages that read traces, and reading needs neither torch nor nvtx."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from .support.programs import ROOT, environment

pytestmark = pytest.mark.process

DATA = ROOT / "tests" / "data"
READERS = ("numpy", "msgspec", "rich", "typer", "jinja2")
RECORDERS = ("torch", "nvtx")

RECORDING = """
import warnings

warnings.simplefilter("ignore")  # torch says that numpy is missing
import torch

import instrument

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
instrument.annotate_modules(model)
instrument.annotate_step()
for _ in instrument.steps(range(6), "out", wait=1, warmup=1, active=2):
    with instrument.annotate("forward"):
        loss = model(torch.ones(2, 8)).sum()
    loss.backward()
    optimizer.step()
with instrument.black_box() as box, instrument.detect_syncs():
    box.step()
"""

READING = f"""
import sys

import instrument
from instrument.start.cli import app

trace = {str(DATA / "gpu_two_steps.json")!r}
diagnosis = instrument.diagnose(trace)
assert str(diagnosis) and diagnosis.to_markdown() and diagnosis.to_json() and diagnosis.to_html("page.html")
instrument.compare(trace, trace).to_html("comparison.html")
instrument.slim(trace, "slim.json.gz")
instrument.audit_syncs(trace)
for command in ("summarize", "diagnose", "syncs", "whatif"):
    app([command, trace], standalone_mode=False)
assert "torch" not in sys.modules
"""


def python_without(folder: Path, *absent: str) -> Path:
    """Return an interpreter that has all packages of this environment but ``absent``."""
    venv.create(folder, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.lower().startswith(absent) and package.suffix != ".pth":
            (site / package.name).symlink_to(package)
    (site / "source.pth").write_text(f"{ROOT / 'src'}\n")
    python = folder / "bin" / "python"
    for name in absent:
        assert subprocess.run([python, "-c", f"import {name}"], capture_output=True).returncode, name
    return python


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
@pytest.mark.parametrize("log", ["text", "json"])
def test_recording_needs_no_reader(tmp_path: Path, log: str) -> None:
    """Windows are recorded, compressed and listed; the summary says what it needs."""
    python = python_without(tmp_path / "environment", *READERS)
    env = environment({"INSTRUMENT_LOG": log})
    done = subprocess.run(
        [python, "-c", RECORDING], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )
    assert 0 == done.returncode, done.stderr
    (line,) = map(json.loads, (tmp_path / "out" / "manifest.jsonl").read_text().splitlines())
    assert ("recorded", None) == (line["status"], line["reason"])
    (file,) = line["files"]
    assert file["path"].endswith(".gz") and (tmp_path / "out" / file["path"]).stat().st_size == file["bytes"]
    assert "Traceback" not in done.stderr
    said = re.search(r".*no summary, as (numpy|msgspec) is not installed here; where it is: .*", done.stderr)
    assert said is not None
    assert log == "text" or json.loads(said[0])["event"] == "summary"


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
def test_reading_needs_no_torch(tmp_path: Path) -> None:
    """Summaries, diagnoses, comparisons and pages of a trace are made where torch and nvtx are absent."""
    python = python_without(tmp_path / "environment", *RECORDERS)
    done = subprocess.run(
        [python, "-c", READING], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert 0 == done.returncode, done.stderr
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    command = [python, "-m", "instrument", "syncs", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200)
    said = "instrument: this needs torch, which is not installed here: pip install torch\n"
    assert (1, said) == (done.returncode, done.stderr)
