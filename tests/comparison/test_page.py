"""The page of a comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

import instrument
from instrument.explain.comparison.comparison import Comparison, Part
from instrument.show.sections.comparison import page_of
from tests.page.hostile import HOSTILE
from tests.support.browser import OpenedPage, OpenPage, in_notebook
from tests.support.shared_traces import shared

from .recordings import command
from .test_parts import loop


@pytest.fixture(scope="module")
def change() -> Comparison:
    """A comparison in which one kernel appeared and the log became slower."""
    return instrument.compare(loop(kernels=5).trace(), loop(kernels=5, extra="softmax", sleep=40_000).trace())


def opened(open_page: OpenPage, path: Path, width: int = 1280) -> OpenedPage:
    """Return the open page, complete and without errors or requests."""
    shown = open_page(path, width=width)
    shown.page.wait_for_selector("[data-ready]")
    assert (shown.errors, shown.requests) == ([], [])
    return shown


def bars(shown: OpenedPage) -> list[int]:
    """Return the times of the rows of the waterfall in ns: before, the differences, after."""
    return [
        int(text) for text in shown.page.eval_on_selector_all(".row", "rows => rows.map(row => row.dataset.value)")
    ]


def joined(shown: OpenedPage) -> bool:
    """Return whether each bar begins where the last one ends, from the time before to the time after."""
    pieces = shown.page.eval_on_selector_all(
        ".piece",
        "all => all.map(one => { const box = one.getBoundingClientRect(); return [box.left, box.right]; })",
    )
    at, differences = pieces[0][1], bars(shown)[1:-1]
    for (left, right), ns in zip(pieces[1:-1], differences, strict=True):
        begin, end = (left, right) if ns > 0 else (right, left)
        if abs(begin - at) > 1.5:  # pixels: no bar is narrower than one
            return False
        at = end
    return abs(pieces[-1][1] - at) < 1.5


def test_content(change: Comparison, tmp_path: Path, open_page: OpenPage) -> None:
    """The page has the verdict, the figures, the steps and the findings, and a table of everything drawn."""
    shown = opened(open_page, change.to_html(tmp_path / "page.html"))
    lead = shown.page.locator(".lead").text_content()
    assert lead is not None and lead.startswith("Slower: a step takes")
    assert shown.page.locator("circle").count() == sum(change.steps) == 16
    for details in shown.page.locator("summary").all():
        details.click()
    tree = shown.accessibility()
    for number in (*change.lengths_ns[0], *change.lengths_ns[1], change.parts[0].ns):
        assert f"{number:,}" in tree
    for text in ("p-value", "detectable", "before: 8 steps, median", "softmax", "before: "):
        assert text in tree


def test_waterfall_adds_up(change: Comparison, tmp_path: Path, open_page: OpenPage) -> None:
    """The bars lead from the time before to the time after, also of a part of it; the address keeps which."""
    shown = opened(open_page, change.to_html(tmp_path / "page.html"))
    before, *differences, after = bars(shown)
    assert (before, after) == (change.before_ns, change.after_ns)
    assert before + sum(differences) == after
    assert differences == [ns for ns in change.by_kind().values() if ns]
    assert joined(shown)
    shown.page.get_by_role("button", name="By region").click()
    assert bars(shown)[1:-1] == [ns for ns in change.by_region().values() if ns]
    shown.page.locator(".rows").get_by_role("button", name="forward").click()
    forward = [part for part in change.parts if part.region == ("forward",)]
    before, *differences, after = bars(shown)
    assert (before, after) == (sum(part.before_ns for part in forward), sum(part.after_ns for part in forward))
    assert before + sum(differences) == after
    shown.page.wait_for_timeout(500)  # the address changes no more often
    shown.page.reload()
    shown.page.wait_for_selector("[data-ready]")
    assert bars(shown) == [before, *differences, after]
    shown.page.get_by_role("button", name="All parts").click()
    assert bars(shown)[0] == change.before_ns
    assert shown.errors == []


def test_words_of_kinds(change: Comparison, tmp_path: Path, open_page: OpenPage) -> None:
    """Kinds have the words of the page of a diagnosis, in the rows, in the path to a part and in the table."""
    copies = Part("copies", ("log",), "aten::copy_", "Memcpy HtoD", 100_000, 300_000, 1, 1)
    waits = Part("latency", ("log",), "", "", 50_000, 70_000, 1, 1)
    more = replace(change, parts=(copies, replace(copies, kernel="Memcpy DtoH"), waits))
    shown = opened(open_page, more.to_html(tmp_path / "page.html"))
    names = shown.page.locator(".waterfall .rows .name").all_inner_texts()
    assert names == ["before", "exposed memcpys", "idle: launch latency", "after"]
    shown.page.locator(".rows").get_by_role("button", name="exposed memcpys").click()
    assert shown.page.locator(".crumbs button").nth(1).inner_text() == "exposed memcpys"
    shown.page.get_by_text("All parts as a table").click()
    cells = shown.page.locator("#parts tbody tr td:first-child").all_inner_texts()
    assert set(cells) == {"exposed memcpys", "idle: launch latency"}


def test_many_parts(change: Comparison, tmp_path: Path, open_page: OpenPage) -> None:
    """The smallest of many parts are joined, in the chart and in the data, and the sums stay exact."""
    parts = tuple(
        Part(
            "compute",
            (f"layer{number}",),
            "aten::mm",
            f"k{number}",
            5000,
            5000 + (-1) ** number * (9000 - number),
            1,
            1,
        )
        for number in range(4001)
    )
    before, after = (sum(getattr(part, name) for part in parts) for name in ("before_ns", "after_ns"))
    many = replace(change, parts=parts, before_ns=before, after_ns=after)
    shown = opened(open_page, many.to_html(tmp_path / "page.html"))
    shown_before, *differences, shown_after = bars(shown)
    assert (shown_before, shown_after) == (before, after)
    assert before + sum(differences) == after and len(differences) == 13
    assert joined(shown)
    names = shown.page.locator(".name").all_text_contents()
    assert names[-2] == "(1989 smaller)"
    shown.page.get_by_text("All parts as a table").click()
    assert "(2,001 smaller parts)" in page_text(shown)
    assert (tmp_path / "page.html").stat().st_size < 300_000


def page_text(shown: OpenedPage) -> str:
    shown.page.get_by_role("button", name="Show all 2001 rows").click()
    return shown.page.inner_text("main")


@pytest.mark.parametrize("width", [360, 1280, 3840])
def test_hostile_names(change: Comparison, tmp_path: Path, open_page: OpenPage, width: int) -> None:
    """Names are text: none runs, none makes the page wider than the window."""
    parts = tuple(
        Part("compute", (name, name), name, name, number, 3 * number, 1, 1) for number, name in enumerate(HOSTILE)
    )
    hostile = replace(
        change, parts=parts, notes=tuple(HOSTILE[:9]), reasons=tuple(HOSTILE[:3]), verdict="not comparable"
    )
    shown = opened(open_page, hostile.to_html(tmp_path / "page.html"), width)
    shown.page.get_by_text("All parts as a table").click()
    shown.page.get_by_role("button", name="By region").click()
    assert shown.page.evaluate("document.documentElement.scrollWidth") == width
    assert shown.page.locator("main script, main img, main iframe, main style, main form, main link").count() == 0
    assert (shown.errors, shown.requests) == ([], [])
    assert "</script>" in shown.page.inner_text("main")


@pytest.mark.parametrize("view", ["parts=}{", "parts=7", 'parts=["x"]', "parts=" + quote('[["a"],2,3,4,5,6]')])
def test_strange_address(change: Comparison, tmp_path: Path, open_page: OpenPage, view: str) -> None:
    """An address with parts that the page does not have shows all parts."""
    path = change.to_html(tmp_path / "page.html")
    shown = open_page(f"{path.as_uri()}#{view}")
    shown.page.wait_for_selector("[data-ready]")
    assert bars(shown)[0] == change.before_ns
    assert shown.errors == []


def test_equal_recordings(tmp_path: Path, open_page: OpenPage) -> None:
    """Two equal recordings have no differences, and steps of one length."""
    same = instrument.compare(loop(kernels=2).trace(), loop(kernels=2).trace())
    shown = opened(open_page, same.to_html(tmp_path / "page.html"))
    assert bars(shown) == [same.before_ns, same.after_ns]
    assert "No finding differs." in shown.page.inner_text("main")


def test_without_steps(change: Comparison, tmp_path: Path, open_page: OpenPage) -> None:
    """Without steps there are no dots, and the figures are those of the trace."""
    sides = {name: replace(getattr(change, name), has_steps=False) for name in ("before", "after")}
    shown = opened(
        open_page, replace(change, **sides, p_value=None, detectable=None).to_html(tmp_path / "page.html")
    )
    assert shown.page.locator("svg").count() == 0
    assert "trace before" in shown.page.inner_text("main")


def test_notebook(change: Comparison, tmp_path: Path, open_page: OpenPage) -> None:
    """In a notebook the page is a frame of less than 2 MB."""
    shown = in_notebook(open_page, tmp_path, change._repr_html_())
    inner = shown.page.frame_locator("iframe")
    assert inner.locator("circle").count() == 16
    inner.get_by_role("button", name="By region").click()
    assert shown.errors == []


def test_never_raises(change: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook shows text instead of a page that cannot be made."""
    monkeypatch.setattr(instrument.base.config.settings, "strict", False)
    assert replace(change, before=None)._repr_html_() is None


