"""Runs trainings without faults, and once more for each fault, in processes forked from one with all imports.

    python -m tests.faults.campaign FOLDER CASES SEED SCENARIO...

CASES is the number of faults in each scenario, drawn by SEED, or "all" in an order drawn by it. The results of a
scenario without faults are written to FOLDER/SCENARIO.json, the result of each fault is a line of
FOLDER/SCENARIO.jsonl. INSTRUMENT_FUZZ_FUNCTION=NAME limits faults to functions with NAME in their names.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from . import injector

JOBS = 2
LIMIT_S = 60  # of one case
PRELOADED = (
    "torch", "torch._dynamo", "torch._inductor", "torch.profiler", "numpy", "wrapt", "msgspec",
    "rich.console", "rich.table", "typer",
)  # fmt: skip
ENVIRONMENT = {"INSTRUMENT_SUMMARY": "0", "ACCELERATE_USE_CPU": "true", "TQDM_DISABLE": "1"}


class Case(NamedTuple):
    """One fault: an error in one call of a function."""

    function: str
    call: int
    error: str


class Result(NamedTuple):
    """The result of one training."""

    exit: int
    outcome: Any
    fired: bool
    within: str  # as in `Faults`
    in_import: bool  # while a statement of the program imported the library
    in_setup: bool  # before the schedule of the windows began
    counts: dict[str, int]
    leftovers: list[str]
    modules: list[str]
    windows: list[str]  # in the manifests
    text: str  # output and manifests


def cases(counts: dict[str, int]) -> list[Case]:
    """Return every fault: each function, with its first, middle and last call, and each error."""
    return [
        Case(name, call, error)
        for name, count in counts.items()
        for call in sorted({1, (count + 1) // 2, count})
        for error in injector.ERRORS
    ]


def verdict(case: Case, result: Result, recorded: Result) -> str:
    """Return the verdict of a fault, by comparison with the run without a fault."""
    fault = f"injected into {case.function}"
    if result.exit == -signal.SIGKILL:
        return "hung"
    if result.exit:
        return "import" if result.in_import else "killed"
    if not result.fired:
        return "not reached"
    if result.outcome != recorded.outcome:
        return "changed"
    if "Exception ignored in" in result.text:
        return "leaked"
    if set(result.leftovers) - set(recorded.leftovers):
        return "left behind"
    if len(set(result.windows)) < len(result.windows):
        return "two manifest lines"
    if fault not in result.text:
        return "not reported"
    if set(recorded.windows) <= set(result.windows) or result.in_setup:  # no window was planned
        return "contained"
    return "no manifest line"


class Runner:
    """Runs one scenario repeatedly, each time in a forked process."""

    def __init__(self, scenario: str, folder: Path, faults: injector.Faults, tokens: tuple[int, int]) -> None:
        self._scenario = scenario
        self._folder = folder
        self._faults = faults
        self._tokens = tokens
        self._runs = 0

    def run(self, *, plain: bool = False, case: Case | None = None) -> Result:
        """Run the scenario once, in a forked process."""
        self._runs += 1
        folder = self._folder / f"{self._scenario}-{self._runs}"
        folder.mkdir()
        with self.turn():
            process = os.fork()
            if process == 0:
                code = 1
                try:
                    self._run_in_child(folder, plain, case)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    _exit(code)
            status = _wait(process)
        report = json.loads(_text(folder / "report.json") or "{}")
        manifests = {path.parent.name: _text(path) for path in folder.glob("**/manifest.jsonl")}
        lines = [(name, line) for name, text in manifests.items() for line in text.splitlines()]
        windows = [f"{name}/{json.loads(line)['window']}" for name, line in lines]
        result = Result(
            os.waitstatus_to_exitcode(status),
            json.loads(_text(folder / "outcome.json") or "null"),
            report.get("fired", False),
            report.get("within", ""),
            report.get("in_import", False),
            report.get("in_setup", False),
            report.get("counts", {}),
            report.get("leftovers", []),
            report.get("modules", []),
            sorted(windows),
            "".join([_text(folder / "output.txt"), *manifests.values()]),
        )
        shutil.rmtree(folder, ignore_errors=True)  # a finishing process may still write into it
        return result

    def _run_in_child(self, folder: Path, plain: bool, case: Case | None) -> None:
        from . import scenarios

        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        faults, before = self._faults, scenarios.patched_attributes()

        def report() -> None:
            counts = {name: count for name, count in zip(faults.names, faults.counts, strict=True) if count}
            left = {} if plain else {"leftovers": scenarios.leftovers(before)}
            modules = [name for name in sys.modules if name.partition(".")[0] != "instrument"]
            fired = {name: getattr(faults, name) for name in ("fired", "within", "in_import", "in_setup")}
            written = {**fired, "counts": counts, "modules": modules, **left}
            (folder / "report.json").write_text(json.dumps(written))

        atexit.register(report)  # registered before the library's handlers, so that it runs after them
        if case is not None:
            faults.arm(case.function, case.call, injector.ERRORS[case.error])
        outcome = scenarios.SCENARIOS[self._scenario](plain)
        (folder / "outcome.json").write_text(json.dumps(outcome))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until fewer than `JOBS` processes run."""
        os.read(self._tokens[0], 1)
        try:
            yield
        finally:
            os.write(self._tokens[1], b".")


