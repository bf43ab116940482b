"""What the README says is so: its code runs, its diff is the examples' difference, its commands exist."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_diff_is_real() -> None:
    """Every line of the README's diff is one between the two examples."""
    plain, annotated = (ROOT / "examples" / name for name in ("transformer.py", "transformer_annotated.py"))
    real = list(difflib.ndiff(plain.read_text().splitlines(), annotated.read_text().splitlines()))
    real = [line[:1] + line[2:] for line in real if not line.startswith("?")]
    (shown,) = blocks("diff")
    assert [line for line in shown.splitlines() if line and line not in real] == []


def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks run one after the other."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "loader": [torch.ones(2)] * 12,
        "instrument": instrument,
        "model": torch.nn.Linear(2, 2),
    }
    for block in blocks("python"):
        exec(block, names)
    assert len(list(tmp_path.rglob("*.pt.trace.json.gz"))) >= 2


def test_commands_exist() -> None:
    """Every `make` target that is named is there."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = README + (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"make\s([a-z-]+)", text)) - {"and"} <= targets


def test_links_lead_somewhere() -> None:
    """Every file that the documents link to is there."""
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "integrations").glob("*/*.md")):
        for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
            assert target.startswith("https://") or (document.parent / target.partition("#")[0]).exists(), target


def test_public_names_are_documented() -> None:
    """Every public name has a docstring and is in the documents."""
    text = README + "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for name in instrument.__all__:
        assert getattr(instrument, name).__doc__, name
        assert f"instrument.{name}" in text, name
