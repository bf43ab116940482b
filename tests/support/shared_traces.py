"""Real traces of public repositories, which ``make traces`` fetches; a test that needs one skips without it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).parents[2]
FOLDER = _REPOSITORY / os.environ.get("INSTRUMENT_TRACES", "build/traces")


def shared(name: str) -> Path:
    """Return the path of a trace, or skip the test if it is missing."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip("needs real traces: make traces")
    return path
