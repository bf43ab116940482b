"""The scripts under integrations/: their messages if a requirement is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support import warm
from tests.support.programs import ROOT, environment, python

pytestmark = pytest.mark.framework

FOLDER = ROOT / "integrations"
FRAMEWORKS = {
    "accelerate/train.py": "accelerate",
    "deepspeed/train.py": "deepspeed",
    "lightning/train.py": "lightning",
    "megatron/train.py": "megatron",
    "torchtitan/train.py": "torchtitan",
    "transformers/train.py": "transformers",
    "vllm/serve.py": "vllm",
}
WITHOUT_A_FRAMEWORK = {"server/serve.py", "torchtitan/trainer.py"}
HELPERS = {"megatron/cpu.py", "torchtitan/cpu.py"}
WITHOUT = """
import runpy, sys
script, missing = sys.argv[1:]
sys.modules[missing] = None
sys.path.insert(0, script.rpartition("/")[0])
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
"""


def test_every_script_is_listed() -> None:
    scripts = {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*.py")}
    assert scripts == {*FRAMEWORKS, *WITHOUT_A_FRAMEWORK, *HELPERS}


@pytest.mark.parametrize(("script", "package"), FRAMEWORKS.items())
def test_missing_framework(script: str, package: str, tmp_path: Path) -> None:
    """One line says what to install, without a traceback."""
    command = [sys.executable, "-c", WITHOUT, str(FOLDER / script), package]
    done = warm.run(command, environment())
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = (line for line in done.stderr.splitlines() if "Warning" not in line)
    assert package in line
    assert "This script needs it: pip install" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_megatron_without_a_gpu() -> None:
    """Without a GPU, the script for megatron-core says how to run on the CPU."""
    pytest.importorskip("megatron.core")
    done = warm.run(python(FOLDER / "megatron" / "train.py"), environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].endswith("add --cpu to try it on the CPU")
    assert "Traceback" not in done.stderr
