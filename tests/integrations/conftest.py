"""What every test of an integration begins with."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def collected() -> None:
    """Leave no optimizer of an earlier test, which frameworks keep in cycles: both would get labels."""
    gc.collect()
