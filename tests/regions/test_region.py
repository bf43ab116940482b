"""Colors of regions: the numbers that profilers get."""

from __future__ import annotations

import pytest

from instrument.record.regions.region import COLORS, NVTX_COLORS, OPAQUE, argb


@pytest.mark.parametrize(
    ("color", "expected"),
    [
        ("red", 0x00FF0000),  # as with nvtx
        ("Red", 0xFFFF0000),
        ("maroon", 0xFF800000),
        ("#102030", 0xFF102030),
        ("#40102030", 0x40102030),
        (0x40102030, 0x40102030),
        (0, 0),
    ],
)
def test_colors(color: str | int, expected: int) -> None:
    """A color is opaque unless its alpha is given, except the names that nvtx knows."""
    assert expected == argb(color)


@pytest.mark.parametrize("name", COLORS)
def test_names(name: str) -> None:
    """Names of nvtx have no alpha, the other names are opaque, and case does not matter to the color."""
    alpha = 0 if name in NVTX_COLORS else OPAQUE
    assert alpha | COLORS[name] == argb(name)
    assert OPAQUE | COLORS[name] == argb(name.upper())


@pytest.mark.parametrize(
    ("color", "error"), [(True, TypeError), (1.0, TypeError), (-1, ValueError), ("no", ValueError)]
)
def test_wrong_colors(color: object, error: type[Exception]) -> None:
    """Errors name the argument and its value."""
    with pytest.raises(error, match=f'"color" must be .*: {color!r}'):
        argb(color)
