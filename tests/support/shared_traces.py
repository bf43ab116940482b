"""Real traces outside of the repository; tests that need a missing trace are skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).parents[2]


def shared(name: str) -> Path:
    """Return the path of a trace; skip the test if the file is missing."""
    path = (_REPOSITORY / os.environ.get("INSTRUMENT_TRACES", "../shared/traces") / name).resolve()
    if not path.exists():
        pytest.skip(f"needs {path}: INSTRUMENT_TRACES names the folder of the real traces")
    return path