def test_command(traces: tuple[Path, Path], tmp_path: Path) -> None:
    """The option --html writes the page; --fail-on still applies."""
    page = tmp_path / "page.html"
    assert "page.html has the page" in command(*traces, "--html", page)

    assert page.read_text() == page_of(instrument.compare(*traces))
    command(*traces, "--html", page, "--fail-on", "slower=5%", code=1)
    assert "--json and --html exclude each other" in command(*traces, "--html", page, "--json", code=2)
    assert "cannot write" in command(*traces, "--html", tmp_path, code=1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("kineto_tb_resnet50_nw0_v100.json.gz", "pairs/resnet50_workers4_a.json.gz"),
        ("hta_tracediff_control.json.gz", "pairs/hta_test_v100.json.gz"),
        ("nsys/mfu_2gpu_before.sqlite", "nsys/mfu_2gpu_after.sqlite"),
    ],
)
def test_real_pairs(before: str, after: str, tmp_path: Path, open_page: OpenPage) -> None:
    """Of real pairs every level of the waterfall adds up, and the page is small."""
    change = instrument.compare(shared(before), shared(after))
    shown = opened(open_page, change.to_html(tmp_path / "page.html"))
    levels = 0
    while True:
        first, *differences, last = bars(shown)
        assert first + sum(differences) == last
        assert joined(shown)
        levels += 1
        deeper = shown.page.locator(".rows button")
        if not deeper.count():
            break
        deeper.first.click()
    assert levels >= 2
    assert (tmp_path / "page.html").stat().st_size < 400_000
    assert shown.errors == []
