"""The code in the guides "diagnose.md" and "what-if.md" runs, and their output is real."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from instrument.explain.replay.critical_path import CLASSES
from instrument.explain.rules.rule import RULES
from instrument.start import cli
from tests.support.shared_traces import shared

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "diagnose.md").read_text()
WHAT_IF = (ROOT / "docs" / "what-if.md").read_text()


@pytest.mark.parametrize("page", ["diagnose.md", "page.md"])
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks run one after the other."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "tests" / "data" / "gpu_two_steps.json", "trace.json.gz")
    names: dict[str, Any] = {}
    try:
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL):
            exec(block, names)
    finally:
        RULES.pop("many-fills", None)
    assert names.keys() & {"diagnosis", "page"}


def test_output_is_real() -> None:
    """The command prints what the guide shows for a real trace."""
    (shown,) = re.findall(r"```console\n\$ instrument diagnose trace.json.gz\n(.*?)```", GUIDE, re.DOTALL)
    printed = CliRunner().invoke(cli.app, ["diagnose", str(shared("tl_h100_bert_small.json.gz"))]).stdout
    assert printed.startswith(shown)


def test_output_of_whatif_is_real() -> None:
    """The command prints what the guide to predictions shows for a real trace."""
    (shown,) = re.findall(
        r"```console\n\$ instrument whatif trace.json.gz --without dataloader\n(.*?)```", WHAT_IF, re.DOTALL
    )
    path = shared("kineto_tb_resnet50_nw0_v100.json.gz")
    printed = (
        CliRunner().invoke(cli.app, ["whatif", str(path), "--without", "dataloader"], env={"COLUMNS": "80"}).stdout
    )
    assert printed.startswith(shown)


def test_code_of_whatif_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python block of the guide to predictions runs."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "tests" / "data" / "gpu_two_steps.json", "trace.json.gz")
    (block,) = re.findall(r"```python\n(.*?)```", WHAT_IF, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["guess"].self_error is not None


def test_classes_of_the_critical_path_are_listed() -> None:
    """The guide lists each class of the critical path."""
    table = WHAT_IF.partition("| class | meaning |")[2].partition("\n\n")[0]
    listed = {name for row in re.findall(r"^\| ([a-z, ]+) \|", table, re.MULTILINE) for name in row.split(", ")}
    assert listed == set(CLASSES)
