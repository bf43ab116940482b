"""The page of a synchronization report."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from instrument.base.config import settings
from instrument.base.findings import NOT_COVERED
from instrument.explain.waits.report import SyncReport
from instrument.show.sections.syncs import page_of
from instrument.start.cli import app
from tests.page.hostile import HOSTILE
from tests.support.browser import OpenedPage, OpenPage, in_notebook

from .reports import finding, report, script


def opened(open_page: OpenPage, path: Path, width: int = 1280) -> OpenedPage:
    """Return the open page, complete and without errors or requests."""
    shown = open_page(path, width=width)
    shown.page.wait_for_selector("[data-ready]")
    assert (shown.errors, shown.requests) == ([], [])
    return shown


def waits(path: Path) -> SyncReport:
    """Return a report with a finding of each kind."""
    return report(
        finding("item", 3, path, (0, 1), blocked_ns=6_000_000, idle_ns=500, region=("train", "forward")),
        finding("to", 2, path, (None,), cause="copies to the GPU", direction="H2D", bytes=4096),
        finding("print", 5, path, (0,), allowed="shown once"),
        finding(NOT_COVERED, 6, path, (0,), cause="torch.compile'd function, run eagerly"),
        steps=2,
        source="live",
        coverage=["CUDA code of libraries is not seen"],
    )


def test_content(tmp_path: Path, open_page: OpenPage) -> None:
    """Each finding has its place, code, cost and fix; allowed and unchecked ones are apart; coverage is said."""
    path = script(tmp_path)
    found = waits(path)
    shown = opened(open_page, found.to_html(tmp_path / "page.html"))
    for details in shown.page.locator("summary").all():
        details.click()
    tree = shown.accessibility()
    for text in (
        "1 synchronization in most steps", "Lines that wait", "item: reads a value back from the GPU",
        "in every step; the CPU waited 12.0 ms in all, 6.00 ms each time", "region train/forward",
        "Keep the numbers on the GPU", "Coverage: CUDA code of libraries is not seen", "Outside the steps",
        "4,096 bytes", "4.10 kB", "shown once", "torch.compile'd function, run eagerly",
    ):  # fmt: skip
        assert text in tree, text
    section = shown.page.locator("#findings-1")
    assert section.locator(".current").text_content() == "> 3 |     total = loss.item()"
    lines = section.locator(".source div").all_text_contents()
    assert [line.split(" | ")[0].strip() for line in lines] == ["1", "2", "> 3", "4", "5", "6"]
    fix = found.syncs[0].fix
    assert fix is not None
    assert section.locator(".minus").all_text_contents() == [f"- {line}" for line in fix.before.splitlines()]
    assert section.locator(".plus").all_text_contents() == [f"+ {line}" for line in fix.after.splitlines()]
    assert shown.page.locator("#allowed-1 article").count() == 1
    assert shown.page.locator("#not-covered-1 article").count() == 1


def test_nothing_found(tmp_path: Path, open_page: OpenPage) -> None:
    """A report without findings says so."""
    shown = opened(open_page, report().to_html(tmp_path / "page.html"))
    lead = shown.page.locator(".lead").text_content()
    assert lead is not None and lead.startswith("No line makes the CPU wait for the GPU")
    assert shown.page.locator("article").count() == 0


@pytest.mark.parametrize("width", [360, 1280, 3840])
def test_hostile_source(tmp_path: Path, open_page: OpenPage, width: int) -> None:
    """Lines of code, names and reasons are text: none runs, none makes the page wider than the window."""
    code = "\n".join(name.replace("\n", " ").encode(errors="replace").decode() for name in HOSTILE)
    (tmp_path / "train.py").write_bytes(code.encode())
    findings = [
        finding(
            "item", number + 1, tmp_path / "train.py", cause=name, region=(name,), thread=name, allowed=allowed
        )
        for number, name in enumerate(HOSTILE)
        for allowed in (None, name)
    ]
    hostile = report(*findings, coverage=HOSTILE, unavailable_reason=HOSTILE[0], exceeded=HOSTILE)
    shown = opened(open_page, hostile.to_html(tmp_path / "page.html"), width)
    for details in shown.page.locator("summary").all():
        details.click()
    assert shown.page.evaluate("document.documentElement.scrollWidth") == width
    assert shown.page.locator("main script, main img, main iframe, main style, main form, main link").count() == 0
    assert (shown.errors, shown.requests) == ([], [])
    assert "</script>" in shown.page.inner_text("main")
    assert (tmp_path / "page.html").stat().st_size < 300_000


def test_a_line_of_ten_megabytes(tmp_path: Path) -> None:
    """A very long line is cut."""
    digits = "".join(map(str, range(1_500_000)))
    assert len(digits) > 9_000_000
    path = script(tmp_path, code=f"x = 1\ny = '{digits}'\ntotal = loss.item()\n")
    page = page_of([("", report(finding("item", 3, path)))])
    assert len(page) < 200_000


def test_only_lines_of_programs(tmp_path: Path, open_page: OpenPage) -> None:
    """A trace that names any other file of this machine gets none of its lines into the page."""
    secret = script(tmp_path, name="secret", code="token = 1234567\n" * 9)
    shown = opened(open_page, report(finding("item", 3, secret)).to_html(tmp_path / "page.html"))
    assert shown.page.locator("article").count() == 1
    assert "1234567" not in shown.page.inner_text("main")
    assert shown.page.locator(".source").count() == 0


def test_several_reports(tmp_path: Path, open_page: OpenPage) -> None:
    """Several reports are sections of one page, each with its target."""
    path = script(tmp_path)
    text = page_of([("one.py", waits(path)), ("two.py::step", report())])
    (tmp_path / "page.html").write_text(text)
    shown = opened(open_page, tmp_path / "page.html")
    titles = shown.page.locator("h2").all_text_contents()
    assert "one.py: Lines that wait" in titles and "two.py::step: Summary" in titles
    lead = shown.page.locator(".lead").text_content()
    assert lead is not None and lead.startswith("one.py: 2 lines make the CPU wait")


def test_many_findings(tmp_path: Path, open_page: OpenPage) -> None:
    """Of many findings the worst are shown first; the others on demand, and all in the table."""
    many = report(*(finding("item", line, tmp_path / "none.py") for line in range(1, 101)))
    shown = opened(open_page, many.to_html(tmp_path / "page.html"))
    assert shown.page.locator("article:visible").count() == 30
    shown.page.get_by_text("70 more").click()
    assert shown.page.locator("article:visible").count() == 100


def test_notebook(tmp_path: Path, open_page: OpenPage) -> None:
    """In a notebook the page is a frame of less than 2 MB."""
    shown = in_notebook(open_page, tmp_path, waits(script(tmp_path))._repr_html_())
    inner = shown.page.frame_locator("iframe")
    assert inner.locator(".current").count() == 4
    assert shown.errors == []


def test_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook shows text instead of a page that cannot be made."""
    monkeypatch.setattr(settings, "strict", False)
    broken = report(finding("item"))
    broken.coverage = None
    assert broken._repr_html_() is None


