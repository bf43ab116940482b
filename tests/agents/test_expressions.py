"""Which regular expressions an agent may ask with."""

from __future__ import annotations

import pytest

pytest.importorskip("mcp")

from instrument.start.agent.expressions import compiled


@pytest.mark.parametrize(
    "pattern",
    [
        "^(gemm|relu)$",
        "gemm.*relu.*bf16",
        r"void (?:at|c10)::\w+<.*>",
        r"_\d{1,4}x\d{1,4}_",
        "(?i)nccl",
        "(?:ab){2,9}x",
    ],
)
def test_usual_expressions(pattern: str) -> None:
    """What names are searched by is accepted."""
    assert compiled("only", pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|a)*$",
        "(a*)*b",
        "(?:a|b|ab)+$",
        "(?=(a+)+$)",
        "(a?){30}a{30}",
        "a?" * 30 + "a" * 30,
        "(a|a)" * 30 + "b",
        "a*a*a*b",
        "(x)?(?(1)(a+)+b|c)",
        "((((a+)+)+)+)+b",
    ],
)
def test_expressions_that_take_very_long(pattern: str) -> None:
    """What needs exponential time, or the cube of the length and more, is refused with what to change."""
    with pytest.raises(ValueError, match="may take too long: it may have two"):
        compiled("only", pattern)
