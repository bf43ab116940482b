"""The page of a diagnosis in a real browser: what it shows, and where its findings lead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import instrument
from instrument.base.units import duration
from instrument.explain.diagnosis.diagnose import Diagnosis
from instrument.show.page.document import document
from instrument.show.sections.diagnosis import findings_section, span_of
from instrument.start import cli
from tests.page.hostile import HOSTILE
from tests.support.browser import OpenPage, in_notebook
from tests.support.shared_traces import shared

from .made_loops import GEMM, MadeLoop

SAMPLE = Path(__file__).parents[1] / "data" / "gpu_two_steps.json"


def waiting_loop(name: str = GEMM) -> Diagnosis:
    """Return the diagnosis of a loop whose GPU waits for data half of the time, and whose CPU waits in item()."""
    loop = MadeLoop(busy=False)
    for start in (0, 1000, 2000):
        loop.region("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start, start + 500)
        loop.work(name, start + 500, start + 501, start + 900)
        loop.operator("aten::item", start + 600, start + 910).call(
            "cudaStreamSynchronize", start + 601, start + 909
        )
    return instrument.diagnose(loop.trace())


def test_everything_is_there(tmp_path: Path, open_page: OpenPage) -> None:
    """The page has the verdict, each part of the step, and each finding with its win, place, evidence and fix."""
    diagnosis = waiting_loop()
    opened = open_page(diagnosis.to_html(tmp_path / "page.html"))
    opened.page.wait_for_selector("[data-ready]")
    for details in opened.page.locator("summary").all():
        details.click()
    tree = opened.accessibility()
    assert (opened.errors, opened.requests) == ([], [])
    assert diagnosis.verdict in tree
    for ns in (*diagnosis.parts.values(), *diagnosis.idle_by_cause.values()):
        assert duration(ns) in tree
    for found in diagnosis.findings:
        assert found.title in tree
        assert diagnosis.win_text(found) in tree
        assert not found.fix or found.fix.text in tree
        for evidence in found.evidence:
            assert diagnosis.definition(evidence) in tree


def test_parts_fill_the_bar(tmp_path: Path, open_page: OpenPage) -> None:
    """The bar is as wide as the page, each part as its share of the step."""
    diagnosis = waiting_loop()
    opened = open_page(diagnosis.to_html(tmp_path / "page.html"))
    bar = opened.page.locator(".bar").last
    opened.page.wait_for_selector("[data-ready]")
    whole = bar.bounding_box()["width"]
    shown = [each.bounding_box()["width"] / whole for each in bar.locator("div").all()]
    busy = [ns for name, ns in diagnosis.parts.items() if name in ("compute", "communication", "copies") and ns]
    expected = [ns / diagnosis.step_ns for ns in (*busy, *filter(None, diagnosis.idle_by_cause.values()))]
    assert shown == pytest.approx(expected, abs=0.002)


def test_span_of_findings() -> None:
    """A finding leads to a place in the window: the longest of what it names, or where its rule saw it."""
    diagnosis = waiting_loop()
    assert diagnosis.facts is not None
    window = diagnosis.facts.window
    spans = [span_of(diagnosis.facts, found) for found in diagnosis.findings]
    assert all(spans)
    for span in filter(None, spans):
        assert span[0] < span[1] <= window[1] - window[0] + diagnosis.step_ns


def test_span_before_the_window() -> None:
    """A finding whose call is before the GPU's window leads there, on the same axis."""
    diagnosis = instrument.diagnose(shared("tl_mi300_resnet_actckpt.json.gz"), what_if=False)
    assert diagnosis.facts is not None
    for found in diagnosis.findings:
        span = span_of(diagnosis.facts, found)
        assert span is not None and span[0] < span[1]


def test_hostile_names(tmp_path: Path, open_page: OpenPage) -> None:
    """Names of kernels stay texts, whatever they contain."""
    loop = MadeLoop()
    for number, name in enumerate(HOSTILE):
        loop.work(name, number * 10, number * 10 + 1, number * 10 + 9)
        loop.region(name, number * 10, number * 10 + 9)
    opened = open_page(instrument.diagnose(loop.trace()).to_html(tmp_path / "page.html"))
    opened.page.wait_for_selector("[data-ready]")
    assert (opened.errors, opened.requests) == ([], [])
    assert opened.page.title() != "run"
    assert opened.page.locator("main script, main img, main iframe, main style, main form").count() == 0


def test_without_gpu_and_steps(tmp_path: Path, open_page: OpenPage) -> None:
    """A trace without GPU work has a page that says so."""
    loop = MadeLoop(steps=0, busy=False).operator("aten::mm", 0, 100)
    diagnosis = instrument.diagnose(loop.trace())
    opened = open_page(diagnosis.to_html(tmp_path / "page.html"))
    opened.page.wait_for_selector("[data-ready]")
    assert diagnosis.verdict in opened.accessibility()
    assert (opened.errors, opened.requests) == ([], [])


def test_command(tmp_path: Path) -> None:
    """``--html FILE`` writes the page; it excludes the other forms, and several traces."""
    run = CliRunner().invoke
    out = tmp_path / "page.html"
    result = run(cli.app, ["diagnose", str(SAMPLE), "--html", str(out)])
    assert (result.exit_code, out.name in result.output.replace("\n", "")) == (0, True)
    assert out.read_text().startswith("<!doctype html>")
    for wrong in (["--json"], [str(SAMPLE)]):
        assert run(cli.app, ["diagnose", str(SAMPLE), "--html", str(out), *wrong]).exit_code == 2
    missing = run(cli.app, ["diagnose", str(SAMPLE), "--html", str(tmp_path / "no" / "page.html")])
    assert missing.exit_code == 1
    assert "no/page.html" in missing.output.replace("\n", "")


def test_no_timeline_to_lead_to(tmp_path: Path, open_page: OpenPage) -> None:
    """Without a timeline on the page, no button and no key of a finding leads there."""
    (tmp_path / "page.html").write_text(document("title", "lead", [findings_section(waiting_loop())]))
    opened = open_page(tmp_path / "page.html")
    opened.page.wait_for_selector("[data-ready]")
    assert opened.page.locator(".finding").count() > 0
    assert opened.page.get_by_role("button", name="Show in the timeline").count() == 0
    opened.page.keyboard.press("?")
    assert "Next finding" in opened.page.inner_text("dialog")
    assert "timeline" not in opened.page.inner_text("dialog")
    assert opened.errors == []


def test_notebook(tmp_path: Path, open_page: OpenPage) -> None:
    """In a notebook the page is a frame of less than 2 MB."""
    opened = in_notebook(open_page, tmp_path, waiting_loop()._repr_html_())
    inner = opened.page.frame_locator("iframe")
    inner.get_by_role("button", name="Show in the timeline").first.click()
    assert opened.errors == []


def test_notebook_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook shows Markdown instead of a page that cannot be made."""
    monkeypatch.setattr(instrument.base.config.settings, "strict", False)
    assert replace(waiting_loop(), findings=None)._repr_html_() is None


def test_zoom_after_a_finding(tmp_path: Path, open_page: OpenPage) -> None:
    """The keys of the timeline work after the keys that led to it, while the finding has the focus."""
    page = open_page(waiting_loop().to_html(tmp_path / "page.html")).page
    page.wait_for_selector("[data-ready]")
    for key in ("j", "Enter"):
        page.keyboard.press(key)
    page.wait_for_timeout(600)
    shown = page.url
    page.keyboard.press("w")
    page.wait_for_timeout(600)
    assert "t=" in shown
    assert page.url != shown
