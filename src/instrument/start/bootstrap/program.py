"""The command line and the environment with which ``instrument run`` starts a program."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base.config import RUN

PROCESS = "INSTRUMENT_RUN_PROCESS"
"""The environment variable with the id of the process that ``instrument run`` becomes."""

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*t?(?:\.exe)?", re.IGNORECASE)
_LONG_WITH_VALUE = "--check-hash-based-pycs"
_SITE = Path(__file__).parent / "site"


def command(program: Sequence[str]) -> list[str]:
    """Return the command line of ``program``: a Python script, ``-m`` and a module, or a command such as torchrun.

    Raises:
        ValueError: the program does not exist.
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
    raise ValueError(f"program not found: {first}")


def excluding_options(line: Sequence[str]) -> list[str]:
    """Return the options of Python in a command line that disable what `environment` adds.

    These are ``-E``, ``-I`` and ``-S``, also combined as in ``-IB``. Commands that start Python
    themselves, such as torchrun, have none.
    """
    if not _PYTHON.fullmatch(Path(line[0]).name):
        return []
    found: set[str] = set()
    words = iter(line[1:])
    for word in words:
        if word.startswith("--"):
            if word == _LONG_WITH_VALUE:
                next(words, None)
            continue
        if not word.startswith("-") or word == "-":
            break  # the script
        for place, flag in enumerate(word[1:], 2):
            if flag in "cm":
                return sorted(found)
            if flag in "WX":
                if place == len(word):
                    next(words, None)
                break
            found |= {f"-{flag}"} & {"-E", "-I", "-S"}
    return sorted(found)


def environment(loop: Mapping[str, Any], before: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment in which each Python process of a program makes a `Loop` of arguments ``loop``."""
    given = before.get("PYTHONPATH")
    paths = [path for path in given.split(os.pathsep) if path != str(_SITE)] if given else []
    return {**before, RUN: json.dumps(loop), "PYTHONPATH": os.pathsep.join([str(_SITE), *paths])}
