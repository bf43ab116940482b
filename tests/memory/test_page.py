"""The page of a memory snapshot: its numbers are those of the snapshot, and what it does in a browser."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.base.page_file import write_page
from instrument.read.memory.categories import CATEGORIES, EVIDENCE, page_class
from instrument.read.memory.snapshot import MemorySnapshot
from instrument.show.sections.memory import inferred_section, page_of_change, peak_section, sections_of

from ..page.hostile import HOSTILE
from ..support.browser import OpenedPage, OpenPage, in_notebook
from ..support.shared_traces import shared
from .snapshots import block, event, segment, write
from .test_breakdown import FORWARD, OPTIMIZER, STEP, frames
from .test_read import PEAKS

RESERVED = [segment([{**block(100, 1000), "frames": []}, block(2000, 9000, "inactive")])]
MS = 1000  # us
PIXELS = """(canvas, [x, ...heights]) => {
  const { data } = canvas.getContext("2d").getImageData(x, 0, 1, canvas.height);
  return heights.map((y) => `rgb(${data.slice(4 * Math.round(y), 4 * Math.round(y) + 3).join(", ")})`);
}"""
COLOR = """(name) => {
  const probe = document.body.appendChild(document.createElement("p"));
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}"""
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
LEFT, BOTTOM = 62, 18  # of the chart, around its areas


def snapshot(path: Path, **more: Any) -> MemorySnapshot:
    """Write and read a snapshot of a step, in the region "train" and with a time for each event."""
    about = {"user_metadata": "train", **more}
    events = [{**each, **about, "time_us": 5 * MS * number} for number, each in enumerate(STEP)]
    return instrument.read_memory(write(path, [events], RESERVED))


@pytest.fixture
def made(tmp_path: Path) -> MemorySnapshot:
    """A snapshot of a step."""
    return snapshot(tmp_path / "step.pickle")


def sections(found: MemorySnapshot, device: int = 0) -> dict[str, dict[str, Any]]:
    return {section["id"]: section for section in sections_of(found, device)}


def paths(section: dict[str, Any], view: str) -> dict[str, list[int]]:
    """Return by path of names the bytes of each node with a line, and without."""
    tree, names, found = section["views"][view], section["names"], list[str]()
    for above, name in zip(tree["parent"], tree["name"], strict=True):
        found.append(f"{found[above]} > {names[name]}" if above >= 0 else names[name])
    sums = [list(both) for both in zip(*tree["values"], strict=True)]
    for node in reversed(range(len(found))):
        if tree["parent"][node] >= 0:
            for part in (0, 1):
                sums[tree["parent"][node]][part] += sums[node][part]
    return dict(zip(found, sums, strict=True))


def opened(open_page: OpenPage, page: Path | str, width: int = 1280) -> OpenedPage:
    """Return the open page, complete and without errors or requests."""
    shown = open_page(page, width=width)
    shown.page.wait_for_selector("[data-ready]")
    shown.page.evaluate(DRAWN)
    assert ([], []) == (shown.errors, shown.requests)
    return shown


def status(shown: OpenedPage) -> str:
    return shown.page.locator(".memory [role=status]").first.inner_text()


@pytest.mark.parametrize("name", PEAKS)
def test_real_snapshots(name: str) -> None:
    """The highest point of the timeline and the sums of both icicles are the peak, to the byte."""
    found = instrument.read_memory(shared(f"memory/{name}.pickle"))
    peak, shown = found.peak(), sections(found)
    chart = shown["memory"]
    sizes = [list(accumulate(changes)) for changes in chart["bytes"]]
    used = [sum(point) for point in zip(*sizes, strict=True)]
    assert peak.bytes == max(used) == used[chart["peak"]]
    assert peak.event == list(accumulate(chart["event"]))[chart["peak"]]
    by_category = found.break_down().by_category()
    at_peak = {name: size[chart["peak"]] for name, size in zip(chart["categories"], sizes, strict=True)}
    assert {page_class(name): sum(both) for name, both in by_category.items() if sum(both)} == {
        name: size for name, size in at_peak.items() if size
    }
    for view in ("region", "category"):
        root = paths(shown["peak"], view)["in use at the peak"]
        assert [found.break_down().known_bytes, peak.bytes - found.break_down().known_bytes] == root


def test_icicle(made: MemorySnapshot) -> None:
    """Regions lie around modules, lines and categories; what is inferred is apart, and says why."""
    shown = sections(made)["peak"]
    by_region, by_category = paths(shown, "region"), paths(shown, "category")
    peak = "in use at the peak"
    assert [2730, 1000] == by_region[f"{peak} > train"]
    assert [2000, 0] == by_region[f"{peak} > train > train.py:42 train > optimizer state"]
    assert [0, 1000] == by_region[f"{peak} > train > inferred: sized gradient > gradients"]
    assert [0, 1000] == by_region[f"{peak} > inferred: older parameter > parameters"]
    assert [0, 1000] == by_category[f"{peak} > parameters > inferred: older parameter"]
    about = {shown["names"][number]: text for number, text in shown["about"].items()}
    assert "/home/me/train.py:42" == about["train.py:42 train"]
    assert about["inferred: older parameter"].startswith("Evidence: older than the history")


def test_modules_in_the_icicle(tmp_path: Path) -> None:
    """The lines that call modules lie between a region and the line that allocates."""
    events = [event("alloc", 1, 640, frames=FORWARD, user_metadata="forward")]
    found = instrument.read_memory(write(tmp_path / "one.pickle", [events]))
    shown = paths(sections(found)["peak"], "region")
    path = "in use at the peak > forward > train.py:40 train > model.py:12 forward > activations"
    assert [640, 0] == shown[path]


def test_long_timeline(tmp_path: Path) -> None:
    """Of very many points the highest and the lowest are kept, and a note says so."""
    steps = range(30_000)
    events = [
        event(action, 1, 100 + (number == 17_001)) for number in steps for action in ("alloc", "free_completed")
    ]
    chart = sections(instrument.read_memory(write(tmp_path / "long.pickle", [events])))["memory"]
    (sizes,) = [list(accumulate(changes)) for changes in chart["bytes"]]
    assert (101, 0) == (sizes[chart["peak"]], min(sizes))
    assert len(sizes) <= 20_000
    assert chart["notes"][0].startswith(
        "Of 60,000 events, the highest and the lowest point of each stretch are shown"
    )


def test_without_history(tmp_path: Path) -> None:
    """A snapshot without recorded events has no peak and no timeline; without memory in use, no blocks."""
    empty = segment([block(100, 4096, "inactive")], device=1)
    found = instrument.read_memory(write(tmp_path / "none.pickle", [], [*RESERVED, empty]))
    assert ["summary", "largest"] == list(sections(found))
    assert ["summary"] == list(sections(found, 1))
    reserved = instrument.read_memory(write(tmp_path / "two.pickle", [[event("segment_alloc", 1, 4096)]]))
    assert ["summary"] == list(sections(reserved))


def test_unknown_reserved_memory(tmp_path: Path) -> None:
    """Where segments are not recorded, no line is drawn below what is in use, and the page says why."""
    found = instrument.read_memory(write(tmp_path / "one.pickle", [STEP]))
    chart = sections(found)["memory"]
    assert chart["reserved_bytes"] is None
    assert ["What was reserved is not shown: more was in use than the recorded segments have."] == chart["notes"]
    assert chart["time_ns"] is None


def test_tables(tmp_path: Path) -> None:
    """Allocations that failed, lines that grow, and memory that went back to the driver are tables."""
    growing = [
        each
        for number in range(4)
        for each in (
            event("alloc", 10 + number, 500, frames=frames(("/home/me/data.py", "load", 3))),
            event("segment_free", 1 << 20, 4096, frames=frames(("/home/me/data.py", "load", 4))),
            event("alloc", 1, 70, frames=OPTIMIZER),
            event("free_completed", 1, 70, frames=OPTIMIZER),
        )
    ]
    failed = event("oom", 0, 1 << 30, device_free=2048, frames=frames(("/home/me/data.py", "load", 5)))
    found = sections(instrument.read_memory(write(tmp_path / "one.pickle", [[*growing, failed]], RESERVED)))
    assert [["me/data.py:3 load", 4, 2000, 4]] == found["growth"]["rows"]
    assert ["me/data.py:5 load", 1 << 30, 2048] == [found["failures"]["rows"][0][at] for at in (0, 2, 6)]
    assert ["unknown", "unknown", 4, 4 * 4096] == found["driver"]["rows"][0]


def test_what_is_inferred(made: MemorySnapshot, tmp_path: Path) -> None:
    """What is inferred has its evidence in words, its bytes and blocks; of two snapshots side by side."""
    inferred = sections(made)["inferred"]
    assert ["Category", "Evidence", "Memory", "Blocks", "The evidence is"] == [
        column["title"] for column in inferred["columns"]
    ]
    assert ["parameters", "older parameter", 1000, 1, EVIDENCE["older parameter"]] in inferred["rows"]
    assert made.break_down().inferred_bytes == sum(row[2] for row in inferred["rows"])
    known = instrument.read_memory(write(tmp_path / "two.pickle", [[event("alloc", 1, 640, frames=FORWARD)]]))
    assert "inferred" not in sections(known)
    both = inferred_section({"before": known.break_down(), "after": made.break_down()})
    assert both is not None
    assert ["Before", "Blocks before"] == [column["title"] for column in both["columns"][2:4]]
    assert ["parameters", "older parameter", 0, 0, 1000, 1, EVIDENCE["older parameter"]] in both["rows"]


def test_largest_blocks(tmp_path: Path) -> None:
    """Blocks alike are one row, with the size of one of them, and where or why they are in use."""
    alike = [event("alloc", number, 3000, frames=FORWARD) for number in (20, 21)]
    found = instrument.read_memory(write(tmp_path / "one.pickle", [[*STEP, *alike]], RESERVED))
    rows = sections(found)["largest"]["rows"]
    assert ["me/model.py:12 forward", "activations", 3000, 2, 6000] == rows[0]
    assert ["inferred: older parameter", "parameters", 1000, 1, 1000] in rows
    assert len(found.largest_blocks()) == len(rows)


def test_taken_from_the_driver(tmp_path: Path, open_page: OpenPage) -> None:
    """What the driver gave after the first step is said, also where nothing went back to it."""
    taken = event("segment_alloc", 1 << 20, 4096)
    steps = [dict(each) for each in (*STEP, taken, *STEP)]
    found = instrument.read_memory(write(tmp_path / "one.pickle", [steps], RESERVED))
    text = "After the first recorded step, 4.10 kB was taken from the driver, 1 time in 1 step."
    assert sections(found)["driver"]["note"].startswith(text)
    driver = opened(open_page, found.to_html(tmp_path / "page.html")).page.locator("#driver")
    assert text in driver.inner_text()
    assert 0 == driver.locator("table").count()
    back = event("segment_free", 1 << 20, 4096, frames=frames(("/home/me/data.py", "load", 4)))
    steps.insert(len(STEP) + 1, back)
    both = sections(instrument.read_memory(write(tmp_path / "two.pickle", [steps], RESERVED)))["driver"]
    assert both["note"].startswith(text)
    assert [["unknown", "unknown", 1, 4096]] == both["rows"]


def test_lead(made: MemorySnapshot, tmp_path: Path) -> None:
    """A page begins with the peak by category."""
    text = "Memory of GPU 0 at its peak: 4.73 kB in use: optimizer state 2.00 kB, parameters 1.00 kB, gradients"
    assert f'<p class="lead">{text}' in made.to_html(tmp_path / "page.html").read_text()


def test_out_of_memory(tmp_path: Path) -> None:
    """The page begins with the last allocation that failed; what failed is the first section."""
    failed = [event("oom", 0, size, device_free=2048) for size in (1 << 20, 1 << 30)]
    found = instrument.read_memory(write(tmp_path / "one.pickle", [[*STEP, *failed]], RESERVED))
    text = (
        "Out of memory: an allocation of 1.07 GB failed; too little memory is free, even if it were one piece. "
        "Memory of GPU 0 at its peak: 4.73 kB in use"
    )
    assert f'<p class="lead">{text}' in found.to_html(tmp_path / "page.html").read_text()
    assert ["failures", "summary"] == list(sections(found))[:2]


def test_timeline_in_the_browser(made: MemorySnapshot, tmp_path: Path, open_page: OpenPage) -> None:
    """Areas have the color of their category; a click selects a point, which keys move; the address keeps it."""
    shown = opened(open_page, made.to_html(tmp_path / "page.html"))
    page, canvas = shown.page, shown.page.locator(".memory canvas")
    assert status(shown).startswith(
        "The peak, after event 11, 50.0 ms after the first: in use 4.73 kB, parameters 1.00 kB"
    )
    box = canvas.bounding_box()
    assert box is not None
    scale = (box["width"] - LEFT) / 55  # pixels per ms
    low = box["height"] - BOTTOM - 4
    gradients = low - (box["height"] - BOTTOM - 16) * 0.15  # 1.5 kB of 10 kB
    colors = [page.evaluate(COLOR, name) for name in ("parameters", "gradients")]
    assert colors == canvas.evaluate(PIXELS, [LEFT + 52 * scale, low, gradients])
    canvas.hover(position={"x": LEFT + 7 * scale, "y": 150})
    assert page.locator("#tooltip p").all_inner_texts() == [
        "after event 2, 5.00 ms after the first", "in use: 1.96 kB", "parameters: 1.00 kB", "activations: 320 B",
        "other: 640 B", "reserved: 10.0 kB",
    ]  # fmt: skip
    canvas.click(position={"x": LEFT + 7 * scale, "y": 150})
    page.keyboard.press("ArrowRight")
    assert status(shown).startswith("after event 3, 10.0 ms after the first: in use 2.04 kB")
    page.keyboard.press("ArrowUp")
    page.wait_for_timeout(500)  # the address changes no more often
    assert "#memory.point=2&memory.range=" in page.url
    again = opened(open_page, page.url)
    assert status(shown) == status(again)
    page.keyboard.press("p")
    page.keyboard.press("Home")
    page.wait_for_timeout(500)
    assert "#" not in page.url
    assert ([], []) == (shown.errors, shown.requests)


def test_zoom_of_the_timeline(made: MemorySnapshot, tmp_path: Path, open_page: OpenPage) -> None:
    """The wheel with Ctrl zooms at the pointer and a drag pans, by time or event; strange addresses do nothing."""
    page = opened(open_page, made.to_html(tmp_path / "page.html")).page
    box = page.locator(".memory canvas").bounding_box()
    assert box is not None

    def shown() -> list[int]:
        page.wait_for_timeout(500)
        found = page.evaluate("new URLSearchParams(location.hash.slice(1)).get('memory.range')")
        return [int(end) for end in (found or "").split(",") if end]

    page.mouse.move(box["x"] + LEFT + (box["width"] - LEFT) / 2, box["y"] + 100)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    start, end = shown()
    assert 0 < start < 27_500_000 < end < 55_000_000
    page.mouse.down()
    page.mouse.move(box["x"] + LEFT + (box["width"] - LEFT) / 2 - 100, box["y"] + 100, steps=4)
    page.mouse.up()
    later, last = shown()
    assert later > start and end - start == pytest.approx(last - later, abs=2)
    page.get_by_role("button", name="By event").click()
    assert [] == shown()
    page.evaluate("location.hash = 'memory.range=x,1e999&memory.point=constructor&memory.axis=__proto__'")
    page.wait_for_function("document.querySelector('.memory [role=status]').innerText.startsWith('The peak')")


def test_icicle_in_the_browser(made: MemorySnapshot, tmp_path: Path, open_page: OpenPage) -> None:
    """Nodes have bytes, blocks and what they rest on; parts, search and the table show the same numbers."""
    shown = opened(open_page, made.to_html(tmp_path / "page.html"))
    page, node = shown.page, shown.page.locator(".flame-node")
    label = node.filter(has_text="inferred: sized gradient").get_attribute("aria-label")
    assert label is not None
    assert label.startswith("inferred: sized gradient, Memory 1.00 kB at the peak (21.1 %), Blocks 1 at the peak")
    assert "Evidence: allocated on a thread that Python did not start" in label
    page.get_by_role("button", name="Without a line").click()
    assert not node.filter(has_text="optimizer state").count()
    page.get_by_role("button", name="All", exact=True).click()
    page.get_by_role("searchbox", name="Search: The peak").fill("optimizer")
    assert '2.00 kB at the peak (42.3 %) in "optimizer"' in page.locator(".flame").inner_text()
    page.get_by_role("button", name="By category").click()
    node.filter(has_text="optimizer state").click()
    page.wait_for_timeout(500)
    assert "peak.by=category" in page.url and "peak.node=optimizer+state" in page.url
    page.get_by_text("The nodes as a table: By region").click()
    assert page.locator("#peak details[open] tbody tr").first.locator("td").all_inner_texts() == [
        "in use at the peak", "peak", "4.73 kB", "2.00 kB", "6", "",
    ]  # fmt: skip
    assert ([], []) == (shown.errors, shown.requests)


def test_nodes_of_one_name(tmp_path: Path, open_page: OpenPage) -> None:
    """Lines of files with one name and a region of this name have addresses of their own."""
    same = frames(("/home/me/a/net.py", "run", 3)), frames(("/home/me/b/net.py", "run", 3))
    events = [
        event("alloc", 1, 4000, frames=same[0]),
        event("alloc", 2, 3000, frames=same[1]),
        event("alloc", 3, 2000, frames=OPTIMIZER, user_metadata="net.py:3 run"),
    ]
    path = instrument.read_memory(write(tmp_path / "one.pickle", [events])).to_html(tmp_path / "page.html")
    for number, amount in enumerate(("4.00 kB", "3.00 kB", "2.00 kB")):
        page = opened(open_page, path).page
        page.locator(".flame-node").filter(has_text="net.py:3 run").nth(number).click()
        page.wait_for_timeout(500)
        again = opened(open_page, page.url).page
        label = again.locator(".flame-node").first.get_attribute("aria-label")
        assert label is not None
        assert label.startswith(f"net.py:3 run, Memory {amount}")


def test_keys_are_those_of_the_focus(made: MemorySnapshot, tmp_path: Path, open_page: OpenPage) -> None:
    """Keys act on the chart that has the focus, and "?" lists them once for each."""
    page = opened(open_page, made.to_html(tmp_path / "page.html")).page
    page.locator(".flame-node").first.focus()
    page.keyboard.press("ArrowDown")
    assert "train" in page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("?")
    keys = page.locator("#keys").inner_text()
    assert "Memory over time, if it has the focus: select the peak" in keys
    assert "The peak, if it has the focus: enlarge the node" in keys


def test_two_snapshots(made: MemorySnapshot, tmp_path: Path, open_page: OpenPage) -> None:
    """The parts lead from one peak to the other, by category, region or line, and both charts have one scale."""
    larger = [{**each, "size": 5000} if each["addr"] == 2 else each for each in STEP]
    about = {"user_metadata": "train", "time_us": MS}
    after = instrument.read_memory(
        write(tmp_path / "two.pickle", [[{**each, **about} for each in larger]], RESERVED)
    )
    page = write_page(tmp_path / "page.html", page_of_change(made, after, 0))
    shown = opened(open_page, page)
    peaks = [made.peak().bytes, after.peak().bytes]
    for order in ("region", "line", "category"):
        shown.page.get_by_role("button", name=f"By {order}").first.click()
        bars = shown.page.eval_on_selector_all(".row", "rows => rows.map((row) => Number(row.dataset.value))")
        assert peaks == [bars[0], bars[-1]]
        assert peaks[1] - peaks[0] == sum(bars[1:-1])
    names = shown.page.locator(".waterfall .rows .name").all_inner_texts()
    assert ["before", "activations", "optimizer state", "after"] == [names[0], *sorted(names[1:3]), names[-1]]
    assert 2 == shown.page.locator(".memory canvas").count()
    note = "Both charts have the same scale of bytes, and each its own length."
    assert [1, 1] == [
        shown.page.locator(f"#memory-{side}").get_by_text(note).count() for side in ("before", "after")
    ]
    assert 2 == shown.page.locator(".flame svg").count()
    lead = shown.page.locator(".lead").inner_text()
    assert "GPU 0: the peak went from 4.73 kB to 6.72 kB, +1.99 kB." == lead
    shown.page.locator("#peak-after").get_by_role("button", name="By category").click()
    pressed = shown.page.locator("#peak-before [aria-pressed=true]").all_inner_texts()
    assert ["By region", "All"] == pressed
    assert ([], []) == (shown.errors, shown.requests)


def test_equal_snapshots(made: MemorySnapshot, tmp_path: Path, open_page: OpenPage) -> None:
    """Two equal snapshots have no changes, also if no memory was in use."""
    shown = opened(open_page, write_page(tmp_path / "page.html", page_of_change(made, made, 0)))
    assert 2 == shown.page.locator(".waterfall .row").count()
    assert shown.page.locator(".lead").inner_text().endswith("from 4.73 kB to 4.73 kB, 0 B.")
    empty = instrument.read_memory(write(tmp_path / "empty.pickle", [[event("segment_alloc", 1, 4096)]]))
    shown = opened(open_page, write_page(tmp_path / "page.html", page_of_change(empty, empty, 0)))
    assert 1 == shown.page.locator("section").count()


@pytest.mark.parametrize("width", [360, 1280])
def test_hostile_names(tmp_path: Path, open_page: OpenPage, width: int) -> None:
    """Names of files, functions and regions are text: none runs, none makes the page wider than the window."""
    events = [
        event("alloc", number, 1000 + number, user_metadata=name, time_us=number,
              frames=[{"filename": f"{name}.py", "name": name, "line": number}])
        for number, name in enumerate((name.replace("\ud800", "")[:5000] for name in HOSTILE), 1)
    ]  # fmt: skip
    path = write(tmp_path / "<img src=x onerror=alert(1)>.pickle", [events], RESERVED)
    found = instrument.read_memory(path)
    shown = opened(open_page, found.to_html(tmp_path / "page.html"), width)
    for name in ("region", "category"):
        shown.page.get_by_text(f"The nodes as a table: By {name}").click()
    for button in reversed(shown.page.locator(".data > button:visible").all()):
        button.click()
    assert width == shown.page.evaluate("document.documentElement.scrollWidth")
    change = write_page(tmp_path / "change.html", page_of_change(snapshot(tmp_path / "step.pickle"), found, 0))
    changed = opened(open_page, change, width)
    changed.page.get_by_text("All parts as a table").click()
    changed.page.locator("#parts .data > button").click()
    for each in (shown, changed):
        assert 0 == each.page.locator("main :is(script, img, iframe, style, form, link)").count()
        assert "</script>" in each.page.inner_text("main")
        assert ([], []) == (each.errors, each.requests)


def test_notebook(made: MemorySnapshot, tmp_path: Path, open_page: OpenPage) -> None:
    """A cell that ends with a snapshot shows its page; one without memory of a GPU shows text."""
    shown = in_notebook(open_page, tmp_path, made._repr_html_())
    assert 1 == shown.page.frame_locator("iframe").locator(".memory canvas").count()
    assert [] == shown.errors
    assert instrument.read_memory(write(tmp_path / "none.pickle", []))._repr_html_() is None


def test_device_of_the_page(tmp_path: Path) -> None:
    """The page is of the GPU with the highest peak, or of the one that is given; others are refused."""
    two = [[event("alloc", 1, 10)], [event("alloc", 1, 20)]]
    found = instrument.read_memory(write(tmp_path / "two.pickle", two))
    assert "Memory of GPU 1 at its peak: 20 B in use" in found.to_html(tmp_path / "page.html").read_text()
    assert (
        "Memory of GPU 0 at its peak: 10 B in use" in found.to_html(tmp_path / "page.html", device=0).read_text()
    )
    with pytest.raises(ValueError, match=r'"device" must be a GPU with memory in .* \(0, 1\): 7'):
        found.to_html(tmp_path / "page.html", device=7)
    none = instrument.read_memory(write(tmp_path / "none.pickle", []))
    with pytest.raises(ValueError, match=r"\(none\): 0"):
        none.to_html(tmp_path / "page.html")


def test_categories_have_colors() -> None:
    """The style of pages has a color for each category, in both themes."""
    style = Path(instrument.__file__).parent.joinpath("show", "page", "style.css").read_text()
    assert dict.fromkeys(CATEGORIES, 2) == {name: style.count(f"--{page_class(name)}: #") for name in CATEGORIES}


def test_nothing_in_use(tmp_path: Path) -> None:
    """A peak of nothing has no icicle."""
    found = instrument.read_memory(write(tmp_path / "one.pickle", [], [segment([block(1, 10, "inactive")])]))
    assert peak_section(found.break_down()) is None


def test_events_of_a_gpu(tmp_path: Path) -> None:
    """Events are counted within their GPU, as in the terminal."""
    events = [[event("alloc", 1, 8)], [event("alloc", 1, 8), event("alloc", 2, 8)]]
    chart = sections(instrument.read_memory(write(tmp_path / "two.pickle", events)), 1)["memory"]
    assert [-1, 0, 1] == list(accumulate(chart["event"]))
