"""A page is one file that requests nothing, and in which texts stay texts."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from instrument.base.page_file import frame, write_page
from instrument.base.printable import shown_name
from instrument.base.units import size
from instrument.show.page.document import document, summary_section
from tests.support.browser import OpenPage

from .hostile import HOSTILE

COLUMNS = [{"title": "Name", "kind": "text"}, {"title": "Time", "kind": "ns"}]


def table(rows: list[list[Any]], **more: Any) -> dict[str, Any]:
    section = {"id": "rows", "type": "table", "title": "Rows", "caption": "All rows", "columns": COLUMNS}
    return section | {"rows": rows, **more}


def write(folder: Path, *sections: dict[str, Any], title: str = "A page", lead: str = "The lead.") -> Path:
    return write_page(folder / "page.html", document(title, lead, sections))


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond 10,000 bytes, as on a disk without space."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("dark", [False, True])
def test_clean(tmp_path: Path, open_page: OpenPage, dark: bool) -> None:
    """A page reports no error and requests nothing, in both color schemes."""
    opened = open_page(write(tmp_path, table([["one", 1_000], ["two", 2_000_000]])), dark=dark)
    opened.page.wait_for_selector("[data-ready]")
    assert (opened.errors, opened.requests) == ([], [])
    assert opened.page.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    tree = opened.accessibility()
    for text in ("The lead.", "one", "1.00 us", "2.00 ms"):
        assert text in tree


def test_hostile_names(tmp_path: Path, open_page: OpenPage) -> None:
    """No script, style, link or character of a name has an effect; each is shown as text."""
    names = [shown_name(name) for name in HOSTILE]
    page = write(tmp_path, table([[name, 1] for name in names]), title=names[0], lead=names[1])
    assert page.stat().st_size < 200_000
    opened = open_page(page)
    opened.page.wait_for_selector("[data-ready]")
    assert (opened.errors, opened.requests) == ([], [])
    opened.page.get_by_role("button", name=f"Show all {len(names)} rows").click()
    shown = opened.page.locator("td.text").all_text_contents()
    assert shown == names and len(names) >= 50
    assert opened.page.locator("main script, main img, main iframe, main style, main form").count() == 0
    assert opened.page.evaluate("document.styleSheets.length") == 1
    assert all(text.isprintable() for text in names)


def test_policy_stops_scripts(tmp_path: Path, open_page: OpenPage) -> None:
    """A script that gets into the page does not run: the policy names the page's own by hash."""
    page = write(tmp_path, table([["one", 1]]))
    page.write_text(page.read_text().replace("</main>", "<script>document.title = 'run'</script></main>"))
    opened = open_page(page)
    opened.page.wait_for_selector("[data-ready]")
    assert opened.page.title() == "A page"
    assert any("Content Security Policy" in error for error in opened.errors)


def test_sorts_and_filters(tmp_path: Path, open_page: OpenPage) -> None:
    """A column's button sorts, again the other way round; the input filters; more rows show on demand."""
    opened = open_page(write(tmp_path, table([[f"kernel {n}", (n * 7) % 30] for n in range(30)])))
    rows, page = opened.page.locator("tbody tr"), opened.page
    assert rows.count() == 20
    page.get_by_role("button", name="Show all 30 rows").click()
    assert rows.count() == 30
    page.get_by_role("button", name="Time").click()
    assert page.locator("td:last-child").first.text_content() == "29 ns"
    assert page.locator("th[aria-sort=descending]").text_content() == "Time"
    page.get_by_role("button", name="Time").click()
    assert page.locator("td:last-child").first.text_content() == "0"
    page.get_by_role("searchbox").fill("KERNEL 2")
    assert rows.count() == 11
    assert "11 of 30 rows" in opened.accessibility()
    assert (opened.errors, opened.requests) == ([], [])


def test_sizes(tmp_path: Path, open_page: OpenPage) -> None:
    """A column of bytes has the digits and the units of the terminal."""
    numbers = [0, 1, 999, 1000, 9994, 9996, 12_345, 999_400, 999_600, 2 * 10**9, 30 * 10**9, 43.81e9, 5e12, -4.5e6]
    columns = [{"title": "Memory", "kind": "bytes"}]
    opened = open_page(write(tmp_path, table([[number] for number in numbers], columns=columns)))
    opened.page.wait_for_selector("[data-ready]")
    assert [size(number) for number in numbers] == opened.page.locator("tbody td").all_inner_texts()


def test_notes_are_whole() -> None:
    """The notes of a summary are longer than names may be; control characters in them are visible."""
    note = "What the estimate assumes. " * 20
    assert [f"{note}\\x1b"] == summary_section("Summary", [], [f"{note}\x1b"])["notes"]


