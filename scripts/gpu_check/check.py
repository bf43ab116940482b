"""Definition of a check, its context and its result."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired, run
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEEP = "INSTRUMENT_KEEP_TRACES"
LOG = "log"  # a check's output, in its folder; its end is shown if the check runs out of time
_LARGEST = 2 << 20  # bytes of a trace to keep

Figures = dict[str, float | str]


class FailedError(AssertionError):
    """An expectation of a check does not hold."""


class SkippedError(Exception):
    """The check cannot run on this machine, for example because a tool is not installed."""


@dataclass(frozen=True)
class CheckContext:
    """Context of a running check.

    Attributes:
        folder: an empty folder for the check's files.
        device: "cuda", or "cpu" in a rehearsal, where `cuda` replaces `torch.cuda`.
        limit_s: time limit in seconds.
        figures: measured values, shown with any result. A name ends with the unit " ms", or with " ratio" for
            the ratio of the time of that name to another one; an integer is a count.
        expected: the expected value of each figure, in words.
    """

    folder: Path
    device: str
    limit_s: float = 60
    figures: Figures = field(default_factory=dict)
    expected: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, value: float | str, expected: object = "") -> None:
        """Record a figure, with its expected value if known."""
        self.figures[name] = value
        if expected != "":
            self.expected[name] = str(expected)

    @property
    def rehearsal(self) -> bool:
        """Whether the checks run on the CPU, where figures mean nothing."""
        return self.device == "cpu"

    @property
    def cuda(self) -> Any:
        """`torch.cuda`, or in a rehearsal a stand-in with the same functions."""
        if self.rehearsal:
            from .emulated import cuda

            return cuda
        import torch

        return torch.cuda

    def trace(self, folder: Path, name: str = "") -> Path:
        """Return the one trace in ``folder``, and keep a copy as ``check_NAME`` if traces are kept.

        In a rehearsal a kernel is added for each operator.

        Raises:
            FailedError: the folder has no trace or several.
        """
        traces = sorted(folder.rglob("*.pt.trace.json*"))
        expect(len(traces) == 1, f"one trace expected in {folder}: {[path.name for path in traces]}")
        (path,) = traces
        if self.rehearsal:
            from .emulated import add_kernels

            return add_kernels(path)
        keep = os.environ.get(KEEP)
        if keep and name:
            data = path.read_bytes()
            data = data if path.suffix == ".gz" else gzip.compress(data, 9)
            if len(data) <= _LARGEST:
                Path(keep).mkdir(parents=True, exist_ok=True)
                (Path(keep) / f"check_{name}.json.gz").write_bytes(data)
        return path


Run = Callable[[CheckContext], None]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: the name in the table and on the command line.
        run: fills in figures; raises `FailedError` or `SkippedError`.
        limit_s: time limit in seconds.
        alone: whether no other check may run at the same time, as it measures times or fills the GPU.
    """

    name: str
    run: Run
    limit_s: float
    alone: bool = False


def expect(holds: object, otherwise: str) -> None:
    """Raise `FailedError` unless ``holds``."""
    if not holds:
        raise FailedError(otherwise)


def python(
    *arguments: str | Path, limit_s: float = 60, code: int | None = 0, captured: bool = True, **environment: str
) -> CompletedProcess[str]:
    """Run Python with this checkout on its path and without settings of `instrument`.

    Output is returned if ``captured``, otherwise printed. ``environment`` has additional variables.

    Raises:
        FailedError: the process took longer than ``limit_s``, or its exit code is not ``code`` (None: any).
    """
    command = [sys.executable, *map(str, arguments)]
    shown = f"{' '.join(command[1:5])} ..."
    try:
        done = run(
            command, env=variables() | environment, capture_output=captured,
            text=True, errors="replace", timeout=limit_s,
        )  # fmt: skip
    except TimeoutExpired as error:
        raise FailedError(f"{shown} did not end in {limit_s:.0f} s") from error
    if code is not None and done.returncode != code:
        raise FailedError(f"{shown} ended with code {done.returncode}: {(done.stderr or '')[-1500:]}")
    return done


def variables() -> dict[str, str]:
    """Return the environment of a program: with this checkout on its path, and no settings of `instrument`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INSTRUMENT") or name == KEEP}
    return kept | {"PYTHONPATH": search_path()}


def search_path() -> str:
    """Return a PYTHONPATH that starts with this checkout."""
    return os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")]))


def manifest(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the manifest in ``folder``; none without a manifest."""
    path = folder / "manifest.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def recorded(folder: Path, steps: list[int]) -> None:
    """Raise `FailedError` unless the manifest in ``folder`` has exactly one window, recorded, of these steps."""
    found = [(line["status"], line.get("steps"), line.get("reason")) for line in manifest(folder)]
    expect(found == [("recorded", steps, None)], f"one window of the steps {steps} expected: {found}")
