"""Recordings to compare, and the command that compares them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from instrument.start.cli import app
from tests.support.loops import Loop


def written(folder: Path, name: str, work_us: int, steps: int = 8, varying_us: Sequence[int] = (0, 1, 2)) -> Path:
    """Write the trace of a loop on a GPU."""
    made = Loop()
    for number in range(steps):
        with made.step(number):
            made.work(work_us + varying_us[number % len(varying_us)])
            made.launch(50)
            made.synchronize()
    place = folder / name
    place.mkdir()
    made.trace(place)
    return place / "trace.json"


def command(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())
