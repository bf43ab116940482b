"""The page of a trace, as a notebook shows it."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import instrument
from instrument.base.config import settings
from instrument.base.units import duration
from instrument.read.tables.table import COLUMNS, Table
from instrument.read.tables.trace import Coverage, Device, ReadLosses, Trace, UnreadDevice
from instrument.show.page.document import samples_section
from instrument.show.sections.trace import page_of
from tests.page.hostile import HOSTILE
from tests.support.browser import OpenedPage, OpenPage, in_notebook
from tests.support.timeline_slices import slices

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


def sections(page: str) -> list[dict[str, Any]]:
    """Return the data of the sections of a page."""
    (data,) = re.findall(r'id="data"[^>]*>([^<]+)<', page)
    found: list[dict[str, Any]] = json.loads(gzip.decompress(base64.b64decode(data)))["sections"]
    return found


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


def test_timeline(trace: Trace, tmp_path: Path, open_page: OpenPage) -> None:
    """The timeline has the streams, the threads and the steps, and marks what is chosen in its tables."""
    shown = opened(open_page, trace, tmp_path)
    tree = shown.accessibility()
    assert f"Timeline of {len(trace.steps)} steps" in tree
    for device in {trace.devices[number].name for number in np.unique(trace.gpu.device)}:
        assert device in shown.page.locator("#timeline").inner_text()
    assert "regions" in tree and "operators" in tree and "runtime calls" in tree
    assert shown.page.locator("#timeline-gaps").count() == 0
    section = shown.page.locator("#timeline")
    section.get_by_text("The steps as a table").click()
    heads = section.locator("table").first.locator("th").all_inner_texts()
    assert heads == ["Step", "Start", "Length"]
    section.locator("table tbody tr").first.get_by_role("button").click()
    assert section.locator(".timeline-status").inner_text().startswith("Marked: step ")
    shown.page.keyboard.press(".")
    shown.page.keyboard.press("f")
    assert " in GPU 0" in section.locator(".timeline-status").inner_text()
    assert (shown.errors, shown.requests) == ([], [])


def test_flame(trace: Trace, tmp_path: Path, open_page: OpenPage) -> None:
    """The flame graph has the GPU time of the steps, and their CPU time per step."""
    shown = opened(open_page, trace, tmp_path)
    flame = shown.page.locator("#flame")
    work = int(trace.gpu.duration_ns[trace.gpu.start_ns < trace.steps.end_ns.max()].sum())
    label = flame.locator("svg").get_attribute("aria-label")
    assert label == f"Flame graph: GPU time, {duration(work / len(trace.steps))} per step"
    flame.get_by_role("button", name="CPU time").click()
    label = flame.locator('[aria-label^="main thread"]').get_attribute("aria-label")
    assert label is not None
    assert f"Time {duration(trace.steps.duration_ns.sum() / len(trace.steps))} per step" in label


def test_timeline_times(trace: Trace) -> None:
    """All events of the lanes are shown, at times from the first event of the trace on, also outside of steps."""
    tables = [getattr(trace, name) for name in COLUMNS]
    first = min(int(rows.start_ns.min()) for rows in tables if rows)
    (section,) = [each for each in sections(page_of(trace)) if each["type"] == "timeline"]
    found = slices(section)
    shown = {(each.start_ns, each.length_ns) for each in found if each.lane.startswith("stream")}
    work = zip(trace.gpu.start_ns - first, trace.gpu.duration_ns, strict=True)
    assert shown == {(int(start), int(length)) for start, length in work if length}
    rows = [each for each in found if each.lane == "operators"]
    assert len(rows) == int((trace.operators.duration_ns > 0).sum())
    assert {each.kind for each in found} <= {"compute", "copies", "communication", "region", "operator", "runtime"}
    (first_gemm, *_) = [each for each in found if each.name == "gemm"]
    assert first_gemm.about == {
        "work": "gemm",
        "call": "cudaLaunchKernel",
        "operator": "aten::mm",
        "region": "attention",
    }


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
