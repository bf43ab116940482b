"""The cost of the page of a diagnosis: to make it, to open it, and to zoom in it: ``make bench``.

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

from instrument.diagnosis.diagnose import diagnose
from traces import costs

FEW = min(ROUNDS, 3)
ONE, MANY = 1, 8  # tiles: 0.13 and 1.06 million events
ZOOMS = 40

# The times, in ms, from a key that zooms to the end of the frame that shows it.
ZOOM = """async (zooms) => {
  const times = [];
  for (let zoom = 0; zoom < zooms; zoom += 1) {
    await new Promise((done) => requestAnimationFrame(done));
    const start = performance.now();
    dispatchEvent(new KeyboardEvent("keydown", { key: zoom % 20 < 12 ? "w" : "s", bubbles: true }));
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


def opened(file: TraceFile, folder: Path) -> None:
    """Measure opening the page and zooming in its timeline."""
    path = chromium.executable()
    if path is None:
        print("  no browser: scripts/install-chromium.sh installs one")
        return
    page = diagnose(file.path).to_html(folder / "page.html")
    print(f"\nIn the browser: the page of {file}")
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
                zooms += tab.evaluate(ZOOM, ZOOMS)
    verdict("first paint", statistics.median(paints) / 1e3, 1, "s")
    verdict("all is drawn", statistics.median(ready) / 1e3, 2, "s")
    verdict("a zoom, with the wait for a frame", statistics.median(zooms), 50, "ms")
    print(f"  the longest of {len(zooms)} zooms: {max(zooms):.0f} ms")


def main() -> None:
    """Measure, and print whether the promises hold."""
    with tempfile.TemporaryDirectory(prefix="instrument-page-") as folder:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # keeps its memory to itself
            files = pool.submit(build, Path(folder), (ONE, MANY), 1).result()
        print(f"first file: {files.origin}")
        made(files.first, 1.5, 1.3)
        made(files.tiled[MANY], 1.5, 1.3)
        opened(files.tiled[MANY], Path(folder))


if __name__ == "__main__":
    main()
