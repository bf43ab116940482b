"""The private names of torch that stand-ins fake, and that the library asks for, are those of a CUDA build."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests import simgpu

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the CUDA build of torch: make gpu-sim"),
]
ROOT = Path(__file__).parents[2]


def test_names_exist() -> None:
    """A name that no CUDA build has would make a stand-in agree with a mistake."""
    files = [*(ROOT / "tests" / "support").glob("*.py"), *(ROOT / "src/instrument/compat").glob("*.py")]
    found = {name for file in files for name in re.findall(r'"(_cuda_[a-zA-Z]\w+)"', file.read_text())}
    assert found
    assert [] == sorted(name for name in found if not hasattr(torch._C, name))
