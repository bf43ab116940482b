"""The command line and the environment of a program that is to bring us in."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import RUN

PROCESS = "INSTRUMENT_RUN_PROCESS"
"""The environment variable with the number of the process that ``instrument run`` becomes."""

_SITE = Path(__file__).parent / "site"


def command(program: Sequence[str]) -> list[str]:
    """Return the command line of ``program``: a Python script, ``-m`` and a module, or a command such as torchrun.

    Raises:
        ValueError: there is no such program.
    """
    if not program:
        raise ValueError("nothing to run: instrument run [options] -- train.py arguments...")
    first = program[0]
    if first.startswith("-") or first.endswith((".py", ".pyc", ".pyz")) or Path(first).is_dir():
        return [sys.executable, *program]
    if shutil.which(first):
        return list(program)
    if Path(first).is_file():
        return [sys.executable, *program]
    raise ValueError(f"there is no program {first}")


def environment(loop: Mapping[str, Any], before: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment that has each Python process of a program make a loop of the arguments ``loop``."""
    given = before.get("PYTHONPATH")
    paths = [path for path in given.split(os.pathsep) if path != str(_SITE)] if given else []
    return {**before, RUN: json.dumps(loop), "PYTHONPATH": os.pathsep.join([str(_SITE), *paths])}
