"""Fixtures of the tests of the diagnosis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import instrument
from instrument.explain.rules.rule import RULES


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    """Put back the rules that a test registers."""
    assert instrument.rule  # imports the rules of the library
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)
