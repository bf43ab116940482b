"""What a check is, what it is run with, and how it ends."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEEP = "INSTRUMENT_KEEP_TRACES"
LOG = "log"  # in the folder of a check: what it printed, the end of which is shown if it does not end in time
_LARGEST = 2 << 20  # bytes of a trace that is kept

Figures = dict[str, float | str]


class FailedError(AssertionError):
    """What was promised does not hold."""


class SkippedError(Exception):
    """The check cannot run on this machine, as where a tool is not installed."""


@dataclass(frozen=True)
class CheckContext:
    """What a check is run with.

    Attributes:
        folder: an empty folder for what it writes.
        device: "cuda", or "cpu" in a rehearsal, where `cuda` stands for `torch.cuda`.
        limit_s: after how long it is ended.
        figures: what it measured, which is shown however it ends. A name ends with the unit, " ms", or with
            " ratio" for that of the time beside it to another one; a whole number counts what its name says.
        expected: by the names of figures, what each should be, in words.
    """

    folder: Path
    device: str
    limit_s: float = 60
    figures: Figures = field(default_factory=dict)
    expected: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, value: float | str, expected: object = "") -> None:
        """Record a figure, and what it should be if that is known."""
        self.figures[name] = value
        if expected != "":
            self.expected[name] = str(expected)

    @property
    def rehearsal(self) -> bool:
        """Whether there is no GPU, and figures mean nothing."""
        return self.device == "cpu"

    @property
    def cuda(self) -> Any:
        """`torch.cuda`, or in a rehearsal what has the same functions and does nothing."""
        if self.rehearsal:
            from .emulated import cuda

            return cuda
        import torch

        return torch.cuda

    def trace(self, folder: Path, name: str = "") -> Path:
        """Return the one trace in ``folder``; kept as ``check_NAME`` where traces are kept and there is a name.

        In a rehearsal each operator of it gets a kernel.

        Raises:
            FailedError: there is none, or more than one.
        """
        traces = sorted(folder.rglob("*.pt.trace.json*"))
        expect(len(traces) == 1, f"one trace expected in {folder}: {[path.name for path in traces]}")
        (path,) = traces
        if self.rehearsal:
            from .emulated import with_kernels

            return with_kernels(path)
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
        name: in the table and on the command line.
        run: fills in figures; raises `FailedError` or `SkippedError`.
        limit_s: how long it may take.
        alone: whether nothing else may run beside it, as it measures times or fills the GPU.
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
) -> subprocess.CompletedProcess[str]:
    """Run Python with this checkout on its path, and without the settings of `instrument`.

    What it prints is returned if ``captured``, else it is printed. ``environment`` has further variables.

    Raises:
        FailedError: it took longer than ``limit_s``, or ended with another code than ``code`` (None: any).
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INSTRUMENT") or name == KEEP}
    command = [sys.executable, *map(str, arguments)]
    shown = f"{' '.join(command[1:5])} ..."
    try:
        done = subprocess.run(
            command, env=kept | {"PYTHONPATH": search_path()} | environment, capture_output=captured,
            text=True, errors="replace", timeout=limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"{shown} did not end in {limit_s:.0f} s") from error
    if code is not None and done.returncode != code:
        raise FailedError(f"{shown} ended with code {done.returncode}: {(done.stderr or '')[-1500:]}")
    return done


def search_path() -> str:
    """Return a PYTHONPATH with this checkout before what is there."""
    return os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")]))


def manifest(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the manifest in ``folder``, none where there is none."""
    path = folder / "manifest.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def recorded(folder: Path, steps: list[int]) -> None:
    """Raise `FailedError` unless the manifest in ``folder`` has one window, recorded, of these steps."""
    found = [(line["status"], line.get("steps"), line.get("reason")) for line in manifest(folder)]
    expect(found == [("recorded", steps, None)], f"one window of the steps {steps} expected: {found}")
