"""Sizes and durations that people write."""

from __future__ import annotations

from typing import Any

import pytest

import instrument
from instrument.base.units import parse_duration, parse_size

MANY = "9" * 400


@pytest.mark.parametrize("text", ["0.1B", f"{MANY}TB", f"0.{'0' * 400}1TB", "9223372036854775808B"])
def test_a_size_out_of_range(text: str) -> None:
    """A size is at least a byte and fits into 64 bits."""
    with pytest.raises(ValueError, match='"total" must be '):
        parse_size(text, "total")


@pytest.mark.parametrize("text", [f"{MANY}d", "293000000w"])
def test_a_duration_out_of_range(text: str) -> None:
    """A duration in ns fits into 64 bits."""
    with pytest.raises(ValueError, match='"age" must be '):
        parse_duration(text, "age")


@pytest.mark.parametrize("given", [{"size": f"{MANY}TB"}, {"every": f"{MANY}d"}, {"entries": 2**70}])
def test_a_memory_history_out_of_range(given: dict[str, Any]) -> None:
    """The call raises, and names the argument."""
    (name,) = given
    with pytest.raises(ValueError, match=f'"{name}" must be '):
        instrument.memory_history(**given)


def test_in_range() -> None:
    """The smallest and large values are accepted."""
    assert [1, 10**18, 8 * 2**40] == [parse_size(text, "total") for text in ("1B", "1000000TB", "8TiB")]
    assert 0.1 == parse_duration("0.1s", "age")
    assert 2**31 - 1 == instrument.memory_history(entries=2**31 - 1).entries
