"""Regions whose names differ only in numbers are one row."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from instrument.read.measures.summary import RegionStat, Summary
from instrument.show.terminal.summary import join_numbered, print_summary


def region(*path: str, ns: int = 10, steps: frozenset[int] = frozenset()) -> RegionStat:
    return RegionStat(path, 1, ns, ns, 2 * ns, steps)


def test_many_layers() -> None:
    """More than eight regions beside each other are one row, and so are the regions inside them."""
    layers = [f"layer_{number}" for number in range(9)]
    tree = [
        region("net"),
        *(part for name in layers for part in (region("net", name), region("net", name, "mlp"))),
    ]
    assert join_numbered(tree) == (
        region("net"),
        RegionStat(("net", "layer_*"), 9, 90, 90, 180),
        RegionStat(("net", "layer_*", "mlp"), 9, 90, 90, 180),
    )
    assert join_numbered(tree[:-2]) == tuple(tree[:-2])


def test_numbers_inside_numbered_regions() -> None:
    """Regions of different parents are beside each other once the parents are one row."""
    tree = [
        part
        for number in range(9)
        for part in (region(f"request {number}"), region(f"request {number}", f"token_{number}_processing"))
    ]
    assert [row.path for row in join_numbered(tree)] == [
        ("request *",), ("request *", "token_*_processing"),
    ]  # fmt: skip


def test_names_that_differ_in_words_too() -> None:
    """Each pattern counts by itself; equal names at different places stay apart."""
    tree = [
        *(region(f"fc{number}") for number in range(9)),
        *(region(f"conv{number}") for number in range(8)),
        *(part for name in "ab" for part in (region(name), *(region(name, f"h.{n}.{n}") for n in range(10)))),
    ]
    names = [row.path for row in join_numbered(tree)]
    assert names == [
        ("fc*",), *((f"conv{n}",) for n in range(8)), ("a",), ("a", "h.*.*"), ("b",), ("b", "h.*.*"),
    ]  # fmt: skip


def test_steps_count_once() -> None:
    """A row ran in the steps in which any of its regions ran."""
    tree = [region(f"token_{number}", steps=frozenset({number // 3})) for number in range(9)]
    (row,) = join_numbered(tree)
    assert (row.calls, row.steps) == (9, 3)


names = st.sampled_from(["a1", "a2", "b", "c 1.5", "*", "a*"]) | st.integers(0, 30).map("x{}".format)


@given(st.lists(st.lists(names, min_size=1, max_size=3).map(tuple), unique=True, max_size=60))
def test_any_tree(paths: list[tuple[str, ...]]) -> None:
    """Sums stay the same, each row follows the one around it, and joining again changes nothing."""
    whole = dict.fromkeys(path[: depth + 1] for path in sorted(paths) for depth in range(len(path)))
    tree = [region(*path, ns=index + 1) for index, path in enumerate(whole)]
    rows = join_numbered(tree)
    assert sum(row.cpu_ns for row in rows) == sum(row.cpu_ns for row in tree)
    found = [row.path for row in rows]
    assert len({*found}) == len(found)
    assert all(path[:-1] in ((), *found[:place]) for place, path in enumerate(found))
    assert join_numbered(rows) == rows


def test_printed() -> None:
    """The summary prints the row and says how to see its regions; with ``expand``, each is a row."""
    regions = tuple(region(f"token_{number}_processing") for number in range(57))
    summary = Summary(0, 1_000, regions, (), 1_000, 0)
    texts = {}
    for expand in (False, True):
        out = StringIO()
        console = Console(file=out, width=80)
        print_summary(summary, files=[], folder=Path("runs"), expand=expand, console=console)
        texts[expand] = out.getvalue()
    assert "token_*_processing     57  570 ns" in texts[False]
    assert '"*" stands for numbers: instrument summarize --expand shows 56 more regions.' in texts[False]
    assert "token_12_processing" in texts[True] and "*" not in texts[True]
