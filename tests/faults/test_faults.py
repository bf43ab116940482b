"""A function of the library that raises changes no training, and the log or the manifest says that it raised.

A sample of the faults runs with the other tests, every one of them with ``make fuzz``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ..support.programs import ROOT, environment

SCENARIOS = ("steps", "run", "transformers", "accelerate", "lightning", "lightning_profiler", "server")
SAMPLE = 10  # faults in each scenario, of some two thousand
SEED = 11

# Functions that have nothing around them, with the reason. An error in a module of the library that the program's
# own statement imports passes as well: there is nothing yet that could step aside.
OUTERMOST = {
    # The import statement of the program itself.
    "instrument:__getattr__",
    # It returns itself, and no more.
    "instrument.modules.service:Handle.__enter__",
    # They stand for the program's own code or torch's, which they call; what else they call is contained.
    "instrument.compat.profilers:profiler_patches.starting.run_on_profiler_start",
    "instrument.compat.profilers:profiler_patches.stopping.run_on_profiler_stop",
    "instrument.compat.kineto:session_patches.leaving.leave_trace",
    "instrument.compat.kineto:session_patches.preparing.prepare_trace",
    "instrument.integrations.adapter:as_replacement.method",
    "instrument.modules.installer:copied.getstate",
    "instrument.regions.wrap:_generator.wrapper",
    "instrument.stepping.follower:StepFollower._making.init",
    "instrument.stepping.outermost_model:OutermostModel._first_call.call",
    "instrument.stepping.outermost_model:OutermostModel.follow",
    "instrument.stepping.outermost_model:_ModelCall.__call__",
    "instrument.stepping.function_calls:FunctionCallSteps._following.call",
    "instrument.stepping.function_calls:FunctionCallSteps._following.call_async",
    "instrument.stepping.graphed_callables:GraphedCallables._following.make_graphed_callables",
    "instrument.windows.steps:Steps.__iter__",
    # The containment: what it raises is what the function that it calls raised.
    "instrument.guard:Contained.__enter__",
    "instrument.guard:Contained.__exit__",
    "instrument.guard:Contained.__init__",
    "instrument.guard:Guard.contained",
    "instrument.guard:_Once.__call__",
}
# These make the lines of the manifest, or plan a server's windows: where one fails, a line may be missing, and the
# log says why.
MANIFEST = (
    "instrument.integrations.server:Server._on_signal",
    "instrument.integrations.server:OnDemandSchedule.",
    "instrument.windows.window_finalizer:WindowFinalizer._",
    "instrument.windows.window_finalizer:WindowFinalizer.finish",
    "instrument.windows.outcomes:Outcomes.entry",
    "instrument.windows.profile:Profile._finish",
    "instrument.windows.outcomes:Outcomes.note",
    "instrument.windows.outcomes:Outcomes._reports",
    "instrument.windows.window_recorder:WindowRecorder._unreached",
    "instrument.windows.manifest:",
    "instrument.windows.schedule:Schedule.window",
)
# Functions that say what failed, where the training goes on all the same; and what is done once more, so that
# nothing is missing.
SAYING = {
    "instrument.patch:Patch._set",
    "instrument.patch:Patch.undo",
    "instrument.guard:Guard.failed",
    "instrument.guard:Guard.note",
    "instrument.log:last_resort",
}

pytestmark = pytest.mark.fuzz


@pytest.fixture(scope="module")
def campaigns(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of each scenario, by its name."""
    folder = tmp_path_factory.mktemp("faults")
    number = "all" if os.environ.get("INSTRUMENT_FUZZ") == "all" else str(SAMPLE)
    command = [sys.executable, "-m", "tests.faults.campaign", str(folder), number, str(SEED), *SCENARIOS]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True)
    return {name: _found(folder, name) for name in SCENARIOS}


def _found(folder: Path, scenario: str) -> dict[str, Any]:
    lines = (folder / f"{scenario}.jsonl").read_text().splitlines()
    without: dict[str, Any] = json.loads((folder / f"{scenario}.json").read_text())
    return {**without, "cases": list(map(json.loads, lines))}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_fault_changes_a_training(campaigns: dict[str, Any], scenario: str) -> None:
    """Each fault is contained and said, but for those in `OUTERMOST` and in imports."""
    found = campaigns[scenario]
    plain, recorded = found["expected"], found["recorded"]
    assert (plain["exit"], recorded["exit"]) == (0, 0), recorded["text"]
    assert plain["outcome"] == recorded["outcome"]
    assert len(recorded["counts"]) > 150  # functions
    verdicts = defaultdict(list)
    for case in found["cases"]:
        function, verdict = case["function"], case["verdict"]
        if function in OUTERMOST or (verdict == "unsaid" and function in SAYING):
            verdict = "listed"
        elif verdict == "no manifest line" and function.startswith(MANIFEST):
            verdict = "contained"
        verdicts[verdict].append(case)
    print(scenario, {verdict: len(cases) for verdict, cases in verdicts.items()})
    right = {"contained", "import", "listed", "not reached"}
    wrong = [case for verdict in verdicts.keys() - right for case in verdicts[verdict]]
    for case in wrong:
        print(*case.values())
    assert [(case["verdict"], case["function"], case["call"], case["error"]) for case in wrong] == []
    assert len(verdicts["contained"]) > len(found["cases"]) / 2
