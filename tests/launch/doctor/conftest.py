"""Fixtures for the tests of the doctor."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from instrument.start.doctor.machine import Machine
from tests.launch.doctor.support import CPU, VERSION
from tests.support.programs import TOOL_VARIABLES


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the tools and settings of the test machine, except those that a test sets."""
    for name in list(os.environ):
        if name.startswith((*TOOL_VARIABLES, "KINETO_", "LD_PRELOAD", "CUDA_", "KUBERNETES_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine with an empty system, no packages, and a torch for the CPU."""
    (tmp_path / "root").mkdir()
    empty = Machine(root=tmp_path / "root", temp=tmp_path, out=tmp_path / "runs", packages=[], limit_s=30)
    empty.torch = CPU
    return empty


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make PATH contain only the tools that a test writes as shell scripts."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "sleep", "touch", "kill", "env"):
        (folder / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(folder))

    def write(name: str, script: str = "", version: str = VERSION) -> Path:
        path = folder / name
        # $5 to $7 of `nsys profile` are --export=sqlite --output FILE
        path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "{version}"; exit; }}\n{script}\n')
        path.chmod(0o755)
        return path

    return write
