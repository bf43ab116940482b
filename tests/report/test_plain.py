"""How text and tables are laid out."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from instrument.report.plain import sentence


@pytest.mark.parametrize("width", range(20, 60))
def test_no_line_parts_a_number_from_its_unit(width: int) -> None:
    """Whatever the width; nothing else of the text changes, and no line is too wide."""
    text = (
        "GPU, 480 ms of it: compute 97.6 %, exposed copies 0.8 %, idle 1.6 %. It took 1,200 us, 3 s or 12 steps."
    )
    out = StringIO()
    sentence(Console(file=out, width=width), text)
    lines = out.getvalue().splitlines()
    assert " ".join(lines) == text
    assert max(map(len, lines)) <= width
    assert not any(line.startswith(("%", "ms", "us", "s ")) for line in lines)
