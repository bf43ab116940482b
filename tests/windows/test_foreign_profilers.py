"""Beside another torch profiler, wherever it begins and ends, training goes on and that one keeps what is its own.

The programs run with a library preloaded that makes freed memory unreadable: torch writes there when a range is
closed whose recording another one replaced, and that is a crash in every run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ..support import native, programs

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


def run(name: str, out: Path) -> dict[str, Any]:
    """What the program printed."""
    extra = {"LD_PRELOAD": str(native.build("quarantine")), "INSTRUMENT_SUMMARY": "0"}
    extra["PYTHONPATH"] = f"{programs.ROOT / 'src'}:{programs.ROOT}"
    # Lightning's profiler writes into the current folder.
    command = ["env", "-C", out, *programs.python(PROGRAMS / name, [str(out)])]
    return dict(json.loads(programs.run(command, programs.environment(extra)).stdout.splitlines()[-1]))


def outcomes(result: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(status, reason) for status, reason, _ in result["windows"]]


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By combination, what came of a run in a process of its own."""
    return run("foreign.py", tmp_path_factory.mktemp("foreign"))


def test_training_goes_on(beside: dict[str, dict[str, Any]]) -> None:
    """No combination ends the process or changes a bit of the losses, and none leaves a profiler on."""
    plain = beside["plain"]["losses"]
    wrong = {name: result["code"] for name, result in beside.items() if result.get("losses") != plain}
    assert {} == wrong
    assert 30 < len(beside)
    assert [] == [name for name, result in beside.items() if result["code"] or result.get("left on")]


def test_the_other_profiler_keeps_its_operators(beside: dict[str, dict[str, Any]]) -> None:
    """It records what it records without us."""
    assert [] == [name for name, result in beside.items() if result.get("seen") != result.get("alone")]


def test_every_window_has_its_reason(beside: dict[str, dict[str, Any]]) -> None:
    """A window ends where the other profiler begins, with what was recorded; the next one is whole."""
    results = {name: result for name, result in beside.items() if name != "plain"}
    assert [] == [name for name, result in results.items() if set(outcomes(result)) - ALLOWED]
    assert {2} == {len(result["windows"]) for result in results.values()}
    late = [name for name, result in results.items() if result["windows"][1] != ["recorded", None, [7, 8]]]
    assert ["scheduled, 2 waits, optimizer", "scheduled, 2 waits, after"] == late  # those prepare in step 6
    partial = [f"{kind} in region" for kind in ("profile", "itt", "legacy", "raw")]
    for name in (*partial, "profile in optimizer", "raw in optimizer"):
        status, _, steps = results[name]["windows"][0]
        assert ("partial", [1, 1]) == (status, steps)  # step 2 was cut short
        assert [True, True] == results[name]["files"]


def test_in_every_framework(tmp_path: Path) -> None:
    """Lightning's PyTorchProfiler, a Trainer's callback and Accelerate's ProfileKwargs train as without us."""
    for package in ("lightning", "transformers", "accelerate"):
        pytest.importorskip(package)
    results = run("foreign_adapters.py", tmp_path)
    assert {"lightning dev", "lightning", "transformers", "transformers scheduled", "accelerate"} == set(results)
    for name, (plain, ours) in results.items():
        assert (0, 0, plain["losses"]) == (plain["code"], ours["code"], ours["losses"]), name
        assert ours["windows"]
        assert all((window["status"], window["reason"]) in ALLOWED for window in ours["windows"]), name


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
    """A script with a profiler of its own runs as without us, and gets its trace."""
    script, out = programs.program(SCRIPT, tmp_path), tmp_path / "out"
    extra = {"LD_PRELOAD": str(native.build("quarantine")), "INSTRUMENT_SUMMARY": "0"}
    plain = programs.run(programs.python(script), programs.environment(extra))
    options = ["-m", "instrument", "run", "--steps", "2-5", "--out", str(out), "--", str(script)]
    done = programs.run([sys.executable, *options], programs.environment(extra))
    assert plain.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    (entry,) = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert ("partial", 1) == (entry["status"], len(entry["files"]))


STARTED_OVER = """
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


def test_a_window_that_is_given_up_leaves_no_range(tmp_path: Path) -> None:
    """Where a plan starts over, the range of the last step is closed, not freed in the next recording."""
    script = programs.program(STARTED_OVER, tmp_path)
    extra = {"LD_PRELOAD": str(native.build("quarantine")), "INSTRUMENT_SUMMARY": "0"}
    options = ["-m", "instrument", "run", "--steps", "0-2", "--out", str(tmp_path / "out"), "--", str(script)]
    done = programs.run([sys.executable, *options], programs.environment(extra))
    assert "done" == done.stdout.splitlines()[-1]
    assert "the plan started over" in done.stderr
