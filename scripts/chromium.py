"""Starts the Chromium of this machine for tests and pictures: no window, no network, the same fonts everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

NAMES = ("chromium", "chromium-browser", "google-chrome")  # as in scripts/install-chromium.sh
FONTS = Path(__file__).with_name("fonts.conf")
ARGUMENTS = (
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",  # no other machine is reached
    "--disable-lcd-text",
    "--font-render-hinting=none",
)


def executable() -> str | None:
    """Return the path of a Chromium or Chrome on PATH, or None; a snap cannot read files of tests."""
    for path in filter(None, map(shutil.which, NAMES)):
        version = subprocess.run([path, "--version"], capture_output=True, text=True)
        if version.returncode == 0 and "snap" not in version.stdout:
            return path
    return None


@contextmanager
def started(path: str) -> Iterator[Browser]:
    """Start the browser ``path`` and end it with the block; until then, ``asyncio.run`` raises in this thread."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        env = {**os.environ, "FONTCONFIG_FILE": str(FONTS)}
        with playwright.chromium.launch(executable_path=path, args=[*ARGUMENTS], env=env) as browser:
            yield browser


def new_context(browser: Browser, *, width: int, height: int, dark: bool) -> BrowserContext:
    """Return a new context, which shares no storage with others.

    Args:
        browser: the running browser.
        width: the width of its pages, in CSS pixels, each of which is one pixel of a screenshot.
        height: their height.
        dark: whether pages are shown in the dark color scheme.
    """
    return browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
        locale="en-US",
        timezone_id="UTC",
    )