def test_keys(tmp_path: Path, open_page: OpenPage) -> None:
    """The keyboard reaches everything: "?" lists the keys, "t" changes the theme, which the address keeps."""
    path = write(tmp_path, table([["one", 1]]))
    opened = open_page(path)
    page = opened.page
    page.wait_for_selector("[data-ready]")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.url.endswith("#theme=dark")
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()
    assert "List the keys" in opened.accessibility()
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") in ("A", "BUTTON")
    page.reload()
    page.wait_for_selector("[data-ready]")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("width", [360, 1280, 3840])
def test_no_sideways_scrolling(tmp_path: Path, open_page: OpenPage, width: int) -> None:
    """The page is as wide as the window; a wide table scrolls in itself."""
    opened = open_page(write(tmp_path, table([["name " * 40, 1], ["x" * 300, 2]])), width=width)
    opened.page.wait_for_selector("[data-ready]")
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("width", [420, 1200])
def test_links_to_sections(tmp_path: Path, open_page: OpenPage, width: int) -> None:
    """All links to the sections are in sight, and none leads to a title that the header hides."""
    rows = [["one", 1]] * 20
    sections = [table(rows, id=f"rows{number}", title=f"Table number {number} of rows") for number in range(12)]
    page = open_page(write(tmp_path, *sections), width=width).page
    page.wait_for_selector("[data-ready]")
    links = page.locator("#contents a")
    nav, boxes = page.locator("#contents").bounding_box(), [link.bounding_box() for link in links.all()]
    assert nav is not None
    assert 12 == len(boxes)
    for box in boxes:
        assert box is not None
        assert nav["x"] <= box["x"] and box["x"] + box["width"] <= min(nav["x"] + nav["width"], width)
        assert box["y"] + box["height"] <= nav["y"] + nav["height"]
    for _ in range(2):  # the second time, the page is scrolled
        links.nth(5).click()
        page.wait_for_timeout(1000)
        header, title = page.locator("header").bounding_box(), page.locator("#rows5 h2").bounding_box()
        assert header is not None and title is not None
        assert header["y"] + header["height"] <= title["y"] < 200


def test_many_sections(tmp_path: Path, open_page: OpenPage) -> None:
    """The links to very many sections scroll: they leave room for the page."""
    sections = [table([["one", 1]], id=f"rows{number}", title=f"Table number {number}") for number in range(200)]
    page = open_page(write(tmp_path, *sections)).page
    page.wait_for_selector("[data-ready]")
    header = page.locator("header").bounding_box()
    assert header is not None
    assert 60 < header["height"] < 200


def test_frame(tmp_path: Path, open_page: OpenPage) -> None:
    """In a notebook the page works in a frame that cannot reach what is around it."""
    outer = tmp_path / "notebook.html"
    outer.write_text(
        f"<!doctype html><title>Notebook</title>{frame(document('A page', 'L', [table([['one', 1]])]))}"
    )
    opened = open_page(outer)
    inner = opened.page.frame_locator("iframe")
    assert inner.get_by_role("cell", name="one").text_content() == "one"
    inner.get_by_role("button", name="Light or dark").click()
    assert opened.errors == []
    assert re.search(r'sandbox="allow-scripts"', outer.read_text())


def test_frame_is_not_too_large() -> None:
    """A page that would make a notebook's file too large is not framed."""
    assert frame("x" * 4_000_000) is not None
    assert frame("x" * 4_000_001) is None


def test_prints(tmp_path: Path, open_page: OpenPage) -> None:
    """Printed, the page has its tables."""
    opened = open_page(write(tmp_path, table([["one", 1]])))
    opened.page.wait_for_selector("[data-ready]")
    assert opened.page.pdf()[:4] == b"%PDF"


def test_written_through_a_link(tmp_path: Path) -> None:
    """The link stays, also one to a file that is not there yet."""
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    link.symlink_to(target.name)
    for text in ("one", "two"):
        assert link == write_page(link, text)
        assert (text, True) == (target.read_text(), link.is_symlink())
    assert ["link.html", "target.html"] == sorted(path.name for path in tmp_path.iterdir())


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """A FIFO stays one, also behind a link."""
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(fifo)
    for path in (fifo, link):
        with pytest.raises(OSError, match="not a regular file") as caught:
            write_page(path, "text")
        assert str(path) == caught.value.filename
    assert fifo.is_fifo()
    assert link.is_symlink()


def test_written_whole_or_not(tmp_path: Path) -> None:
    """A page that cannot be written leaves neither a part nor a changed file."""
    with pytest.raises(OSError, match="folder"):
        write_page(tmp_path / "folder" / "page.html", "text")
    (tmp_path / "page.html").mkdir()
    (tmp_path / "file").write_text("whole")
    for folder in (tmp_path / "page.html", Path(), Path("/")):
        with pytest.raises(IsADirectoryError) as caught:
            write_page(folder, "text")
        assert caught.value.filename == str(folder)
    with pytest.raises(NotADirectoryError) as inside:
        write_page(tmp_path / "file" / "page.html", "text")
    assert inside.value.filename == str(tmp_path / "file" / "page.html")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write_page(tmp_path / "file", "text" * 10_000)
    assert (tmp_path / "file").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "page.html"]
