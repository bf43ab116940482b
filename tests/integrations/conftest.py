"""Fixtures that every test of an integration uses."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def no_earlier_optimizers() -> None:
    """Free optimizers of earlier tests, which frameworks keep in reference cycles.

    With two alive, both would get labels.
    """
    gc.collect()
