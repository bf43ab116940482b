"""Fixtures of the window tests: summaries are off unless a test turns them on."""

from __future__ import annotations

from pathlib import Path

import pytest

from instrument.base.config import settings
from instrument.record.handover import finishing_process


@pytest.fixture(autouse=True)
def without_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "summary", False)
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture(autouse=True)
def normal_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process that finishes windows have its turn on a busy machine, where it would get none."""
    monkeypatch.setattr(finishing_process, "_NICER_BY", 0)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder that windows are saved in; it does not exist yet."""
    return tmp_path / "runs" / "test"
