"""Writes the pictures of the documentation: ``python -m scripts.pictures``, or ``make pictures``.

A picture is a screenshot of a page or of one of its elements. It has the same bytes each time, as long as the
versions of Chromium and of the fonts are the same.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
MAX_BYTES = 120_000


@dataclass(frozen=True)
class Picture:
    """A screenshot to make.

    Attributes:
        name: the file name below docs/pictures.
        page: the page: a file, relative to the repository, or a URL of 127.0.0.1.
        selector: the CSS selector of the element to show; None shows the page as the window does.
        width: the width of the window, in pixels.
        height: its height.
        dark: whether to use the dark color scheme.
    """

    name: str
    page: str
    selector: str | None = None
    width: int = 1280
    height: int = 800
    dark: bool = False


PICTURES = (Picture("sample.png", "tests/data/page.html", selector="main", width=640, height=400),)


def screenshot(browser: Browser, picture: Picture) -> bytes:
    """Return a picture as PNG."""
    url = picture.page if "://" in picture.page else (ROOT / picture.page).as_uri()
    size = {"width": picture.width, "height": picture.height}
    with chromium.new_context(browser, **size, dark=picture.dark) as context:
        page = context.new_page()
        page.goto(url)
        page.evaluate("document.fonts.ready")
        shown = page if picture.selector is None else page.locator(picture.selector)
        return shown.screenshot(animations="disabled")


def main() -> None:
    """Write every picture, and end with an error if one is too large for the documentation."""
    path = chromium.executable()
    if path is None:
        sys.exit("Chromium is not installed: run scripts/install-chromium.sh")
    FOLDER.mkdir(exist_ok=True)
    too_large = []
    with chromium.started(path) as browser:
        for picture in PICTURES:
            png = screenshot(browser, picture)
            (FOLDER / picture.name).write_bytes(png)
            print(f"{picture.name}: {len(png):,} bytes")
            if len(png) > MAX_BYTES:
                too_large.append(picture.name)
    if too_large:
        sys.exit(f"larger than {MAX_BYTES:,} bytes; show a smaller element or window: {', '.join(too_large)}")


if __name__ == "__main__":
    main()