def test_command(tmp_path: Path) -> None:
    """The option --html writes the page beside the text; a folder is refused before anything runs."""
    path = script(
        tmp_path, code="import torch\n\n\ndef step():\n    return torch.ones(2, device='cuda').sum().item()\n"
    )

    def run(*options: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["syncs", f"{path}::step", *map(str, options)])
        return result.exit_code, result.output

    code, text = run("--html", tmp_path / "page.html")
    assert code == 1
    assert "item: reads a value" in text and "page.html has the page" in text.replace("\n", "")
    assert "<title>" in (tmp_path / "page.html").read_text()
    for place in (tmp_path, tmp_path / "missing" / "page.html"):
        code, text = run("--html", place)
        assert (code, "cannot write" in text, "synchron" in text) == (2, True, False)


def test_a_script_that_changes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written to the folder in which the command began."""
    (tmp_path / "elsewhere").mkdir()
    script(tmp_path, code="import os, torch\nos.chdir('elsewhere')\ntorch.ones(2, device='cuda').sum().item()\n")
    monkeypatch.chdir(tmp_path)
    options = ["--html", "page.html", "--sarif", "found.sarif", "--write-baseline", "known.json"]
    result = CliRunner().invoke(app, ["syncs", "train.py", *options])
    assert f"{tmp_path / 'page.html'} has the page" in result.output
    assert {"page.html", "found.sarif", "known.json"} <= {file.name for file in tmp_path.iterdir()}
    assert not list((tmp_path / "elsewhere").iterdir())
