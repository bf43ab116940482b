"""scripts/pictures.py: the pictures of the documentation are the same each time, small, and all listed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.pictures import FOLDER, MAX_BYTES, PICTURES, Picture, screenshot, state_of

import instrument
from tests.support.shared_traces import shared

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SAMPLE = Path(__file__).parent / "data" / "gpu_two_steps.json"
PICTURE = Picture("page", "", width=640, height=400)


def size(png: bytes) -> tuple[int, int]:
    """Return the width and the height of a PNG, in pixels."""
    assert png.startswith(b"\x89PNG")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_listed_pictures_exist() -> None:
    """The folder has the listed pictures and no others, and each is small."""
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sorted(sizes) == sorted(f"{picture.name}.png" for picture in PICTURES)
    assert max(sizes.values()) <= MAX_BYTES


def test_same_bytes_each_time(browser: Browser, tmp_path: Path) -> None:
    """A picture has the same bytes each time, of the window or of the elements that it names."""
    url = instrument.diagnose(SAMPLE).to_html(tmp_path / "page.html").as_uri()
    first = screenshot(browser, PICTURE, url)
    assert size(first) == (640, 400)
    assert screenshot(browser, PICTURE, url) == first
    assert screenshot(browser, replace(PICTURE, dark=True), url) != first
    width, height = size(screenshot(browser, replace(PICTURE, show=(".bar", ".legend")), url))
    assert width > 500
    assert 50 < height < 200


def test_state_leads_to_the_finding() -> None:
    """The picture of a rule shows the time at which its finding shows."""
    picture = next(picture for picture in PICTURES if picture.name == "input")
    state = state_of(picture, instrument.diagnose(shared(picture.trace)))
    start, end = map(int, state.removeprefix("t=").split(","))
    assert 0 < end - start < 1_000_000_000
