"""Runs pytest with the plugin in a process of its own."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import instrument

from . import warm

SOURCE = str(Path(instrument.__file__).parent.parent)


def run(
    folder: Path, *args: str, plugin: bool = True, gpu: bool = False, start: Any = warm.run, **environment: str
) -> tuple[int, str]:
    """Run pytest in a process with the plugin as the only one; return exit code and output."""
    path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
    more = {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "100"} | environment
    more |= {} if gpu else {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    named = ["-p", "instrument.start.pytest_plugin"] if plugin else []
    options = ["-p", "no:cacheprovider", "--strict-markers", "-W", "error", "--rootdir", str(folder)]
    command = [sys.executable, "-m", "pytest", *named, *options, *args]
    result = start(command, env=os.environ | more, cwd=folder)
    return result.returncode, result.stdout + result.stderr


def outcomes(text: str) -> dict[str, str]:
    return dict(
        re.findall(
            r"^(?:\[gw\d\] +\[ *\d+%\] )?(?:\S+::)?(?P<b>test_\w+(?:\[\d\])?) (?P<a>[A-Z]+)", text, re.MULTILINE
        )
    )


def failure(text: str, name: str) -> str:
    """Return the text that pytest prints for one failed test."""
    return re.split(r"\n_{3,} ", text.split(f"_ {name} _", 1)[1])[0]


def marked_tests(source: str) -> Any:
    """Return a fixture: the folder and the output of one run of the tests in ``source``, some of which fail."""

    @pytest.fixture(scope="module")
    def marked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp("marked")
        (folder / "test_it.py").write_text(source)
        code, text = run(folder, "-v", "-rA")
        assert code == 1, text
        return folder, text

    return marked
