"""No summary is printed after these windows, but where a test asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from instrument.config import settings


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "summary", False)
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder that windows land in; not made yet."""
    return tmp_path / "runs" / "test"
