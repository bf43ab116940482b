"""Whatever happens in a window: losses to the bit, exit code and manifest are what they should be."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from instrument.base.run_folder import files_of

from ..support import programs, warm
from ..support.finishing import eventually, processes
from .training import manifest, recorded, statuses, steps

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

PROGRAM = """
import os, signal, sys, time, warnings
import torch, instrument
from instrument.base.config import settings
from tests.support.finishing import eventually, finishing_pid

warnings.simplefilter("ignore")
WORKERS = ("fork", "spawn")

def epoch(generator):
    mode = sys.argv[1]
    options = {"num_workers": 1, "multiprocessing_context": mode} if mode in WORKERS else {}
    rows = torch.arange(32.0).reshape(8, 4) / 32
    return torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True, generator=generator, **options)

def interfere(prof):
    mode = sys.argv[1]
    if mode in ("SIGTERM", "SIGKILL"):
        print(os.getpid(), flush=True)
        if settings.enabled:
            eventually(lambda: prof.windows)  # the finishing process has written the first window
        os.kill(os.getpid(), getattr(signal, mode))
    if mode == "finishing process" and settings.enabled:
        os.kill(finishing_pid(os.getpid()), signal.SIGKILL)
        eventually(lambda: not list(prof.out.glob(".*.jobs")))  # which goes once the end is noted
    if mode == "clock":
        seconds, nanoseconds = time.time, time.time_ns
        time.time = lambda: seconds() - 3600
        time.time_ns = lambda: nanoseconds() - 3600 * 10**9
    if mode == "error":
        raise KeyError("of the program")
    if mode == "exit":
        sys.exit(7)

def main():
    generator = torch.Generator().manual_seed(7)
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    number = 0
    with instrument.profile(sys.argv[2], schedule="1,3-5") as prof:
        for _ in range(2):
            for batch in epoch(generator):  # the workers of the second epoch begin in the second window
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                print(f"loss {loss.item().hex()}", flush=True)
                if number == 4:
                    interfere(prof)
                number += 1
                prof.step()

if __name__ == "__main__":
    main()
"""


def train(folder: Path, mode: str, *, enabled: bool) -> tuple[int, list[str], str]:
    """Run the program; return its exit code, its losses and its whole output."""
    env = programs.environment({"INSTRUMENT_SUMMARY": "0", "INSTRUMENT": str(int(enabled))})
    env["PYTHONPATH"] += f":{programs.ROOT}"
    script = programs.program(PROGRAM, folder)
    done = warm.run(programs.python(script, [mode, str(folder / "out")]), env)
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("loss")], done.stdout


def trained(folder: Path, mode: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run the program with and without the library, compare, and return exit code, manifest and output."""
    code, losses, _ = train(folder, mode, enabled=False)
    assert not (folder / "out").exists()
    assert len(losses) == (8 if code == 0 else 5)
    actual_code, actual_losses, output = train(folder, mode, enabled=True)
    assert (code, losses) == (actual_code, actual_losses)
    return code, manifest(folder / "out"), output


def assert_files_are_there(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Each file of the manifest exists, and the trace holds the steps that its line has."""
    for line in lines:
        (path,) = (folder / "out" / name for name in files_of(line))
        assert steps(path) == list(range(line["steps"][0], line["steps"][1] + 1))


@pytest.mark.parametrize("mode", ["fork", "spawn", "clock"])
def test_a_run_that_reaches_its_end(tmp_path: Path, mode: str) -> None:
    """Workers that begin in a window, and a clock that is set back an hour in one, change nothing."""
    code, lines, _ = trained(tmp_path, mode)
    assert 0 == code
    assert [(1, "recorded"), (2, "recorded")] == statuses(lines)
    assert [[1], [3, 4, 5]] == recorded(tmp_path / "out")
    assert_files_are_there(tmp_path, lines)
    assert all(0 <= line["end_ns"] - line["start_ns"] < 60e9 for line in lines)
    assert all(0 < line["timing"]["recorded_ns"] < 60e9 for line in lines)


def test_a_finishing_process_that_is_killed(tmp_path: Path) -> None:
    """The window that is open then is finished by another process."""
    code, lines, _ = trained(tmp_path, "finishing process")
    assert 0 == code
    assert [(1, "recorded"), (2, "recorded")] == statuses(lines)
    assert None is lines[1]["reason"]
    assert_files_are_there(tmp_path, lines)


@pytest.mark.parametrize("mode", ["SIGTERM", "SIGKILL"])
def test_a_signal_that_ends_the_program(tmp_path: Path, mode: str) -> None:
    """What was recorded before is whole; the window that was open has a line and no file."""
    code, _, output = trained(tmp_path, mode)
    assert -getattr(signal, mode) == code
    number = next(int(line) for line in output.splitlines() if line.isdecimal())
    eventually(lambda: not processes(number))
    lines = manifest(tmp_path / "out")
    assert [(1, "recorded"), (2, "failed")] == statuses(lines)
    assert ([1, 1], []) == (lines[0]["steps"], lines[1]["files"])
    assert_files_are_there(tmp_path, lines[:1])


@pytest.mark.parametrize(
    ("mode", "expected", "error"), [("error", 1, "KeyError: 'of the program'"), ("exit", 7, "SystemExit: 7")]
)
def test_an_error_of_the_program(tmp_path: Path, mode: str, expected: int, error: str) -> None:
    """An exception in mid-window keeps the steps before it, and the exit code."""
    code, lines, _ = trained(tmp_path, mode)
    assert expected == code
    assert [(1, "recorded"), (2, "partial")] == statuses(lines)
    assert ([3, 3], 4) == (lines[1]["steps"], lines[1]["cut_step"])
    assert f"the loop ended in step 4: {error}" == lines[1]["reason"]
