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
    "instrument.record.modules.service:Handle.__enter__",
    # Wrappers of functions of the program or of torch, which they call; their other calls are contained.
    "instrument.base.compat.profilers:profiler_patches.starting.run_on_profiler_start",
    "instrument.base.compat.profilers:profiler_patches.stopping.run_on_profiler_stop",
    "instrument.base.compat.kineto:session_patches.leaving.leave_trace",
    "instrument.base.compat.kineto:session_patches.preparing.prepare_trace",
    "instrument.integrations.adapter:as_replacement.method",
    "instrument.record.modules.installer:copied.getstate",
    "instrument.record.regions.wrap:_generator.wrapper",
    "instrument.record.stepping.follower:StepFollower._make_init.init",
    "instrument.record.stepping.outermost_model:OutermostModel._make_call.call",
    "instrument.record.stepping.outermost_model:OutermostModel.follow",
    "instrument.record.stepping.outermost_model:_ModelCall.__call__",
    "instrument.record.stepping.explicit_steps:FunctionCallSteps._make_wrapper.call",
    "instrument.record.stepping.explicit_steps:FunctionCallSteps._make_wrapper.call_async",
    "instrument.record.cuda_graphs:GraphedCallables._make_wrapper.make_graphed_callables",
    "instrument.record.windows.steps:StepIterator.__iter__",
    # The containment itself: it raises the errors of the functions that it calls.
    "instrument.base.guard:Contained.__enter__",
    "instrument.base.guard:Contained.__exit__",
    "instrument.base.guard:Contained.__init__",
    "instrument.base.guard:Guard.contained",
    "instrument.base.guard:_SingleCall.__call__",
}
# Functions that write the lines of the manifest or plan a server's windows: after an error a line may be missing,
# and the log has the error.
MANIFEST = (
    "instrument.integrations.server:Server._on_signal",
    "instrument.integrations.server:OnDemandSchedule.",
    "instrument.record.handover.summary_output:SummaryOutput.",
    "instrument.record.handover.window_sender:WindowSender._",
    "instrument.record.handover.window_sender:WindowSender.finish",
    "instrument.record.windows.outcomes:Outcomes.entry",
    "instrument.record.windows.schedule_follower:ScheduleFollower._finish",
    "instrument.record.windows.outcomes:Outcomes.note",
    "instrument.record.windows.outcomes:Outcomes._prints_summary",
    "instrument.record.handover.manifest:",
    "instrument.base.disk:",
    "instrument.record.planning.schedule:Schedule.window",
)
# Functions that report errors themselves, functions that are called again after an error, and those of the log,
# which leaves out an event at level INFO that it cannot write.
REPORTING = {
    "instrument.base.log:_logger",
    "instrument.base.log:_sentence",
    "instrument.base.log:_text",
    "instrument.base.printable:printable",
    "instrument.base.stderr:at_start",
    "instrument.base.patch:Patch._set",
    "instrument.base.patch:Patch.undo",
    "instrument.base.guard:Guard.failed",
    "instrument.base.guard:Guard.note",
    "instrument.base.imports:ImportHook.undo",
    "instrument.integrations.adapter:Removal.undo",
    "instrument.integrations.server:Server._restore_handler",
    "instrument.base.log:last_resort",
}
# Functions whose callers expect an `OSError`, and go on.
EXPECTING_OS_ERRORS = {
    "instrument.base.files:sync",
    "instrument.base.disk:nearest_folder",
}

pytestmark = [pytest.mark.corpus, pytest.mark.fuzz]


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
