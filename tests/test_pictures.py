"""scripts/pictures.py: the pictures of the documentation are the same each time, small, and all listed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from scripts.pictures import FOLDER, MAX_BYTES, PICTURES, Picture, screenshot

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGE = Picture("page.png", "tests/data/page.html", width=640, height=400)


def size(png: bytes) -> tuple[int, int]:
    """Return the width and the height of a PNG, in pixels."""
    assert png.startswith(b"\x89PNG")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_listed_pictures_exist() -> None:
    """The folder has the listed pictures and no others, and each is small."""
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sorted(sizes) == sorted(picture.name for picture in PICTURES)
    assert max(sizes.values()) <= MAX_BYTES


def test_same_bytes_each_time(browser: Browser) -> None:
    """A picture of an animated page is of the end of its animations, and has the same bytes each time."""
    first = screenshot(browser, PAGE)
    assert size(first) == (640, 400)
    assert screenshot(browser, PAGE) == first
    assert screenshot(browser, replace(PAGE, dark=True)) != first


def test_element(browser: Browser) -> None:
    """A picture of an element has the size of that element."""
    assert size(screenshot(browser, replace(PAGE, selector="svg"))) == (600, 40)
