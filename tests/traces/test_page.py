"""The page of a trace, as a notebook shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import instrument
from instrument.config import settings
from instrument.page.samples import samples_section
from instrument.traces.page_sections import page_of
from instrument.traces.table import Table
from instrument.traces.trace import Coverage, Device, ReadLosses, Trace, UnreadDevice
from tests.page.hostile import HOSTILE
from tests.support.browser import OpenedPage, OpenPage, in_notebook

SAMPLE = Path(__file__).parents[1] / "data" / "gpu_two_steps.json"


@pytest.fixture
def trace() -> Trace:
    return instrument.read_trace(SAMPLE)


def opened(open_page: OpenPage, trace: Trace, folder: Path, width: int = 1280) -> OpenedPage:
    """Return the open page of a trace, complete and without errors or requests."""
    (folder / "page.html").write_text(page_of(trace))
    shown = open_page(folder / "page.html", width=width)
    shown.page.wait_for_selector("[data-ready]")
    assert (shown.errors, shown.requests) == ([], [])
    return shown


def test_content(trace: Trace, tmp_path: Path, open_page: OpenPage) -> None:
    """The page has the steps, the sizes of the tables, the GPUs and what is linked."""
    shown = opened(open_page, trace, tmp_path)
    assert shown.page.locator("circle").count() == len(trace.steps) == 2
    rows = {
        row.locator("td").first.text_content(): row.locator("td").nth(1).text_content()
        for row in shown.page.locator("#tables tbody tr").all()
    }
    assert rows["gpu"] == f"{len(trace.gpu):,}" and rows["operators"] == f"{len(trace.operators):,}"
    tree = shown.accessibility()
    for device in trace.devices:
        assert device.name in tree
    for each in trace.coverage.values():
        assert f"{100 * each.linked / each.of:.1f} %" in tree


def test_empty(trace: Trace, tmp_path: Path, open_page: OpenPage) -> None:
    """A trace without events has a page."""
    tables = {name: value.where([]) for name, value in vars(trace).items() if isinstance(value, Table)}
    shown = opened(open_page, replace(trace, **tables, devices=[], coverage={}), tmp_path)
    assert "0 events" in shown.page.inner_text("main")


@pytest.mark.parametrize("width", [360, 1280, 3840])
def test_hostile_names(trace: Trace, tmp_path: Path, open_page: OpenPage, width: int) -> None:
    """The names of devices and links, and the reasons of losses, are text."""
    hostile = replace(
        trace,
        devices=[Device(number, name) for number, name in enumerate(HOSTILE)],
        coverage={name: Coverage(1, 2, 3, 4) for name in HOSTILE},
        unread_devices={name: UnreadDevice(1, 2) for name in HOSTILE},
        lost=ReadLosses(events=2, bytes=10, reasons={HOSTILE[0]: 1}),
        path=Path("a<b>.json"),
    )
    shown = opened(open_page, hostile, tmp_path, width)
    assert shown.page.evaluate("document.documentElement.scrollWidth") == width
    assert shown.page.locator("main script, main img, main iframe, main style, main form, main link").count() == 0
    assert shown.page.title() == "a<b>.json"
    assert "Lost: 2 events and 10 bytes." in shown.page.inner_text("main")


def test_notebook(trace: Trace, tmp_path: Path, open_page: OpenPage) -> None:
    """In a notebook the page is a frame of less than 2 MB."""
    shown = in_notebook(open_page, tmp_path, trace._repr_html_())
    assert shown.errors == []


def test_never_raises(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook shows text instead of a page that cannot be made."""
    monkeypatch.setattr(settings, "strict", False)
    assert replace(trace, steps=None)._repr_html_() is None


def test_many_steps(trace: Trace, tmp_path: Path, open_page: OpenPage) -> None:
    """Of very many steps a sample is shown, and the page says so."""
    lengths = np.random.default_rng(0).integers(1_000, 2_000, 12_000).tolist()
    section = samples_section("Steps", [("steps", lengths, 1_500)])
    assert section["note"] == "One in 3 of the steps is shown."
    assert len(section["groups"][0]["lengths_ns"]) == 4_000


@pytest.mark.parametrize("length_ns", [0, 1, 999, 5_000_000_000_000])
def test_axis_of_any_length(trace: Trace, tmp_path: Path, open_page: OpenPage, length_ns: int) -> None:
    """Steps of any length, also of none and all equal, have an axis with labels that differ."""
    steps = Table({**trace.steps, "duration_ns": np.full(len(trace.steps), length_ns)}, trace.strings)
    shown = opened(open_page, replace(trace, steps=steps), tmp_path)
    labels = shown.page.locator(".axis text").all_text_contents()
    assert len(labels) >= 2 and len(set(labels)) == len(labels)
