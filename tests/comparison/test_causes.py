"""Which findings of one recording are those of another."""

from __future__ import annotations

from instrument.base.findings import Finding, Site, Where
from instrument.explain.comparison.comparison import _among, _without


def finding(rule: str, **where: object) -> Finding:
    return Finding(rule=rule, severity="low", title=rule, where=Where(**where))


def sync(line: int, function: str = "train") -> Finding:
    return finding("synchronization/item", site=Site("/train.py", line, function))


def test_a_line_that_an_edit_moved() -> None:
    """It is the same as long as its function is; a second line of the function is another cause."""
    assert _without([sync(10)], [sync(12)]) == ()
    assert _without([sync(10), sync(11)], [sync(12)]) == (sync(11),)
    assert _without([sync(10), sync(12)], [sync(12)]) == (sync(10),)  # the same line first
    assert _without([sync(10)], [sync(30, "log")]) == (sync(10),)


def test_a_cause_that_costs_most_elsewhere() -> None:
    """It is the same cause; another kernel is another one, and so is one beyond those of the other recording."""
    here, there = (finding("launch-overhead", region=(name,)) for name in ("forward", "backward"))
    assert _without([here], [there]) == ()
    assert _among([here], [there]) == (here,)
    assert _without([here, there], [there]) == (here,)
    slow, fast = (finding("dominant-kernel", kernel=name) for name in ("gemm", "softmax"))
    assert _without([slow], [fast]) == (slow,)
