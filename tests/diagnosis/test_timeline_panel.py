"""The timeline of a diagnosis: what its lanes show, what is said of slices, and how a browser shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from instrument.explain.diagnosis.diagnose import Diagnosis, diagnose
from instrument.read.charts.timeline import CLASSES
from instrument.read.tables.trace import Device, Thread, Trace
from instrument.show.sections.diagnosis import timeline_section
from tests.support.browser import OpenedPage, OpenPage
from tests.support.shared_traces import shared
from tests.support.timeline_slices import slices

from .made_loops import GEMM, STEP, MadeLoop
from .small_traces import kernel, on_cpu, trace_of


def section_of(diagnosis: Diagnosis) -> dict[str, Any]:
    section = timeline_section(diagnosis)
    assert section is not None
    found: dict[str, Any] = json.loads(msgspec.json.encode(section))
    return found


def loop() -> Trace:
    """Return a loop that waits for input, then launches a kernel from an operator in a region."""
    made = MadeLoop(busy=False)
    for start in range(0, 3 * STEP, STEP):
        made.region("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start, start + 400)
        made.region("forward", start + 400, start + 500)
        made.operator("aten::mm", start + 400, start + 450)
        made.work(GEMM, start + 410, start + 420, start + 900)
    return made.trace()


def test_lanes() -> None:
    """The idle time and streams of the GPU come first, then regions, operators and calls of the thread."""
    section = section_of(diagnose(loop()))
    assert section["groups"] == [
        {"title": "GPU 0 NVIDIA H100 80GB HBM3", "lanes": [["idle: no GPU works", 1], ["stream 7", 1]]},
        {"title": "Thread 1", "lanes": [["regions", 1], ["operators", 1], ["runtime calls", 1]]},
    ]
    assert (section["start_ns"], section["end_ns"], section["notes"]) == (0, 3_000_000, [])
    kernels = [each for each in slices(section) if each.lane == "stream 7"]
    assert [each.start_ns for each in kernels] == [420_000, 1_420_000, 2_420_000]
    assert {each.length_ns for each in kernels} == {480_000}
    assert {each.kind for each in kernels} == {"compute"}
    assert kernels[0].about == {
        "work": kernels[0].name, "call": "cudaLaunchKernel", "operator": "aten::mm", "region": "forward",
    }  # fmt: skip


def test_idle_by_cause() -> None:
    """Every gap has its cause, the meaning of it, and the work that ends it."""
    diagnosis = diagnose(loop())
    section = section_of(diagnosis)
    gaps = [each for each in slices(section) if each.lane == "idle: no GPU works"]
    assert [(each.start_ns, each.length_ns, each.name, each.kind) for each in gaps] == [
        (0, 420_000, "input", "input"),
        (900_000, 520_000, "input", "input"),
        (1_900_000, 520_000, "input", "input"),
        (2_900_000, 100_000, "unknown", "other"),
    ]
    assert gaps[0].about["operator"] == "aten::mm" and gaps[0].about["work"].startswith("gemm")
    meaning = {section["texts"][place]: text for place, text in section["causes"]}
    assert meaning["input"] == "The GPU idles while the loop waits for the next batch."
    assert section["gaps"][0][:3] == ["input", 520_000, 900_000]
    assert len(section["gaps"]) == len(diagnosis.idle_gaps)


def test_steps_by_part() -> None:
    """The table of steps has their numbers, and parts that add up to their lengths."""
    steps = section_of(diagnose(loop()))["steps"]
    assert [row[:3] for row in steps] == [[number, number * STEP * 1000, STEP * 1000] for number in range(3)]
    assert [row[3:] for row in steps] == [[480_000, 0, 0, 520_000]] * 3


def test_nested_modules() -> None:
    """Modules lie below those that call them, without the prefix of their names."""
    names = {"nn.Module: Block_0": (0, 900), "a.py(1): f": (50, 800), "nn.Module: Linear_0": (100, 700)}
    frames = [on_cpu(name, *times) for name, times in names.items()]
    calls = [on_cpu("cudaLaunchKernel", 200, 210, correlation=1)]
    work = [kernel("k", 300, 1000, correlation=1)]
    section = section_of(diagnose(trace_of(frames=frames, runtime=calls, gpu=work)))
    modules = [each[2:4] for each in slices(section) if each.lane == "modules"]
    assert modules == [(0, "Block_0"), (1, "Linear_0")]


def test_several_gpus_and_threads() -> None:
    """GPUs are in order of their number, threads by the time that they are used; unused threads are counted."""
    trace = trace_of(
        [Device(2, name="A"), Device(10, name="B")],
        operators=[on_cpu("aten::a", 110, 120), on_cpu("aten::b", 5, 900, thread=1)],
        runtime=[on_cpu("cudaLaunchKernel", 20 + n, 21 + n, correlation=n) for n in range(3)],
        gpu=[
            kernel("k", 100, 300, device=10, correlation=0),
            kernel("k", 200, 400, device=2, correlation=1),
            kernel("ncclKernel_AllReduce", 500, 1000, device=2, stream=9, correlation=2),
        ],
    )
    section = section_of(diagnose(trace))
    titles = [group["title"] for group in section["groups"]]
    assert titles == ["All GPUs", "GPU 2 A", "GPU 10 B", "Thread 2", "Thread 1"]
    assert section["groups"][0]["lanes"] == [["idle: no GPU works", 1]]
    gaps = [each for each in slices(section) if each.group == "All GPUs"]
    assert [(each.start_ns, each.length_ns) for each in gaps] == [(0, 95), (395, 100)]  # from the launch on
    assert section["groups"][1]["lanes"] == [["stream 9", 1], ["stream 7", 1]]
    kinds = {each.lane: each.kind for each in slices(section) if each.group == "GPU 2 A"}
    assert kinds == {"stream 9": "communication", "stream 7": "compute"}


def test_unused_threads() -> None:
    """Threads without events in the window are left out and counted."""
    made = MadeLoop()
    made.rows["operators"].append(on_cpu("aten::late", 9_000_000, 9_100_000, thread=1))
    section = section_of(diagnose(made.trace()))
    assert [group["title"] for group in section["groups"]] == ["GPU 0 NVIDIA H100 80GB HBM3", "Thread 1"]
    assert section["notes"] == ["Not shown: 1 thread without events in the window."]


def test_titles_of_threads() -> None:
    """A title keeps the name of the thread as it is, and has the process if there are several."""
    trace = trace_of(operators=[on_cpu("aten::a", 0, 20), on_cpu("aten::b", 5, 15, thread=1)])
    trace.threads[:] = [Thread(1, 7, "MyThread", autograd=True), Thread(1, 8, "thread 8 (python)")]
    titles = [group["title"] for group in section_of(diagnose(trace))["groups"]]
    assert titles == ["Thread 7 MyThread (autograd)", "Thread 8 (python)"]
    trace.threads[:] = [Thread(1, 7), Thread(2, 7)]
    titles = [group["title"] for group in section_of(diagnose(trace))["groups"]]
    assert titles == ["Process 1, thread 7", "Process 2, thread 7"]


def test_overlapping_kernels() -> None:
    """Kernels that overlap on one stream are in rows of their own."""
    work = [kernel("k", 0, 100), kernel("k", 50, 150), kernel("k", 120, 200)]
    section = section_of(diagnose(trace_of(gpu=work)))
    assert [each.depth for each in slices(section) if each.lane == "stream 7"] == [0, 1, 0]


def test_names_are_shown_as_text() -> None:
    """Names go through `shown_name`: control characters are visible, and long names are cut."""
    made = MadeLoop().region("a\u202eb" + "x" * 1000, 10, 20)
    (region,) = [each for each in slices(section_of(diagnose(made.trace()))) if each.lane == "regions"]
    assert len(region.name) == 300 and region.name.isprintable()


def test_no_timeline() -> None:
    """A trace without events that take time has no timeline."""
    assert timeline_section(diagnose(trace_of(operators=[on_cpu("a", 0, 0)]))) is None


def test_most_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many slices, a typical and the longest step are complete; the text says what is merged elsewhere."""
    monkeypatch.setattr("instrument.read.charts.timeline._MOST_SLICES", 1200)
    made = MadeLoop(steps=10, busy=False)
    for start in range(0, 10 * STEP, STEP):
        for at in range(start, start + 990, 10):
            made.work("k", at, at + 1, at + 8 + (at % 3) / 10)
    section = section_of(diagnose(made.trace()))
    assert sum(len(level[kind]["gap"]) for level in section["levels"] for kind in ("single", "merged")) <= 1200
    assert section["whole"] < len(section["levels"])
    assert "outside of step" in section["notes"][0] and "Perfetto" in section["notes"][0]
    (start, end), *_ = section["detailed"]
    inside = [each for each in slices(section) if each.lane == "stream 7" and start <= each.start_ns < end]
    assert len(inside) == 99


