"""The code in the guide to traces runs, and the guide lists every table and column."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from instrument.read.tables.table import COLUMNS

from ..memory.snapshots import event, write

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "traces.md").read_text()


def test_code_blocks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code blocks run one after the other, and print the output in their comments."""
    for library in ("pandas", "pyarrow", "duckdb"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    sample = ROOT / "tests" / "data" / "gpu_two_steps.json"
    names = ("trace.json.gz", "runs/bert/window-0001/rank0.json", "runs/bert/window-0001/rank1.json")
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(sample, name)
    write(Path("snapshot.pickle"), [[event("alloc", 1, 512)]])
    variables: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        if find_spec("cupti") or "cupti_monitor" not in block:
            exec(block, variables)
    printed = capsys.readouterr().out
    comments = re.findall(r"print\(\w+\)  # (<.*>)", GUIDE)
    assert comments
    assert [comment for comment in comments if comment not in printed] == []


def test_every_column_is_described() -> None:
    """The guide lists each table and each column."""
    described = set(re.findall(r"`(\w+)`", GUIDE))
    assert {name for columns in COLUMNS.values() for name in columns} | set(COLUMNS) <= described
