"""Opens pages in a real Chromium: what they report, what they request, and their accessibility tree as text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from scripts import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, CDPSession, ConsoleMessage, Page

STATES = ("checked", "disabled", "expanded", "level", "pressed", "selected", "sort")


class OpenPage(Protocol):
    """The type of the fixture `open_page`."""

    def __call__(
        self, page: Path | str, *, width: int = 1280, height: int = 800, dark: bool = False
    ) -> OpenedPage: ...


class OpenedPage:
    """A page in a context of its own, and the tabs that it opens.

    Attributes:
        page: Playwright's page: clicks, keys, locators, screenshots, PDF.
    """

    def __init__(self, context: BrowserContext, url: str) -> None:
        """Open `url` and wait until it is loaded."""
        self._errors: list[str] = []
        self._requests: list[str] = []
        context.set_default_timeout(10_000)
        context.on("console", self._add_message)
        context.on("weberror", lambda error: self._errors.append(f"uncaught: {error.error}"))
        context.on("request", lambda request: self._requests.append(request.url))
        self.page: Page = context.new_page()
        self._session: CDPSession = context.new_cdp_session(self.page)
        self._session.on("Network.requestWillBeSent", self._add_data_url)
        self._session.on("Network.webSocketCreated", lambda event: self._requests.append(event["url"]))
        self._session.send("Network.enable")
        self.page.goto(url)
        self._requests.remove(url.partition("#")[0])

    @property
    def errors(self) -> list[str]:
        """Errors and warnings of the console so far, the content security policy's among them, and exceptions."""
        self._settle()
        return self._errors

    @property
    def requests(self) -> list[str]:
        """Every URL that was requested so far, also `data:` and `blob:`, but for the page itself.

        The tabs that the page opens are included, but for their `data:` URLs and web sockets.
        """
        self._settle()
        return self._requests

    def accessibility(self) -> str:
        """Return the tree that a screen reader gets from Chromium: a line for each node, indented."""
        nodes = {node["nodeId"]: node for node in self._session.send("Accessibility.getFullAXTree")["nodes"]}
        lines: list[str] = []

        def add(node: dict[str, Any], depth: int, parent_name: str) -> None:
            name = _value(node, "name")
            text = node["role"]["value"] == "StaticText"
            hidden = node["ignored"] or (not name.strip() if text else node["role"]["value"] == "generic")
            if not hidden and not (text and name == parent_name):
                lines.append("  " * depth + _line(node))
            for child in () if text else node.get("childIds", ()):
                add(nodes[child], depth + (not hidden), parent_name if hidden else name)

        add(next(iter(nodes.values())), 0, "")
        return "\n".join(lines)

    def _add_message(self, message: ConsoleMessage) -> None:
        # A browser asks for this icon by itself, at any moment.
        if message.type in ("error", "warning") and not message.location["url"].endswith("/favicon.ico"):
            self._errors.append(f"{message.type}: {message.text}")

    def _add_data_url(self, event: dict[str, Any]) -> None:
        """Add a URL that Playwright leaves out."""
        url = event["request"]["url"]
        if url.startswith("data:"):
            self._requests.append(url)

    def _settle(self) -> None:
        """Wait for what is under way in the page: an event is delivered during calls of Playwright alone."""
        if not self.page.is_closed():
            self.page.evaluate("() => new Promise(done => setTimeout(done))")


def in_notebook(open_page: OpenPage, folder: Path, framed: str | None) -> OpenedPage:
    """Open a page that holds what a notebook shows: a frame of less than 2 MB; wait until it is drawn."""
    assert framed is not None
    assert len(framed) < 2_000_000
    (folder / "notebook.html").write_text(f"<!doctype html><title>Notebook</title>{framed}")
    opened = open_page(folder / "notebook.html")
    opened.page.frame_locator("iframe").locator("[data-ready]").wait_for()
    return opened


def _line(node: dict[str, Any]) -> str:
    """Return a node as `role "name" value="..." description="..." state=...`."""
    properties = {each["name"]: each["value"].get("value") for each in node.get("properties", ())}
    value = _value(node, "value")
    parts = [node["role"]["value"], f'"{_value(node, "name")}"']
    parts += [f'value="{value}"'] if value else []
    parts += [f'description="{_value(node, "description")}"'] if _value(node, "description") else []
    parts += [f"{name}={properties[name]}".lower() for name in STATES if name in properties]
    return " ".join(parts)


def _value(node: dict[str, Any], key: str) -> str:
    return str(node.get(key, {}).get("value", ""))


def executable() -> str:
    """Return the path of a browser that can be driven, or skip the test."""
    pytest.importorskip("playwright", reason="Playwright is not installed: it is in the extra test")
    path = chromium.executable()
    if path is None:
        pytest.skip("Chromium is not installed: run scripts/install-chromium.sh")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The browser of a test file; skips the tests if there is none. Until it ends, `asyncio.run` raises."""
    with chromium.started(executable()) as started:
        yield started


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """A function that opens a file (a `Path`) or a URL (a `str`) in a context of its own, and returns the page.

    A context has its own storage and its own tabs. Only 127.0.0.1 and localhost are reached.
    """
    with ExitStack() as contexts:

        def open_page(page: Path | str, *, width: int = 1280, height: int = 800, dark: bool = False) -> OpenedPage:
            context = contexts.enter_context(chromium.new_context(browser, width=width, height=height, dark=dark))
            return OpenedPage(context, page.resolve().as_uri() if isinstance(page, Path) else page)

        yield open_page
