"""Helpers that build findings and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from instrument.base.findings import Site, SyncFinding
from instrument.explain.waits.events import Recorder, Source, SyncEvent
from instrument.explain.waits.report import SyncReport

CODE = """\
def step(model, batch):
    loss = model(batch)
    total = loss.item()
    rows = batch[batch > 0]
    loss.backward()
    return total, rows
"""


def findings_of(*events: SyncEvent) -> list[SyncFinding]:
    """Return the findings of ``events``."""
    recorder = Recorder()
    for event in events:
        recorder.add(event)
    return recorder.findings


def script(folder: Path, name: str = "train.py", code: str = CODE) -> Path:
    """Write a file of code into ``folder``, which becomes the root of a repository."""
    (folder / ".git").mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    return path


def finding(
    op: str = "item",
    line: int = 3,
    file: Path | str = "/x/train.py",
    steps: tuple[int | None, ...] = (0,),
    **more: Any,
) -> SyncFinding:
    """Return the finding of ``op`` at a line with one call in each of ``steps``; ``more`` as in `SyncEvent`."""
    site = more.pop("site", Site(str(file), line, "step"))
    cause = more.pop("cause", "reads a value back from the GPU")
    events = [SyncEvent(op, cause, site, step=step, **more) for step in steps]
    return findings_of(*events)[0]


def report(*findings: SyncFinding, steps: int = 1, source: Source = "dry run", **more: Any) -> SyncReport:
    """Return the report of ``findings``."""
    return SyncReport(source, list(findings), steps, **more)
