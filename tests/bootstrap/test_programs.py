"""`instrument run` on unchanged programs: steps, unchanged output, and regions in every profiler."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from instrument.read.jobs.read import read_trace
from tests.support import nsys, programs, warm
from tests.support.programs import environment

pytestmark = pytest.mark.process

PROGRAMS = Path(__file__).parent / "programs"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMANDS = {
    "hand": ["hand.py"],
    "gan": ["gan.py"],
    "ddp": [*TORCHRUN, "ddp.py"],
    "huggingface": ["huggingface.py"],
    "lit": ["lit.py"],
}
# The number of each region in the one recorded step
REGIONS = {
    "hand": {"Sequential": 2, "Linear": 4, "backward": 2, "Linear (backward)": 4, "Optimizer.step#AdamW.step": 1},
    "gan": {
        "Generator": 1, "Discriminator": 3, "backward": 2, "Optimizer.step#Adam.step[g_optimizer]": 1,
        "Optimizer.step#Adam.step[d_optimizer]": 1,
    },  # the generator's backward belongs to a forward of the step before, which had no hook
    "ddp": {"DistributedDataParallel": 1, "Linear": 2, "backward": 1, "Optimizer.step#SGD.step": 1},
    "huggingface": {"GPT2LMHeadModel": 2, "GPT2Block": 2, "backward": 2, "Optimizer.step#AdamW.step": 1},
    "lit": {"Linear": 4, "backward": 2, "Optimizer.step#SGD.step": 1},
}  # fmt: skip


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder of the programs."""
    return programs.run(["env", "-C", PROGRAMS, *command], environment(variables), timeout=120)


def run_warm(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that has imported torch."""
    return warm.run(command, environment(variables), cwd=PROGRAMS, timeout=120, check=True)


def run_plain(name: str) -> subprocess.CompletedProcess[str]:
    """Run the program without the library; that of torchrun as a process for each rank."""
    if name == "ddp":
        return warm.run([sys.executable, "ddp.py"], environment(), cwd=PROGRAMS, check=True, ranks=2)
    return run_warm(instrumented(name), INSTRUMENT="0")


def without_log(output: str) -> str:
    """Return the program's own output, without the timestamped log lines of DeepSpeed, which others import."""
    return re.sub(r"^\[\d{4}-.*\n", "", output, flags=re.MULTILINE)


def instrumented(name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "instrument", "run", *options, "--", *COMMANDS[name]]


@pytest.mark.parametrize("name", COMMANDS)
def test_steps_and_regions(name: str, tmp_path: Path) -> None:
    """The program's steps are counted, one is recorded with its regions, and the output is unchanged."""
    plain = run_plain(name)
    done = run_warm(instrumented(name, "--steps", "4,1000", "-o", str(tmp_path)))
    assert without_log(plain.stdout) == without_log(done.stdout)
    assert "Where the step went" in done.stderr
    entries = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    ranks = 2 if name == "ddp" else 1
    recorded = [(entry["rank"], entry["steps"]) for entry in entries if entry["status"] == "recorded"]
    assert sorted(recorded) == [(rank, [4, 4]) for rank in range(ranks)]
    ends = [entry["reason"] for entry in entries if entry["status"] == "not reached"]
    assert ends == ["the loop ended before step 7"] * ranks
    for path in tmp_path.glob("window-0001/*.json.gz"):
        trace = read_trace(path)
        counts = Counter(trace.regions.text("name"))
        assert REGIONS[name] == {region: counts[region] for region in REGIONS[name]}


@pytest.mark.nsys
@pytest.mark.parametrize("name", ["hand", "ddp"])  # for frameworks, tests/integrations
def test_under_nsight_systems(name: str, tmp_path: Path) -> None:
    """A report of nsys, which the command starts, has the regions of the recorded step."""
    attempts = itertools.count()

    def record() -> tuple[Path, subprocess.CompletedProcess[str]]:
        out = tmp_path / str(next(attempts))
        return out, run(instrumented(name, "--profiler", "nsys", "--steps", "4", "-o", str(out)))

    with nsys.alone():
        out, done = nsys.recorded(record)
    assert "Where the step went" in done.stderr
    reports = list(out.glob("*.nsys-rep"))
    ranks = 2 if name == "ddp" else 1
    assert len(reports) == ranks
    counts = Counter(found.name for report in reports for found in nsys.ranges(report, balanced=False))
    assert {region: ranks * calls for region, calls in REGIONS[name].items()} == {
        region: counts[region] for region in REGIONS[name]
    }
