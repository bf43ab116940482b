"""The code on memory snapshots in docs/traces.md runs, and the reference has the types that it returns."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import instrument
from instrument.read.memory.breakdown import Breakdown
from instrument.read.memory.shortage import DriverTraffic

from ..support.programs import ROOT
from .snapshots import event, write
from .test_breakdown import BATCH, FORWARD, OPTIMIZER


def test_code_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The block prints what its comments say, and writes a page."""
    monkeypatch.chdir(tmp_path)
    events = [
        each
        for step in range(3)
        for each in (
            event("alloc", 10 + step, 70, frames=BATCH),
            event("alloc", 2, 1000, frames=FORWARD),
            event("free_completed", 2, 1000, frames=[]),
            event("alloc", 3, 1, frames=OPTIMIZER),
            event("free_completed", 3, 1, frames=OPTIMIZER),
        )
    ]
    write(Path("snapshot.pickle"), [[*events, {**event("oom", 0, 9000, frames=FORWARD), "device_free": 5}]])
    guide = (ROOT / "docs" / "traces.md").read_text()
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "read_memory(" in code)
    exec(block, {"instrument": instrument})
    printed = capsys.readouterr().out.splitlines()
    assert "activations 1000" in printed
    assert "me/data.py:3 allocates 210 bytes of other in 3 blocks" in printed
    assert "1210 0" in printed
    assert "3 steps leave 210 bytes behind at me/data.py:3" in printed
    assert "me/model.py:12 asks for 9000 bytes: full" in printed
    assert str(instrument.read_memory("snapshot.pickle").larger_batch().doubled_bytes) == printed[-1]
    assert "</html>" in Path("memory.html").read_text()


def parts_of(hint: Any) -> list[Any]:
    """Return the types in a type, such as that of the items of a list."""
    return [hint, *(part for each in get_args(hint) for part in parts_of(each))]


def test_types_in_the_reference() -> None:
    """Each type of this library that a snapshot returns, or that these types hold, is described."""
    reference = (ROOT / "docs" / "reference.rst").read_text()
    members = (each for name, each in inspect.getmembers(instrument.MemorySnapshot) if not name.startswith("_"))
    functions = (getattr(each, "fget", None) or getattr(each, "func", each) for each in members)
    hints = [get_type_hints(function).get("return") for function in functions]
    hints += [hint for kind in (Breakdown, DriverTraffic) for hint in get_type_hints(kind).values()]
    own = {
        f"{part.__module__}.{part.__name__}"
        for hint in hints
        for part in parts_of(hint)
        if inspect.isclass(part) and part.__module__.startswith("instrument.read.memory.")
    }
    assert len(own) > 9
    assert [] == [name for name in sorted(own) if f"autoclass:: {name}\n" not in reference]
