"""Writes the pictures of the documentation: ``python -m scripts.pictures``, or ``make pictures``.

A picture is a screenshot of a part of the page that ``instrument diagnose --html`` makes of a real trace, or
``instrument memory --html`` of a memory snapshot; ``make traces`` fetches both. It has the same bytes each time,
as long as the versions of Chromium and of the fonts are the same.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts import chromium

from instrument.explain.diagnosis.diagnose import Diagnosis, diagnose
from instrument.read.memory.read import read_memory
from instrument.show.sections.diagnosis import span_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, FloatRect

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
TRACES = ROOT / os.environ.get("INSTRUMENT_TRACES", "build/traces")
MAX_BYTES = 120_000
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@dataclass(frozen=True)
class Picture:
    """A screenshot to make.

    Attributes:
        name: the file name below docs/pictures, without its suffix.
        trace: the trace or memory snapshot, below the folder of real traces; with a "*", the ranks of a job.
        state: the state of the page, as in its address: "flame.by=gpu".
        rule: the rule whose finding the timeline shows; empty shows the whole window.
        around: how much longer than the place of the finding the shown time is.
        show: selectors of elements; the picture is the smallest rectangle with the first element of each. Without
            any, it is the window.
        width: the width of the window, in pixels.
        height: the height of the picture at most.
        dark: whether to use the dark color scheme.
    """

    name: str
    trace: str
    state: str = ""
    rule: str = ""
    around: float = 3
    show: tuple[str, ...] = ()
    width: int = 960
    height: int = 420
    dark: bool = False


def timeline(name: str, trace: str, rule: str, around: float = 3) -> Picture:
    """Return a picture of the timeline where a rule has found something."""
    return Picture(name, trace, rule=rule, around=around, show=(".timeline-ruler", ".timeline-group"), height=300)


PICTURES = (
    Picture("page", "kineto_tb_resnet50_nw0_v100.json.gz", width=1000, height=700),
    timeline("input", "kineto_tb_resnet50_nw0_v100.json.gz", "input-wait", 3),
    timeline("launch-overhead", "tl_h100_bert_small.json.gz", "launch-overhead", 12),
    timeline("launch-latency", "tl_h100_qwen05b.json.gz", "launch-latency", 12),
    timeline("communication", "tl_mi300_resnet_actckpt.json.gz", "exposed-communication", 5),
    timeline("copies", "param_resnet_kineto.json.gz", "exposed-copies", 4),
    timeline("initialization", "hta_alexnet_cudasync.json.gz", "initialization", 2),
    Picture("flame", "tl_h100_bert_small.json.gz", "flame.by=gpu", show=(".flame-picture",)),
    Picture("roofline", "tl_h100_owlv2.json.gz", show=(".roofline svg",)),
    Picture("ranks", "param_dlrm_8rank_r*.json.gz", show=(".rank.head", ".rank:last-child")),
    Picture("memory", "memory/npu_expandable.pickle", show=("#memory .legend", ".flame-picture"), height=660),
)


def state_of(picture: Picture, diagnosis: Diagnosis) -> str:
    """Return the state of the page: the time around the place of the finding that the picture is of."""
    if not picture.rule:
        return picture.state
    found = next(found for found in diagnosis.findings if found.rule == picture.rule)
    assert diagnosis.facts is not None
    start, end = span_of(diagnosis.facts, found)
    margin = int((end - start) * (picture.around - 1) / 2)
    return f"t={start - margin},{end + margin}"


def address_of(picture: Picture, folder: Path) -> str:
    """Write the page of a picture into a folder; return its address, with the state to show."""
    page, path = folder / f"{picture.name}.html", TRACES / picture.trace
    if path.suffix == ".pickle":
        return f"{read_memory(path).to_html(page).as_uri()}#{picture.state}"
    diagnosis = diagnose(str(path))
    return f"{diagnosis.to_html(page).as_uri()}#{state_of(picture, diagnosis)}"


def screenshot(browser: Browser, picture: Picture, url: str) -> bytes:
    """Return a picture of the page at an address as PNG."""
    with chromium.new_context(browser, width=picture.width, height=picture.height, dark=picture.dark) as context:
        tab = context.new_page()
        tab.goto(url)
        tab.wait_for_selector("[data-ready]")
        tab.evaluate("document.fonts.ready")
        tab.evaluate(DRAWN)  # charts draw in the next frame
        boxes = [box for each in picture.show if (box := tab.locator(each).first.bounding_box())]
        if not boxes:
            return tab.screenshot(animations="disabled")
        return tab.screenshot(animations="disabled", full_page=True, clip=_around(boxes, picture.height))


def _around(boxes: list[FloatRect], height: int) -> FloatRect:
    left, top = min(box["x"] for box in boxes), min(box["y"] for box in boxes)
    right, bottom = (max(box[at] + box[size] for box in boxes) for at, size in (("x", "width"), ("y", "height")))
    return {"x": left, "y": top, "width": right - left, "height": min(bottom - top, height)}


def main() -> None:
    """Write every picture, and end with an error if one is too large for the documentation."""
    path = chromium.executable()
    if path is None:
        sys.exit("Chromium is not installed: run scripts/install-chromium.sh")
    if not TRACES.is_dir():
        sys.exit(f"no real traces in {TRACES}: run make traces")
    FOLDER.mkdir(exist_ok=True)
    too_large = []
    with chromium.started(path) as browser, tempfile.TemporaryDirectory() as folder:
        for picture in PICTURES:
            png = screenshot(browser, picture, address_of(picture, Path(folder)))
            (FOLDER / f"{picture.name}.png").write_bytes(png)
            print(f"{picture.name}.png: {len(png):,} bytes")
            if len(png) > MAX_BYTES:
                too_large.append(picture.name)
    if too_large:
        sys.exit(f"larger than {MAX_BYTES:,} bytes; show a smaller element or window: {', '.join(too_large)}")


if __name__ == "__main__":
    main()
