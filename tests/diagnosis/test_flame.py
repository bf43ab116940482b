"""The flame graph: exact sums, backward passes below their forward regions, and what it does in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import instrument
from instrument.explain.diagnosis.diagnose import Diagnosis
from instrument.show.sections.diagnosis import flame_section
from tests.support.browser import OpenedPage, OpenPage
from tests.support.shared_traces import shared

from .made_loops import H100, nested_loop
from .small_traces import Row, kernel, on_cpu, trace_of

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

REAL = ("tl_h100_owlv2.json.gz", "kineto_tb_resnet50_nw0_v100.json.gz", "tl_mi300_resnet_actckpt.json.gz")


def flame_loop() -> Diagnosis:
    return instrument.diagnose(nested_loop().trace())


def paths(view: dict[str, Any], names: list[str]) -> dict[str, tuple[int, int]]:
    """Return by path of names the time of each node, outside backward passes and inside."""
    found: list[str] = []
    for above, name in zip(view["parent"], view["name"], strict=True):
        own = names[name] if name >= 0 else "(smaller)"
        found.append(f"{found[above]} > {own}" if above >= 0 else own)
    sums = np.array(view["values"]).T
    for node in range(len(found) - 1, -1, -1):
        if view["parent"][node] >= 0:
            sums[view["parent"][node]] += sums[node]
    assert len(set(found)) == len(found) - found.count("(smaller)") + ("(smaller)" in found)
    return {path: (outside, inside) for path, (outside, inside) in zip(found, sums.tolist(), strict=True)}


def step(number: int, start: int, end: int) -> Row:
    return on_cpu(f"ProfilerStep#{number}", start, end)


def flame_paths(diagnosis: Diagnosis) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    section = flame_section(diagnosis)
    assert section is not None
    return tuple(paths(section["views"][view], section["names"]) for view in ("cpu", "gpu"))


def test_flame_sums() -> None:
    """Each node has the time of its events; the roots have the time of the steps, and of all GPU work."""
    cpu, gpu = flame_paths(flame_loop())
    assert cpu["main thread"] == (3 * 600_000, 3 * 400_000)
    assert cpu["main thread > forward > block > aten::linear > aten::mm"] == (3 * 160_000, 0)
    assert gpu["GPU work"] == (3 * 200_000, 3 * 200_000)
    assert gpu["GPU work > backward > aten::mm"] == (0, 3 * 200_000)
    inside = "GPU work > forward > block > aten::linear > aten::mm > "
    assert [times for path, times in gpu.items() if path.startswith(inside)] == [(3 * 200_000, 0)]


def test_flame_between_steps() -> None:
    """What runs before, between and after the steps does not count, nor do the parts of ranges outside them."""
    rows = {
        "regions": [step(1, 0, 100), step(2, 200, 300), on_cpu("epoch", -50, 350), on_cpu("pause", 90, 210)],
        "operators": [on_cpu("aten::mm", 110, 190), on_cpu("aten::mm", 220, 230)],
    }
    section = flame_section(instrument.diagnose(trace_of([H100], **rows)))
    assert section is not None
    cpu = paths(section["views"]["cpu"], section["names"])
    assert cpu["main thread"] == (200, 0)
    assert cpu["main thread > epoch"] == (200, 0)
    assert cpu["main thread > epoch > pause"] == (20, 0)
    assert cpu["main thread > epoch > aten::mm"] == (10, 0)


def test_flame_of_overlapping_ranges() -> None:
    """Ranges that overlap without nesting share the time: each moment belongs to the one that started last."""
    rows = {"regions": [step(1, 0, 100), on_cpu("one", 10, 50), on_cpu("two", 30, 70)]}
    section = flame_section(instrument.diagnose(trace_of([H100], **rows)))
    assert section is not None
    cpu = paths(section["views"]["cpu"], section["names"])
    assert cpu == {"main thread": (100, 0), "main thread > one": (20, 0), "main thread > two": (40, 0)}


NODE = "autograd::engine::evaluate_function: MmBackward0"


def backward_rows(*, sequence: int) -> dict[str, list[Row]]:
    """Return a step whose backward pass runs on thread 1, launched in a region, with a sequence number."""
    return {
        "regions": [step(1, 0, 1000), on_cpu("block", 100, 200), on_cpu("loss.backward", 300, 800)],
        "operators": [
            on_cpu("aten::linear", 110, 190, sequence=7),
            on_cpu("aten::mm", 120, 180, sequence=7),
            on_cpu("aten::sum", 220, 230, sequence=8),
            on_cpu(NODE, 400, 600, thread=1, sequence=sequence),
            on_cpu("aten::mm", 420, 500, thread=1),
        ],
        "runtime": [on_cpu("cudaLaunchKernel", 430, 440, thread=1, correlation=1)],
        "gpu": [kernel("gemm", 450, 700, correlation=1)],
    }


def test_flame_of_backward_pass() -> None:
    """The GPU work of a node of autograd is below the region of the operator that created the node."""
    cpu, gpu = flame_paths(instrument.diagnose(trace_of([H100], **backward_rows(sequence=7))))
    assert gpu["GPU work > block"] == (0, 250)
    assert gpu[f"GPU work > block > {NODE} > aten::mm > gemm"] == (0, 250)
    assert cpu["main thread"] == (500, 500)
    assert cpu["main thread > block"] == (100, 0)
    assert cpu[f"autograd: thread 2 > {NODE}"] == (0, 200)


def test_flame_of_unknown_backward_pass() -> None:
    """Without a known sequence number it is below the region that the main thread waits in."""
    _, gpu = flame_paths(instrument.diagnose(trace_of([H100], **backward_rows(sequence=9))))
    assert gpu[f"GPU work > loss.backward > {NODE} > aten::mm > gemm"] == (0, 250)


def test_flame_joins_small_nodes() -> None:
    """Thousands of names become one node for each node above, and the sums stay exact."""
    regions = [step(1, 0, 100_000), *(on_cpu(f"region {n}", 10 * n, 10 * n + 1 + n % 7) for n in range(6000))]
    section = flame_section(instrument.diagnose(trace_of([H100], regions=regions)))
    assert section is not None
    view = section["views"]["cpu"]
    assert len(view["parent"]) <= 5000
    assert sum(view["joined"].values()) == 6001 - 2500
    assert paths(view, section["names"])["main thread"] == (100_000, 0)


NAMES = ["block", "backward", "aten::mm", NODE, "MmBackward0"]
RANGES = st.lists(
    st.tuples(
        st.integers(0, 1), st.integers(0, 90), st.integers(1, 40), st.sampled_from(NAMES), st.integers(-1, 3)
    ),
    max_size=12,
)


@pytest.mark.fuzz
@settings(deadline=None, max_examples=60)
@given(RANGES, st.lists(st.tuples(st.integers(0, 1), st.integers(0, 99)), max_size=8))
def test_flame_of_any_nesting(
    ranges: list[tuple[int, int, int, str, int]], launches: list[tuple[int, int]]
) -> None:
    """Whatever overlaps, and whatever numbers nodes have, the sums are exact and no time is negative."""
    rows: dict[str, list[Row]] = {"regions": [step(1, 10, 100)], "operators": [on_cpu("aten::fill_", 50, 51)]}
    for thread, start, length, name, sequence in ranges:
        each = on_cpu(name, start, start + length, thread=thread)
        if name in ("block", "backward"):
            rows["regions"].append(each)
        else:
            rows["operators"].append(each | {"sequence": sequence})
    for number, (thread, at) in enumerate(launches):
        call = on_cpu("cudaLaunchKernel", at, at + 1, thread=thread, correlation=number)
        rows.setdefault("runtime", []).append(call)
        rows.setdefault("gpu", []).append(kernel("gemm", 200 + 10 * number, 207 + 10 * number, correlation=number))
    diagnosis = instrument.diagnose(trace_of([H100], **rows), what_if=False)
    section, facts = flame_section(diagnosis), diagnosis.facts
    assert section is not None and facts is not None
    cpu = paths(section["views"]["cpu"], section["names"])
    assert sum(cpu["main thread"]) == 90
    assert min(map(min, section["views"]["cpu"]["values"])) >= 0
    if facts.gpu:
        gpu = paths(section["views"]["gpu"], section["names"])
        assert sum(gpu["GPU work"]) == 7 * len(facts.gpu)


@pytest.mark.parametrize("name", REAL)
def test_flame_of_real_traces(name: str) -> None:
    """GPU times add up to those of all work, CPU times of the main thread to the steps; none is negative."""
    diagnosis = instrument.diagnose(shared(name), what_if=False)
    facts = diagnosis.facts
    cpu, gpu = flame_paths(diagnosis)
    assert facts is not None
    assert sum(gpu["GPU work"]) == int(facts.gpu.duration_ns.sum())
    assert sum(cpu["main thread"]) == int(facts.trace.steps.duration_ns.sum())
    assert min(min(times) for times in (*cpu.values(), *gpu.values())) >= 0


def opened_flame(opened: OpenedPage) -> tuple[Page, Locator]:
    opened.page.wait_for_selector("[data-ready]")
    return opened.page, opened.page.locator(".flame-node")


def test_flame_in_the_browser(tmp_path: Path, open_page: OpenPage) -> None:
    """A node is enlarged by a click or Enter and left by Escape; passes, times and search change what is shown."""
    path = flame_loop().to_html(tmp_path / "page.html")
    opened = open_page(path)
    page, node = opened_flame(opened)
    assert node.count() > 5
    page.get_by_role("button", name="Backward", exact=True).click()
    assert not any("forward" in each for each in node.all_text_contents())
    page.get_by_role("button", name="Both passes").click()
    page.get_by_role("group", name="Time").get_by_role("button", name="CPU time").click()
    page.locator(".flame-node", has_text="block").first.click()
    assert "block" in node.first.text_content()
    page.wait_for_timeout(500)  # the address changes no more often
    assert "flame.by=cpu" in page.url and "flame.node=forward+%3E+block" in page.url
    page.reload()
    page.wait_for_selector("[data-ready]")
    assert "block" in node.first.text_content()
    node.first.focus()
    page.keyboard.press("ArrowDown")
    assert "aten::linear" in page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("Escape")
    assert "forward" in node.first.text_content()
    page.get_by_role("searchbox", name="Search: Flame graph").fill("MM")
    assert 'in "mm"' in page.locator(".flame").text_content()
    assert page.locator(".flame-node.hit").count() > 0
    assert (opened.errors, opened.requests) == ([], [path.as_uri()])  # the reload


def test_flame_address(tmp_path: Path, open_page: OpenPage) -> None:
    """The address of a node leads to it in both trees, and that of one that is gone to what is around it."""
    path = flame_loop().to_html(tmp_path / "page.html")
    for hash, time in (
        ("flame.by=cpu&flame.node=forward > block > aten::linear", "180 us per step (100.0 %)"),
        ("flame.by=gpu&flame.node=forward > block > aten::linear", "200 us per step (100.0 %)"),
    ):
        opened = open_page(f"{path.as_uri()}#{hash}")
        _, node = opened_flame(opened)
        assert node.first.get_attribute("aria-label").startswith(f"aten::linear, Time {time}")
    _, node = opened_flame(open_page(f"{path.as_uri()}#flame.by=cpu&flame.node=forward > block > gone"))
    assert "block" in node.first.text_content()


def test_flame_keys(tmp_path: Path, open_page: OpenPage) -> None:
    """One stop of the tab key leads into the graph, and arrows to each node, also beside."""
    page, node = opened_flame(open_page(f"{flame_loop().to_html(tmp_path / 'page.html').as_uri()}#flame.by=cpu"))
    assert page.locator(".flame-node[tabindex='0']").count() == 1
    node.first.focus()
    for key, name in (
        ("ArrowDown", "forward"),
        ("ArrowRight", "backward"),
        ("ArrowLeft", "forward"),
        ("ArrowDown", "block"),
        ("ArrowUp", "forward"),
    ):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(f"{name},")
    page.keyboard.press("Enter")
    assert "forward" in node.first.text_content()
    page.keyboard.press("?")
    assert page.get_by_text("Flame graph, if it has the focus: enlarge the node").first.is_visible()
