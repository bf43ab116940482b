"""The code in the guide "diagnose.md" runs, and its output is real."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from instrument import cli
from instrument.diagnosis.rule import RULES
from tests.support.shared_traces import shared

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "diagnose.md").read_text()


def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks run one after the other."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "tests" / "data" / "gpu_two_steps.json", "trace.json.gz")
    names: dict[str, Any] = {}
    try:
        for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
            exec(block, names)
    finally:
        RULES.pop("many-fills")
    assert names["diagnosis"].verdict


def test_output_is_real() -> None:
    """The command prints what the guide shows for a real trace."""
    (shown,) = re.findall(r"```console\n\$ instrument diagnose trace.json.gz\n(.*?)```", GUIDE, re.DOTALL)
    printed = CliRunner().invoke(cli.app, ["diagnose", str(shared("tl_h100_bert_small.json.gz"))]).stdout
    assert printed.startswith(shown)