def _exit(code: int) -> NoReturn:
    """Exit as the interpreter does, without freeing all memory, which takes a second of copied pages."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(process: int) -> int:
    deadline = time.monotonic() + LIMIT_S
    while True:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return status
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            return os.waitpid(process, 0)[1]
        time.sleep(0.002)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def campaign(runner: Runner, scenario: str, number: int | None, seed: int, folder: Path) -> None:
    """Run ``number`` faults of a scenario, or all, and write their results."""
    from . import scenarios

    with runner.turn():
        for module in scenarios.MODULES.get(scenario, ()):
            importlib.import_module(module)
    expected, recorded = runner.run(plain=True), runner.run()
    with runner.turn():
        for module in recorded.modules:  # once, instead of in each case
            with suppress(Exception):
                importlib.import_module(module)
    without_fault = {"expected": expected._asdict(), "recorded": recorded._asdict()}
    (folder / f"{scenario}.json").write_text(json.dumps(without_fault))
    gc.freeze()  # saves copies of these objects' pages in each process
    faults = cases(recorded.counts)
    name = os.environ.get("INSTRUMENT_FUZZ_FUNCTION")
    if name:
        faults = [case for case in faults if name in case.function]
    count = len(faults) if number is None else min(number, len(faults))
    with (folder / f"{scenario}.jsonl").open("w", buffering=1) as lines:
        for case in random.Random(seed).sample(faults, count):
            start = time.monotonic()
            result = runner.run(case=case)
            word = verdict(case, result, recorded)
            detail = "" if word in ("contained", "not reached") else result.text[-4000:]
            took = round(time.monotonic() - start, 2)
            line = {"verdict": word, "within": result.within, "detail": detail, "took": took}
            lines.write(json.dumps({**case._asdict(), **line}) + "\n")


def main(folder: Path, number: int | None, seed: int, names: list[str]) -> None:
    """Run the campaigns of several scenarios, two cases at a time."""
    os.environ.update(ENVIRONMENT)
    for name in ("INSTRUMENT_STRICT", "RANK"):
        os.environ.pop(name, None)
    faults = injector.install()
    for module in PRELOADED:
        importlib.import_module(module)
    import torch

    torch.set_num_threads(1)
    hasattr(torch, "_inductor")
    tokens = os.pipe()
    os.write(tokens[1], b"." * JOBS)
    processes = {}
    for name in names:
        process = os.fork()
        if process == 0:
            campaign(Runner(name, folder, faults, tokens), name, number, seed, folder)
            return
        processes[process] = name
    failed = [name for process, name in processes.items() if os.waitpid(process, 0)[1]]
    if failed:
        sys.exit(f"the campaigns of {', '.join(failed)} failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), None if sys.argv[2] == "all" else int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