@pytest.mark.parametrize("name", ["tl_h100_owlv2.json.gz", "hta_nccl_data.json.gz", "tl_mi300_bert_small.json.gz"])
def test_real_traces(name: str) -> None:
    """All GPU work of the window is shown, and idle and busy time add up to the window."""
    diagnosis = diagnose(shared(name))
    facts = diagnosis.facts
    assert facts is not None
    section = section_of(diagnosis)
    found = slices(section)
    assert section["levels"][-1]["merged"]["gap"] == []
    assert sum(each.lane.startswith("stream") for each in found) == int((facts.gpu.duration_ns > 0).sum())
    idle = sum(each.length_ns for each in found if each.lane.startswith("idle"))
    assert idle + facts.busy_ns == facts.window_ns
    assert {each.kind for each in found} <= set(CLASSES)


def opened(tmp_path: Path, open_page: OpenPage, hash_: str = "", **options: Any) -> OpenedPage:
    path = diagnose(loop()).to_html(tmp_path / "page.html")
    page = open_page(f"{path.as_uri()}{hash_}", **options)
    page.page.wait_for_selector("body[data-ready]")
    page.page.locator("#timeline").scroll_into_view_if_needed()
    return page


def shown_time(page: OpenedPage) -> tuple[int, int]:
    """Return the time that the address says."""
    page.page.wait_for_timeout(500)  # the address changes no more often
    start, end = page.page.evaluate("new URLSearchParams(location.hash.slice(1)).get('t')").split(",")
    return int(start), int(end)


