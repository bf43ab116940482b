"""Layout of wrapped text and tables."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from instrument.show.terminal.console import Table, print_wrapped, show


@pytest.mark.parametrize("width", range(20, 60))
def test_numbers_stay_with_their_units(width: int) -> None:
    """Lines are never broken between a number and its unit; the text is unchanged and fits the width."""
    text = (
        "GPU, 480 ms of it: compute 97.6 %, exposed memcpys 0.8 %, idle 1.6 %. It took 1,200 us, 3 s or 12 steps."
    )
    out = StringIO()
    print_wrapped(Console(file=out, width=width), text)
    lines = out.getvalue().splitlines()
    assert " ".join(lines) == text
    assert max(map(len, lines)) <= width
    assert not any(line.startswith(("%", "ms", "us", "s ")) for line in lines)


KERNELS = [
    f"void at::native::vectorized_elementwise_kernel<{size}, at::native::{functor}, std::array<char*, 3ul>>(int)"
    for size, functor in ((4, "CUDAFunctor_add<float>"), (8, "CUDAFunctor_add<float>"), (4, "MulFunctor<float>"))
]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_shortened_names_stay_distinct(width: int) -> None:
    """Long names that begin and end alike are shortened so that they differ; short names are kept."""
    out = StringIO()
    names = [*KERNELS, KERNELS[0], "gemm"]
    show(Console(file=out, width=width), [Table(["kernel", "calls"], [[name, "1"] for name in names])])
    *rows, last = [line.rsplit(maxsplit=1)[0].rstrip() for line in out.getvalue().splitlines()[2:]]
    assert last == "gemm"
    assert rows[0] == rows[3]
    assert len(set(rows)) == len(KERNELS)
    assert all(row.startswith("void at") for row in rows)
    assert max(map(len, out.getvalue().splitlines())) <= width
