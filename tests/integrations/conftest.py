"""What every test of an integration begins with."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def no_earlier_optimizers() -> None:
    """Free optimizers of earlier tests, which frameworks keep in reference cycles.

    With two alive, both get labels.
    """
    gc.collect()