def test_zooms_with_keys_and_wheel(tmp_path: Path, open_page: OpenPage) -> None:
    """Keys and the wheel zoom and pan; the address keeps what is shown, and 0 shows the whole window."""
    page = opened(tmp_path, open_page)
    page.page.keyboard.press("w")
    start, end = shown_time(page)
    assert 0 < start < end < 3_000_000
    page.page.keyboard.press("d")
    assert shown_time(page)[0] > start
    page.page.locator(".timeline-group canvas").first.hover()
    page.page.keyboard.down("Control")
    page.page.mouse.wheel(0, -200)
    page.page.keyboard.up("Control")
    assert shown_time(page)[1] - shown_time(page)[0] < (end - start) * 0.7
    page.page.keyboard.press("0")
    page.page.wait_for_timeout(500)
    assert "t=" not in page.page.url
    assert (page.errors, page.requests) == ([], [])


def test_address_restores(tmp_path: Path, open_page: OpenPage) -> None:
    """The address of a view shows the same time again."""
    assert shown_time(opened(tmp_path, open_page, "#t=420000,900000")) == (420_000, 900_000)


def test_selects(tmp_path: Path, open_page: OpenPage) -> None:
    """A click on a slice, and the keys for its neighbors, say what it is in a live region."""
    page = opened(tmp_path, open_page)
    canvas = page.page.locator(".timeline-group canvas").first
    box = canvas.bounding_box()
    assert box is not None
    canvas.click(position={"x": box["width"] * 0.05, "y": 22})
    status = page.page.locator(".timeline-status")
    assert "idle: input" in status.inner_text() and "420 us" in status.inner_text()
    assert "The GPU idles while the loop waits for the next batch." in status.inner_text()
    page.page.keyboard.press(".")
    assert "520 us" in status.inner_text() and "operator aten::mm" in status.inner_text()
    assert "520 us" in page.accessibility()
    page.page.keyboard.press("f")
    assert shown_time(page) == (770_000, 1_550_000)


def test_drags(tmp_path: Path, open_page: OpenPage) -> None:
    """A drag moves what is shown with the pointer, and selects nothing."""
    page = opened(tmp_path, open_page, "#t=1000000,2000000")
    box = page.page.locator(".timeline-group canvas").first.bounding_box()
    assert box is not None
    page.page.mouse.move(box["x"] + 600, box["y"] + 22)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + 600 - box["width"] / 4, box["y"] + 22, steps=5)
    page.page.mouse.up()
    assert shown_time(page) == pytest.approx((1_250_000, 2_250_000), abs=5_000)
    assert page.page.locator(".timeline-status").inner_text().startswith("Select")


def test_finding_leads_to_its_place(tmp_path: Path, open_page: OpenPage) -> None:
    """A finding scrolls the timeline into view, zooms there and says what it marked."""
    page = opened(tmp_path, open_page)
    page.page.get_by_role("button", name="Show in the timeline").first.click()
    start, end = shown_time(page)
    assert end - start < 3_000_000
    assert page.page.locator(".timeline-status").inner_text().startswith("Marked: ")


@pytest.mark.parametrize("width", [360, 1280, 3840])
def test_widths(tmp_path: Path, open_page: OpenPage, width: int) -> None:
    """The canvases are as wide as the page, which does not scroll sideways; tables have the numbers."""
    page = opened(tmp_path, open_page, width=width, dark=width == 1280)
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    tree = page.accessibility()
    assert "Timeline of 3 steps, 3.00 ms" in tree
    page.page.get_by_text("The steps as a table").click()
    tree = page.accessibility()
    assert "Exposed communication" in tree and "480 us" in tree
    assert page.errors == []
