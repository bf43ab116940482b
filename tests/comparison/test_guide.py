"""The code in the guide "compare.md" runs, and its output is real."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from instrument.start import cli
from tests.support.shared_traces import shared

from .recordings import written

GUIDE = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()


def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python block runs."""
    monkeypatch.chdir(tmp_path)
    for name, work_us in (("before", 300), ("after", 400)):
        written(tmp_path, name, work_us).rename(tmp_path / f"{name}.json.gz")
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["change"].verdict == "slower"


def test_output_is_real() -> None:
    """The command prints what the guide shows for two real traces."""
    (shown,) = re.findall(
        r"```console\n\$ instrument compare before.json.gz after.json.gz\n(.*?)```", GUIDE, re.DOTALL
    )
    paths = [shared(name) for name in ("kineto_tb_resnet50_nw0_v100.json.gz", "pairs/resnet50_workers4_a.json.gz")]
    printed = CliRunner().invoke(cli.app, ["compare", *map(str, paths)], env={"COLUMNS": "80"}).stdout
    assert printed.startswith(shown)
