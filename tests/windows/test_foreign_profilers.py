"""Windows beside another torch profiler, which keeps its events while training continues.

The programs run with a preloaded library that makes freed memory unreadable. Torch writes to such memory when it
closes a range whose recording another one replaced, so that error crashes every run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ..support import native, programs, warm

pytestmark = pytest.mark.framework

PROGRAMS = Path(__file__).parent / "programs"
ALLOWED = {
    ("recorded", None),
    ("partial", "another torch profiler began inside the window, which ended its recording"),
    ("skipped", "another torch profiler began on another thread inside the window, which ended its recording"),
    ("skipped", "another torch profiler began inside the window, in an operator or the backward pass, where torch "
     "cannot stop"),
    ("skipped", "another torch profiler began during warm-up"),
    ("skipped", "another torch profiler is active"),
}  # fmt: skip


def run(line: Sequence[str | Path], out: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line of Python in the folder ``out``, where Lightning's profiler writes, with the library."""
    library = str(native.build("quarantine"))
    extra = {"LD_PRELOAD": library, "INSTRUMENT_SUMMARY": "0"}
    extra["PYTHONPATH"] = f"{programs.ROOT / 'src'}:{programs.ROOT}"
    return warm.run([sys.executable, *line], programs.environment(extra), cwd=out, check=True, preload=library)


def results_of(name: str, out: Path) -> dict[str, Any]:
    """Run the program and return the results that it prints."""
    return dict(json.loads(run([PROGRAMS / name, out], out).stdout.splitlines()[-1]))


def outcomes(result: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(status, reason) for status, reason, _ in result["windows"]]


def test_the_library_is_preloaded(tmp_path: Path) -> None:
    """Memory comes from the library in every process of these tests."""
    assert "/quarantine-" in run(["-c", "print(open('/proc/self/maps').read())"], tmp_path).stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The result of each combination, each run in its own process."""
    return results_of("foreign.py", tmp_path_factory.mktemp("foreign"))


def test_training_continues(results: dict[str, dict[str, Any]]) -> None:
    """No combination ends the process or changes a bit of the losses, and none leaves a profiler on."""
    plain = results["plain"]["losses"]
    wrong = {name: result["code"] for name, result in results.items() if result.get("losses") != plain}
    assert {} == wrong
    assert 30 < len(results)
    assert [] == [name for name, result in results.items() if result["code"] or result.get("left on")]


def test_the_other_profiler_keeps_its_operators(results: dict[str, dict[str, Any]]) -> None:
    """The other profiler records the same operators as without this library."""
    assert [] == [name for name, result in results.items() if result.get("seen") != result.get("alone")]


def test_the_status_and_reason_of_each_window(results: dict[str, dict[str, Any]]) -> None:
    """A window keeps the steps before the other profiler's start; the next window is complete."""
    combined = {name: result for name, result in results.items() if name != "plain"}
    assert [] == [name for name, result in combined.items() if set(outcomes(result)) - ALLOWED]
    assert {2} == {len(result["windows"]) for result in combined.values()}
    late = [name for name, result in combined.items() if result["windows"][1] != ["recorded", None, [7, 8]]]
    assert ["scheduled, 2 waits, optimizer", "scheduled, 2 waits, after"] == late  # these prepare in step 6
    partial = [f"{kind} in region" for kind in ("profile", "itt", "legacy", "raw")]
    for name in (*partial, "profile in optimizer", "raw in optimizer"):
        status, _, steps = combined[name]["windows"][0]
        assert ("partial", [1, 1]) == (status, steps)  # step 2 was cut short
        assert [True, True] == combined[name]["files"]


def test_in_every_framework(tmp_path: Path) -> None:
    """Losses do not change beside Lightning's PyTorchProfiler, a Trainer callback, Accelerate's ProfileKwargs."""
    for package in ("lightning", "transformers", "accelerate"):
        pytest.importorskip(package)
    results = results_of("foreign_adapters.py", tmp_path)
    assert {"lightning dev", "lightning", "transformers", "transformers scheduled", "accelerate"} == set(results)
    for name, (plain, with_library) in results.items():
        assert (0, 0, plain["losses"]) == (plain["code"], with_library["code"], with_library["losses"]), name
        assert with_library["windows"]
        assert all((window["status"], window["reason"]) in ALLOWED for window in with_library["windows"]), name


SCRIPT = """
    import json, sys, torch
    from torch.profiler import ProfilerActivity, profile, schedule

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, traces = [], []
    plan = schedule(wait=3, warmup=1, active=1, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=traces.append) as prof:
        for number in range(8):
            loss = model(torch.full((4,), number / 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            prof.step()
    print(json.dumps([losses, len(traces)]))
"""


def test_under_instrument_run(tmp_path: Path) -> None:
    """A script that uses torch's profiler prints the same as without `instrument run`, and gets its trace."""
    script, out = programs.program(SCRIPT, tmp_path), tmp_path / "out"
    plain = run([script], tmp_path)
    done = run(["-m", "instrument", "run", "--steps", "2-5", "--out", out, "--", script], tmp_path)
    assert plain.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    (entry,) = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert ("partial", 1) == (entry["status"], len(entry["files"]))


RESTARTED_PLAN = """
import torch
from torch import nn

actor, critic = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
for rollout in range(4):
    with torch.no_grad():
        actor(torch.ones(1, 2))
    if rollout == 0:
        optimizers = [torch.optim.SGD(model.parameters()) for model in (critic, actor)]
    for model, optimizer in zip((critic, actor), optimizers):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
print("done")
"""


def test_an_abandoned_window_closes_its_step_range(tmp_path: Path) -> None:
    """When a schedule starts over, the last step's range is closed rather than freed in the next recording."""
    script = programs.program(RESTARTED_PLAN, tmp_path)
    done = run(["-m", "instrument", "run", "--steps", "0-2", "--out", tmp_path / "out", "--", script], tmp_path)
    assert "done" == done.stdout.splitlines()[-1]
    assert "the schedule started over" in done.stderr
