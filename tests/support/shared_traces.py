"""Real traces that are kept beside the repository, not in it; tests that need one skip without it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).parents[2]


def shared(name: str) -> Path:
    """The path of a trace; the test skips where it is missing."""
    path = (_REPOSITORY / os.environ.get("INSTRUMENT_TRACES", "../shared/traces") / name).resolve()
    if not path.exists():
        pytest.skip(f"needs {path}: INSTRUMENT_TRACES names the folder of the real traces")
    return path
