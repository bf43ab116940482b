"""Which regular expressions an agent may ask with."""

from __future__ import annotations

import time

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
        ".*gemm.*",
        ".*gemm.*bf16.*",
        r"gemm.*_.*tn",
        "a*a*",
        "^.*:.*x",
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
        "(?:.*a){2}b",
        "a*a*b",
        "a*.*b",
        "(?=a*a*b)x",
        r"\w*gemm\w*$",
        "(?i)(?:ab|A)*c",
        "aa.*aa.*b",
        r"(a*)\1b",
    ],
)
def test_expressions_that_take_very_long(pattern: str) -> None:
    """What needs exponential time, or the cube of the length and more, is refused with what to change."""
    with pytest.raises(ValueError, match="may take too long: it may have two"):
        compiled("only", pattern)


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        (".*gemm.*bf16.*", [("gemm", 512)]),
        ("gemm.*relu.*bf16", [("gemm", 170), ("relu", 170), ("x", 688)]),
        ("ab.*cd.*e", [("ab", 341), ("cd", 341), ("x", 684)]),
        (".*a", [("b", 2048)]),
        (r"void (?:at|c10)::\w+<.*>", [("void at::a<", 186)]),
    ],
)
def test_what_is_accepted_takes_no_seconds(pattern: str, parts: list[tuple[str, int]]) -> None:
    """A text made to take long takes less than five seconds of CPU time, most of them far less."""
    searched, text = compiled("only", pattern), "".join(word * times for word, times in parts)
    assert searched
    begin = time.process_time()
    assert not searched.search(text)
    assert time.process_time() - begin < 5
