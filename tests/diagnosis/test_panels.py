"""The roofline and the ranks: all numbers of the diagnosis, and what a person does with them in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.base.page_file import write_page
from instrument.explain.metrics.job import Job
from instrument.read.tables.trace import Device
from instrument.show.page.document import document
from instrument.show.sections.diagnosis import flame_section, ranks_section, roofline_section
from tests.support.browser import OpenPage
from tests.support.shared_traces import shared

from .made_loops import GEMM, MadeLoop, nested_loop


def test_roofline(tmp_path: Path, open_page: OpenPage) -> None:
    """Each operator with known operations is a dot; a click or Enter shows all its numbers beside it."""
    diagnosis = instrument.diagnose(nested_loop().trace())
    section = roofline_section(diagnosis)
    assert section is not None
    (dot,) = section["operators"]
    assert (dot["flops"], dot["bytes"], dot["calls"]) == (2 * 512**3, 3 * 512 * 512 * 2, 6)
    assert dot["flops_per_s"] == pytest.approx(2 * 512**3 / 200e-6)
    assert dot["gpu_ns"] == 2 * 200_000
    assert section["roofs"] == {"bf16": 989.4e12}
    opened = open_page(diagnosis.to_html(tmp_path / "page.html"))
    page, about = opened.page, opened.page.locator(".roofline .finding")
    page.wait_for_selector("[data-ready]")
    assert not about.is_visible()
    page.locator("circle.dot").click()
    for text in (
        "aten::mm 1 x 512 x 512 x 512",
        "268,400,000",
        "1.57 MB",
        "170.7",
        "400 us per step",
        "0.2 %, bound by memory",
    ):
        assert text in about.text_content()
    assert page.url.endswith("#operator=1")
    page.keyboard.press("Enter")
    assert not about.is_visible()
    assert (opened.errors, opened.requests) == ([], [])


def test_roofline_without_peaks(tmp_path: Path, open_page: OpenPage) -> None:
    """Of a GPU whose peaks are not known there are the dots alone, with the reason."""
    diagnosis = instrument.diagnose(nested_loop().trace(Device(0, name="Unheard-of 9000")))
    section = roofline_section(diagnosis)
    assert section is not None
    assert "There are no roofs: the peaks of Unheard-of 9000 are not known." in section["note"]
    opened = open_page(diagnosis.to_html(tmp_path / "page.html"))
    opened.page.wait_for_selector("[data-ready]")
    assert (opened.page.locator("circle.dot").count(), opened.page.locator(".roof").count()) == (1, 0)
    assert opened.errors == []


def test_roofline_of_real_trace() -> None:
    """Each operator of the diagnosis is there, and each type has its roof: element-wise work that of fp32."""
    diagnosis = instrument.diagnose(shared("tl_mi300_resnet_actckpt.json.gz"), what_if=False)
    section = roofline_section(diagnosis)
    assert section is not None
    times = [round(each["gpu_ns"] * diagnosis.steps) for each in section["operators"]]
    assert times == [row.gpu_ns for row in diagnosis.roofline.rows]
    assert set(section["roofs"]) == {"bf16", "fp32"}


def test_charts_only_where_there_is_data() -> None:
    """A trace without operators has no flame graph, one without shapes no roofline, and a single one no ranks."""
    diagnosis = instrument.diagnose(MadeLoop(steps=0).work(GEMM, 0, 1, 9).trace())
    assert (flame_section(diagnosis), roofline_section(diagnosis), ranks_section(diagnosis)) == (None, None, None)


def test_ranks(tmp_path: Path, open_page: OpenPage) -> None:
    """The ranks of a real job are shown side by side, with the one that the others wait for."""
    files = [shared(f"param_dlrm_8rank_r{rank}.json.gz") for rank in range(8)]
    diagnosis = instrument.diagnose(files)
    section = ranks_section(diagnosis)
    assert section is not None
    waited, caused = (sum(rank[key] for rank in section["ranks"]) for key in ("waited", "caused"))
    assert waited == pytest.approx(caused)
    opened = open_page(diagnosis.to_html(tmp_path / "page.html"))
    opened.page.wait_for_selector("[data-ready]")
    opened.page.get_by_label("Order").select_option("caused")
    assert opened.page.locator(".rank:not(.head)").first.text_content().startswith("rank 7 (shown)")
    assert (
        "The others wait longest for rank 7, which arrives last at 5 of 8 shared collectives."
        in opened.accessibility()
    )
    assert (opened.errors, opened.requests) == ([], [])


def test_missing_ranks() -> None:
    """Ranks without a trace are named, and why nobody knows who arrives last."""
    diagnosis = instrument.diagnose([shared(f"param_dlrm_8rank_r{rank}.json.gz") for rank in (0, 2, 3)])
    section = ranks_section(diagnosis)
    assert section is not None and isinstance(diagnosis.job, Job)
    notes = " ".join(section["notes"])
    assert "3 of 8 ranks are recorded. Without a trace: ranks 1, 4, 5, 6, 7." in notes
    assert f"Who arrives last is unknown: {diagnosis.job.arrivals.unknown}." in notes


def test_many_ranks(tmp_path: Path, open_page: OpenPage) -> None:
    """Of 1,024 ranks there is a strip for each time, bars for the first in the order, and a table of all."""

    def rank(number: int) -> dict[str, Any]:
        return {
            "rank": number,
            "step": 1e8,
            "compute": 5e7,
            "waited": number,
            "caused": 1e6 * (number == 700),
            "last": 0,
        }

    section = {"id": "ranks", "type": "ranks", "title": "Ranks", "notes": [], "each": "per step", "shown": 0}
    section |= {"compared": 9, "ranks": [rank(number) for number in range(1024)]}
    opened = open_page(write_page(tmp_path / "page.html", document("Ranks", "The ranks.", [section])))
    page = opened.page
    page.wait_for_selector("[data-ready]")
    assert [page.locator(where).count() for where in (".rank-strip", ".rank:not(.head)")] == [4, 32]
    assert page.locator(".rank:not(.head)").first.text_content().startswith("rank 700")
    page.locator("summary").click()
    assert page.get_by_role("button", name="Show all 1024 rows").is_visible()
    assert (opened.errors, opened.requests) == ([], [])
