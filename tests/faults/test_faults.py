"""An error in any function of the library changes no training, and the log or the manifest reports it.

A sample of the faults runs with the other tests, all of them with ``make fuzz``.
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
from .injector import INTERRUPTS

SCENARIOS = ("steps", "run", "transformers", "accelerate", "lightning", "lightning_profiler", "server", "memory")
SAMPLE = 6  # faults in each scenario, of some two thousand
SEED = 11

# Functions whose errors reach the program, with the reason. Errors in modules of the library that a statement of
# the program imports reach it too: no containment exists yet.
OUTERMOST = {
    # The import statement of the program itself.
    "instrument:__getattr__",
    # Only returns itself.
    "instrument.modules.service:Handle.__enter__",
    # Wrappers of functions of the program or of torch, which they call; their other calls are contained.
    "instrument.compat.profilers:profiler_patches.starting.run_on_profiler_start",
    "instrument.compat.profilers:profiler_patches.stopping.run_on_profiler_stop",
    "instrument.compat.kineto:session_patches.leaving.leave_trace",
    "instrument.compat.kineto:session_patches.preparing.prepare_trace",
    "instrument.integrations.adapter:as_replacement.method",
    "instrument.modules.installer:copied.getstate",
    "instrument.regions.wrap:_generator.wrapper",
    "instrument.stepping.follower:StepFollower._make_init.init",
    "instrument.stepping.outermost_model:OutermostModel._make_call.call",
    "instrument.stepping.outermost_model:OutermostModel.follow",
    "instrument.stepping.outermost_model:_ModelCall.__call__",
    "instrument.stepping.function_calls:FunctionCallSteps._make_wrapper.call",
    "instrument.stepping.function_calls:FunctionCallSteps._make_wrapper.call_async",
    "instrument.stepping.graphed_callables:GraphedCallables._make_wrapper.make_graphed_callables",
    "instrument.windows.steps:StepIterator.__iter__",
    # The containment itself: it raises the errors of the functions that it calls.
    "instrument.guard:Contained.__enter__",
    "instrument.guard:Contained.__exit__",
    "instrument.guard:Contained.__init__",
    "instrument.guard:Guard.contained",
    "instrument.guard:_SingleCall.__call__",
}
# Functions that write the lines of the manifest or plan a server's windows: after an error a line may be missing,
# and the log has the error.
MANIFEST = (
    "instrument.integrations.server:Server._on_signal",
    "instrument.integrations.server:OnDemandSchedule.",
    "instrument.windows.summary_output:SummaryOutput.",
    "instrument.windows.window_finalizer:WindowFinalizer._",
    "instrument.windows.window_finalizer:WindowFinalizer.finish",
    "instrument.windows.outcomes:Outcomes.entry",
    "instrument.windows.run_ender:RunEnder._finish",
    "instrument.windows.outcomes:Outcomes.note",
    "instrument.windows.outcomes:Outcomes._prints_summary",
    "instrument.windows.manifest:",
    "instrument.windows.schedule:Schedule.window",
)
# Functions that report errors themselves, functions that are called again after an error, and those of the log,
# which leaves out an event at level INFO that it cannot write.
REPORTING = {
    "instrument.log:_logger",
    "instrument.log:_sentence",
    "instrument.log:_text",
    "instrument.log:_without_handler",
    "instrument.printable:printable",
    "instrument.stderr:at_start",
    "instrument.patch:Patch._set",
    "instrument.patch:Patch.undo",
    "instrument.guard:Guard.failed",
    "instrument.guard:Guard.note",
    "instrument.imports:ImportHook.undo",
    "instrument.integrations.adapter:Removal.undo",
    "instrument.integrations.server:Server._restore_handler",
    "instrument.log:last_resort",
}
# Functions whose callers expect an `OSError`, and go on.
EXPECTING_OS_ERRORS = {
    "instrument.part_file:sync",
    "instrument.windows.background_process:BackgroundProcess.session",
    "instrument.windows.manifest:existing",
}

pytestmark = pytest.mark.fuzz


@pytest.fixture(scope="module")
def campaigns(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of each scenario, by its name."""
    folder = tmp_path_factory.mktemp("faults")
    number = "all" if os.environ.get("INSTRUMENT_FUZZ") == "all" else str(SAMPLE)
    command = [sys.executable, "-m", "tests.faults.campaign", str(folder), number, str(SEED), *SCENARIOS]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True)
    return {name: _read_results(folder, name) for name in SCENARIOS}


def _read_results(folder: Path, scenario: str) -> dict[str, Any]:
    lines = (folder / f"{scenario}.jsonl").read_text().splitlines()
    results: dict[str, Any] = json.loads((folder / f"{scenario}.json").read_text())
    return {**results, "cases": list(map(json.loads, lines))}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_fault_changes_a_training(campaigns: dict[str, Any], scenario: str) -> None:
    """Each fault is contained and reported, except for those in `OUTERMOST` and in imports."""
    found = campaigns[scenario]
    plain, recorded = found["expected"], found["recorded"]
    assert (plain["exit"], recorded["exit"]) == (0, 0), recorded["text"]
    assert plain["outcome"] == recorded["outcome"]
    assert len(recorded["counts"]) > 150  # functions
    verdicts = defaultdict(list)
    for case in found["cases"]:
        function, verdict = case["function"], case["verdict"]
        expected = function in EXPECTING_OS_ERRORS or function.startswith(INTERRUPTS)  # as `Suppressed(OSError)`
        silent = function in REPORTING or (case["error"] == "OSError" and expected)
        if function in OUTERMOST or (verdict == "not reported" and silent):
            verdict = "listed"
        elif verdict == "no manifest line" and case["within"].startswith(MANIFEST):
            verdict = "contained"
        verdicts[verdict].append(case)
    print(scenario, {verdict: len(cases) for verdict, cases in verdicts.items()})
    right = {"contained", "import", "listed", "not reached"}
    wrong = [case for verdict in verdicts.keys() - right for case in verdicts[verdict]]
    for case in wrong:
        print(*case.values())
    assert [(case["verdict"], case["function"], case["call"], case["error"]) for case in wrong] == []
    cases = len(found["cases"])
    assert cases >= SAMPLE
    assert len(verdicts["contained"]) > (cases / 2 if cases > SAMPLE else 0)  # of six draws, half may be others
