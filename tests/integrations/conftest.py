"""Fixtures that every test of an integration uses."""

from __future__ import annotations

import gc
import importlib.util

import pytest

# What imports a framework cannot be collected without it.
_IMPORTS = {
    "accelerate": ["test_accelerate.py"],
    "lightning": ["test_lightning.py", "test_lightning_automatic.py", "test_lightning_profiler.py"],
    "transformers": ["test_generation.py", "test_transformers.py"],
}
collect_ignore = [
    name for framework, names in _IMPORTS.items() if importlib.util.find_spec(framework) is None for name in names
]


@pytest.fixture(autouse=True)
def no_earlier_optimizers() -> None:
    """Free optimizers of earlier tests, which frameworks keep in reference cycles.

    With two alive, both would get labels.
    """
    gc.collect()
