"""The charts of a diagnosis: exact sums, and what a person does with them in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import instrument
from instrument.diagnosis.diagnose import Diagnosis
from instrument.diagnosis.panels.flame import KINDS, flame_section
from instrument.diagnosis.panels.ranks import ranks_section
from instrument.diagnosis.panels.roofline import roofline_section
from instrument.page.tree import totals
from tests.support.browser import OpenPage
from tests.support.shared_traces import shared

from .made_loops import GEMM, MadeLoop

REAL = ("tl_h100_owlv2.json.gz", "kineto_tb_resnet50_nw0_v100.json.gz", "tl_h100_bert_small.json.gz")


def nested_loop() -> Diagnosis:
    """Return the diagnosis of a loop with matmuls in the regions of a forward and a backward pass."""
    loop = MadeLoop(busy=False)
    for start in (0, 1000, 2000):
        loop.region("forward", start, start + 400).region("block", start + 100, start + 300)
        matmul = ([[512, 512], [512, 512]], ["c10::BFloat16", "c10::BFloat16"])
        loop.operator("aten::linear", start + 110, start + 290).operator(
            "aten::mm", start + 120, start + 280, *matmul
        )
        loop.work(GEMM, start + 130, start + 140, start + 340)
        loop.region("backward", start + 500, start + 900)
        loop.operator("aten::mm", start + 600, start + 650, *matmul).work(
            GEMM, start + 610, start + 620, start + 820
        )
    return instrument.diagnose(loop.trace())


def paths(section: dict[str, Any], value: str) -> dict[str, int]:
    """Return the sum of each node by its path of names."""
    found: list[str] = []
    for above, name in zip(section["parent"], section["name"], strict=True):
        own = section["names"][name] if name >= 0 else "(smaller)"
        found.append(f"{found[above]} > {own}" if above >= 0 else own)
    sums = totals(np.array(section["parent"]), np.array(section[value])).tolist()
    return dict(zip(found, sums, strict=True))


def test_flame_sums() -> None:
    """Each node has the time of its events; the whole is the time of the steps, and all GPU work."""
    section = flame_section(nested_loop())
    assert section is not None
    cpu, gpu = paths(section, "cpu"), paths(section, "gpu")
    assert cpu["main thread"] == 3_000_000
    assert cpu["main thread > forward > block > aten::linear > aten::mm"] == 3 * 160_000
    assert gpu["main thread"] == 3 * 400_000
    assert gpu["main thread > backward > aten::mm"] == 3 * 200_000
    backward = {
        section["names"][name]
        for name, back in zip(section["name"], section["backward"], strict=True)
        if back and name >= 0
    }
    assert {"backward", "aten::mm"} <= backward
    assert not {"forward", "block"} & backward
    assert {KINDS[kind] for kind in section["kind"]} == {"thread", "region", "operator", "compute"}


@pytest.mark.parametrize("name", REAL)
def test_flame_of_real_traces(name: str) -> None:
    """The GPU times add up to those of all work, no time is negative, and the main thread has the whole window."""
    diagnosis = instrument.diagnose(shared(name), what_if=False)
    section = flame_section(diagnosis)
    assert section is not None and diagnosis.facts is not None
    assert sum(section["gpu"]) == int(diagnosis.facts.gpu.duration_ns.sum())
    assert min(section["gpu"]) >= 0
    begin, end = diagnosis.facts.recorded
    assert paths(section, "cpu")["main thread"] == end - begin


def test_flame_in_the_browser(tmp_path: Path, open_page: OpenPage) -> None:
    """A node is enlarged by a click or Enter and left by Escape; passes, times and search change what is shown."""
    path = nested_loop().to_html(tmp_path / "page.html")
    opened = open_page(path)
    page, node = opened.page, opened.page.locator(".flame-node")
    page.wait_for_selector("[data-ready]")
    assert node.count() > 5
    page.get_by_role("button", name="Backward", exact=True).click()
    assert not any("forward" in each for each in node.all_text_contents())
    page.get_by_role("button", name="Both passes").click()
    page.get_by_role("group", name="Time").get_by_role("button", name="CPU time").click()
    page.locator(".flame-node", has_text="block").first.click()
    assert "block" in node.first.text_content()
    assert "flame=cpu" in page.url and "node=" in page.url
    page.reload()
    page.wait_for_selector("[data-ready]")
    assert "block" in node.first.text_content()
    node.first.focus()
    page.keyboard.press("ArrowDown")
    assert "aten::linear" in page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("Escape")
    assert "forward" in node.first.text_content()
    page.get_by_role("searchbox", name="Search the flame graph").fill("MM")
    assert 'in "mm"' in page.locator(".flame").text_content()
    assert page.locator(".flame-node.hit").count() > 0
    assert (opened.errors, opened.requests) == ([], [path.as_uri()])  # the reload


def test_roofline(tmp_path: Path, open_page: OpenPage) -> None:
    """Each operator with known operations is a dot with all its numbers; a click shows them beside it."""
    diagnosis = nested_loop()
    section = roofline_section(diagnosis)
    assert section is not None
    (dot,) = section["dots"]
    assert (dot["flops"], dot["bytes"], dot["calls"]) == (2 * 512**3, 3 * 512 * 512 * 2, 6)
    assert dot["flops_per_s"] == pytest.approx(2 * 512**3 / 200e-6)
    opened = open_page(diagnosis.to_html(tmp_path / "page.html"))
    opened.page.wait_for_selector("[data-ready]")
    opened.page.locator("circle.dot").click()
    assert "268,400,000" in opened.page.locator(".roofline [role=status]").text_content()
    assert (opened.errors, opened.requests) == ([], [])


def test_charts_only_where_there_is_data() -> None:
    """A trace without operators has no flame graph, without shapes no roofline, and alone no ranks."""
    diagnosis = instrument.diagnose(MadeLoop(steps=0).work(GEMM, 0, 1, 9).trace())
    assert (flame_section(diagnosis), roofline_section(diagnosis), ranks_section(diagnosis)) == (None, None, None)


def test_ranks(tmp_path: Path, open_page: OpenPage) -> None:
    """The ranks of a real job are shown side by side, with the one that the others wait for."""
    files = [shared(f"param_dlrm_8rank_r{rank}.json.gz") for rank in range(8)]
    diagnosis = instrument.diagnose(files)
    section = ranks_section(diagnosis)
    assert section is not None
    assert sum(rank["waited_ns"] for rank in section["ranks"]) == sum(
        rank["caused_ns"] for rank in section["ranks"]
    )
    opened = open_page(diagnosis.to_html(tmp_path / "page.html"))
    opened.page.wait_for_selector("[data-ready]")
    opened.page.get_by_label("Order").select_option("caused_ns")
    assert opened.page.locator(".rank").first.text_content() == "rank 7 (shown)"
    assert "The others wait longest for rank 7." in opened.accessibility()
    assert (opened.errors, opened.requests) == ([], [])
