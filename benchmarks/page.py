"""The cost of pages, of a diagnosis and of memory snapshots: to make, to open, and to zoom in: ``make bench``.

What the page of a memory snapshot costs to make is in ``memory.py``.

Opening and zooming are measured in a real Chromium, which scripts/install-chromium.sh installs. ROUNDS=1 shortens
the benchmark.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the scripts start the browser

from measure import ROUNDS, verdict
from scripts import chromium
from trace_files import TraceFile, build

import memory
from instrument.explain.diagnosis.diagnose import diagnose
from instrument.read.memory.read import read_memory
from traces import costs

FEW = min(ROUNDS, 3)
ONE, MANY = 1, 8  # tiles: 0.13 and 1.06 million events
ZOOMS = 40
SNAPSHOTS = (3_000_000, 100_000_000)  # bytes

# The times, in ms, from a key that zooms to the end of the frame that shows it.
ZOOM = """async ([zooms, closer, back]) => {
  const times = [];
  for (let zoom = 0; zoom < zooms; zoom += 1) {
    await new Promise((done) => requestAnimationFrame(done));
    const start = performance.now();
    dispatchEvent(new KeyboardEvent("keydown", { key: zoom % 20 < 12 ? closer : back, bubbles: true }));
    await new Promise((done) => requestAnimationFrame(() => { setTimeout(done); }));
    times.push(performance.now() - start);
  }
  return times;
}"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def made(file: TraceFile, time: float, memory: float) -> None:
    """Measure making the page against the diagnosis alone."""
    print(f"\nMaking the page: {file}, medians of {FEW}")
    alone, page = costs([("diagnose", file.path), ("page", file.path)], FEW)
    print(f"  diagnose {alone}\n  page     {page}")
    verdict("time to the diagnosis", page.seconds / alone.seconds, time)
    verdict("peak memory to the diagnosis", page.peak / alone.peak, memory)


def page_of_snapshot(folder: Path, size: int) -> Path:
    """Write a memory snapshot of about ``size`` bytes and its page; return the page."""
    snapshot = folder / f"{size}.pickle"
    memory.write(snapshot, size)
    return read_memory(snapshot).to_html(folder / f"{size}.html")


def opened(what: str, page: Path, chart: str, closer: str, back: str) -> None:
    """Measure opening a page, and zooming in a chart by these two keys when it has the focus."""
    path = chromium.executable()
    if path is None:
        print("  no browser: scripts/install-chromium.sh installs one")
        return
    print(f"\nIn the browser: the page of {what}")
    verdict("size", page.stat().st_size / 1e6, 10, "MB")
    with chromium.started(path) as browser:
        paints, ready, zooms = [], [], []
        for _ in range(FEW):
            with chromium.new_context(browser, width=1920, height=1080, dark=False) as context:
                tab = context.new_page()
                tab.goto(page.as_uri())
                tab.wait_for_selector("[data-ready]")
                paints.append(tab.evaluate(PAINT))
                ready.append(tab.evaluate("performance.now()"))
                tab.focus(chart)
                zooms += tab.evaluate(ZOOM, [ZOOMS, closer, back])
    verdict("first paint", statistics.median(paints) / 1e3, 1, "s")
    verdict("all is drawn", statistics.median(ready) / 1e3, 2, "s")
    verdict("a zoom, with the wait for a frame", statistics.median(zooms), 50, "ms")
    print(f"  the longest of {len(zooms)} zooms: {max(zooms):.0f} ms")


def main() -> None:
    """Measure, and print whether the promises hold."""
    with tempfile.TemporaryDirectory(prefix="instrument-page-") as name:
        folder = Path(name)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # keeps its memory to itself
            files = pool.submit(build, folder, (ONE, MANY), 1).result()
            pages = {size: pool.submit(page_of_snapshot, folder, size).result() for size in SNAPSHOTS}
        print(f"first file: {files.origin}")
        made(files.first, 1.5, 1.3)
        made(files.tiled[MANY], 1.5, 1.3)
        page = diagnose(files.tiled[MANY].path).to_html(folder / "page.html")
        opened(str(files.tiled[MANY]), page, ".timeline canvas", "w", "s")
        for size, page in pages.items():
            opened(f"a memory snapshot of {size / 1e6:.0f} MB", page, ".memory canvas", "+", "-")


if __name__ == "__main__":
    main()
