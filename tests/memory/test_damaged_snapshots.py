"""Damaged snapshots end in a snapshot, which can be shown, or in one error, with little memory.

A failure is repeated by ``python -m tests.memory.fuzzing SEED 1``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ..support.programs import ROOT

COUNT = 20_000 if os.environ.get("INSTRUMENT_FUZZ") == "all" else 150


@pytest.mark.fuzz
def test_mutants() -> None:
    """Whatever bytes, opcodes or values are changed, a snapshot comes out, or an error that names the file."""
    command = [sys.executable, "-m", "tests.memory.fuzzing", "0", str(COUNT)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    )
    assert 0 == done.returncode, done.stderr[-2000:]
    *errors, last = done.stdout.splitlines()
    assert [] == errors
    whole = json.loads(last)
    assert COUNT == whole["count"]
    assert 0.1 * COUNT < whole["read"] < 0.9 * COUNT
    assert whole["peak_mib"] < 1000
