"""A served page drives Perfetto in a real browser; a page that takes the same messages stands in for Perfetto."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from instrument.base.printable import shown_name
from instrument.show.page.document import document
from instrument.show.page.server import OpenTabs, PageServer
from tests.support.browser import OpenedPage, OpenPage

from .hostile import HOSTILE
from .serving import end, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

DATA = Path(__file__).parents[1] / "data"
START_NS = 1_712_195_495_000_000_000
FINDINGS = {
    "id": "findings", "type": "findings", "title": "Findings", "nothing": "", "abstained": [],
    "findings": [
        {"title": title, "rule": "r", "meaning": "", "severity": "high", "confidence": "high", "worth": True,
         "win_ns": 1, "replayed_ns": None, "win_text": "", "place": "", "evidence": [], "fix": None, "span": span}
        for title, span in (("first", [1_000_000, 3_000_000]), ("second", [5_000_000, 6_000_000]))
    ],
}  # fmt: skip


class Served:
    """A page while its server runs."""

    def __init__(self, opened: OpenedPage, server: PageServer, thread: Thread) -> None:
        self.opened, self.page, self.server, self.thread = opened, opened.page, server, thread

    def open_perfetto(self, button: str = "Open in Perfetto", at: int = 0) -> Page:
        """Click a button, and return the tab of Perfetto."""
        with self.page.expect_popup() as popup:
            self.page.get_by_role("button", name=button).nth(at).click()
        return popup.value

    def show(self, at: int) -> None:
        self.page.get_by_role("button", name="Show in Perfetto").nth(at).click()

    def notice(self, text: str) -> None:
        """Wait until the page says ``text``."""
        self.page.locator(".notice", has_text=text).wait_for()

    def wait_for_end(self) -> None:
        self.thread.join(30)
        assert not self.thread.is_alive()


class Serve(Protocol):
    """The type of the fixture `serve`."""

    def __call__(
        self, options: str = "", *, at: str = "", script: str = "", name: str = "t.json.gz", width: int = 1280,
        beside: Served | None = None,
    ) -> Served: ...  # fmt: skip


@pytest.fixture(scope="module")
def perfetto() -> Iterator[str]:
    """Serve the page that stands for Perfetto, and return its host and port."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(DATA))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.json.gz"
    path.write_bytes(b"\x1f\x8b" + bytes(range(256)) * 20_000)
    return path


@pytest.fixture
def serve(perfetto: str, trace: Path, open_page: OpenPage) -> Iterator[Serve]:
    """A function that serves a page and opens it.

    Its arguments are options of the page that stands for Perfetto, or another address; a script that runs in the
    page; the name of the file; the width of the window; and a page whose context it shares, which is cheaper.
    """
    with ExitStack() as servers:

        def serve(
            options: str = "", *, at: str = "", script: str = "", name: str = "t.json.gz", width: int = 1280,
            beside: Served | None = None,
        ) -> Served:  # fmt: skip
            server = servers.enter_context(PageServer(tabs=OpenTabs(reload_s=1)))
            addresses = {
                "trace": server.file_path, "alive": server.alive_path, "name": shown_name(name),
                "start_ns": START_NS, "perfetto": at or f"http://{perfetto}/perfetto.html{options}",
            }  # fmt: skip
            text = document(shown_name(name), "The lead.", [FINDINGS], serve=addresses)
            thread = servers.enter_context(serving(server, text, trace))
            opened = OpenedPage(beside.page.context, server.url) if beside else open_page(server.url, width=width)
            opened.page.wait_for_selector("[data-ready]")
            if script:
                opened.page.evaluate(script)
            return Served(opened, server, thread)

        yield serve


def seen(tab: Page, what: str, count: int = 1) -> Any:
    """Wait until Perfetto has seen so many of something, and return all of what it has seen."""
    tab.wait_for_function(f"seen.{what}.length >= {count}")
    return tab.evaluate("seen")


def in_seconds(start_ns: int, end_ns: int) -> tuple[float, float]:
    return pytest.approx((START_NS + start_ns) / 1e9, abs=1e-6), pytest.approx((START_NS + end_ns) / 1e9, abs=1e-6)


def test_the_trace_arrives(serve: Serve, trace: Path) -> None:
    """Once Perfetto listens, it gets the bytes of the file with its name, from 127.0.0.1, and nothing unknown."""
    served = serve("?ready=400&load=300")
    tab = served.open_perfetto()
    content = trace.read_bytes()
    expected = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(),
                "title": "t.json.gz", "fileName": "t.json.gz"}  # fmt: skip
    got = seen(tab, "traces")
    assert got["traces"] == [expected]
    assert (got["ranges"], got["unknown"], got["address"]) == ([], [], "")
    assert got["origin"] == served.server.url.rpartition("/")[0].rpartition("/")[0]
    served.page.wait_for_function("document.querySelector('.notice').textContent === ''")
    assert served.opened.errors == []


def test_findings_scroll_the_tab(serve: Serve) -> None:
    """The first finding opens Perfetto at its place; the next scrolls the same tab, which gets no second trace."""
    served = serve("?ready=100&load=500")
    tab = served.open_perfetto("Show in Perfetto")
    got = seen(tab, "ranges")
    assert got["address"] == f"#!/?visStart={START_NS + 1_000_000}&visEnd={START_NS + 3_000_000}"
    assert [*in_seconds(1_000_000, 3_000_000)] == [got["ranges"][0][name] for name in ("timeStart", "timeEnd")]
    assert 0 < got["ranges"][0]["viewPercentage"] <= 1
    served.show(1)
    got = seen(tab, "ranges", 2)
    assert [*in_seconds(5_000_000, 6_000_000)] == [got["ranges"][1][name] for name in ("timeStart", "timeEnd")]
    assert (len(got["traces"]), len(served.page.context.pages)) == (1, 2)
    served.page.keyboard.press("p")
    assert (len(got["traces"]), len(served.page.context.pages)) == (1, 2)
    assert served.opened.errors == []


def test_the_last_finding_counts(serve: Serve) -> None:
    """Of findings clicked while Perfetto starts, it shows the last, in one tab."""
    served = serve("?ready=600")
    tab = served.open_perfetto("Show in Perfetto")
    served.show(1)
    got = seen(tab, "ranges")
    assert [*in_seconds(5_000_000, 6_000_000)] == [got["ranges"][0][name] for name in ("timeStart", "timeEnd")]
    assert len(served.page.context.pages) == 2


def test_a_closed_tab_is_opened_again(serve: Serve) -> None:
    """After the tab of Perfetto is closed, the next finding opens a new one with the trace."""
    served = serve()
    first = served.open_perfetto()
    seen(first, "traces")
    first.close()
    second = served.open_perfetto("Show in Perfetto", 1)
    assert len(seen(second, "ranges")["traces"]) == 1


def test_closed_while_it_starts(serve: Serve) -> None:
    """If the tab is closed before it has the trace, the page says so, and the next click opens a new one."""
    served = serve("?silent")
    served.open_perfetto().close()
    served.notice("The tab of Perfetto was closed before it had the trace. Click again to open it.")
    served.open_perfetto()
    served.notice("Waiting for 127.0.0.1")


def test_blocked(serve: Serve) -> None:
    """If the browser blocks the tab, the page says what to allow, and goes on."""
    served = serve(script="window.open = () => null")
    served.show(0)
    served.notice(f"Allow pop-ups for 127.0.0.1:{served.server.port}, then click again.")
    served.page.get_by_role("button", name="Close").click()
    assert served.page.locator(".notice").text_content() == ""
    served.page.get_by_role("button", name="Light or dark").click()
    assert served.page.url.endswith("#theme=dark")
    assert served.opened.errors == []


@pytest.mark.parametrize("other", ["?silent", "?elsewhere={}/perfetto.html"])
def test_no_answer(serve: Serve, perfetto: str, other: str) -> None:
    """A tab that does not answer, or answers from another origin, gets nothing; the page says what to do."""
    served = serve(other.format(perfetto.replace("127.0.0.1", "localhost")))
    served.page.clock.install()
    tab = served.open_perfetto("Show in Perfetto")
    served.page.clock.fast_forward(14_000)
    served.notice("Waiting for 127.0.0.1")
    if "elsewhere" in other:
        tab.wait_for_url("http://localhost*/**")
        served.page.clock.run_for(500)
        tab.wait_for_function("seen.pings > 0")
    served.page.clock.fast_forward(2_000)
    served.notice(f"{perfetto} did not answer within 15 s. Check that this browser reaches http://{perfetto}/")
    assert tab.evaluate("seen.traces") == []
    served.open_perfetto()
    assert tab.is_closed()


def test_nothing_listens(serve: Serve) -> None:
    """If nothing is at the address of Perfetto, everything else works."""
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as unused:
        port = unused.server_port
    served = serve(at=f"http://127.0.0.1:{port}")
    served.page.clock.install()
    served.open_perfetto()
    served.page.clock.fast_forward(16_000)
    served.notice("did not answer within 15 s")
    served.page.get_by_role("button", name="Light or dark").click()
    assert served.page.url.endswith("#theme=dark")


def test_without_the_file_or_the_server(serve: Serve, trace: Path) -> None:
    """If the file is gone, or the command has ended, the page says so."""
    served = serve()
    trace.unlink()
    served.open_perfetto()
    served.notice("t.json.gz can no longer be read.")
    end(served.server, served.thread)
    served.server.server_close()
    served.open_perfetto("Show in Perfetto")
    served.notice("the command that served this page has ended. Start it again.")


def test_closing_the_last_tab_ends_the_server(serve: Serve) -> None:
    """Neither a reload nor closing one of two tabs ends the server; closing the last does."""
    served = serve()
    second = served.page.context.new_page()
    second.goto(served.server.url)
    second.wait_for_selector("[data-ready]")
    for _ in range(2):
        served.page.reload()
        served.page.wait_for_selector("[data-ready]")
    served.page.close()
    second.goto("about:blank")
    second.go_back()
    second.wait_for_selector("[data-ready]")
    served.thread.join(1.5)
    assert served.thread.is_alive()
    second.close()
    served.wait_for_end()


def test_requests(serve: Serve) -> None:
    """The page requests its own addresses alone, and those of Perfetto not before a click."""
    served = serve()
    assert served.opened.errors == []
    root = f"http://127.0.0.1:{served.server.port}"
    assert {url.partition("?")[0] for url in served.opened.requests} <= {f"{root}{served.server.alive_path}"}


@pytest.mark.parametrize("width", [360, 1280, 3840])
def test_the_words_fit(serve: Serve, width: int) -> None:
    """The button, its explanation and the notices are inside the window; a screen reader reads them."""
    served = serve(width=width, script="window.open = () => null")
    served.show(0)
    served.notice("Allow pop-ups")
    box = served.page.locator(".notice").bounding_box()
    assert box is not None
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    assert served.page.evaluate("document.documentElement.scrollWidth") == width
    tree = served.opened.accessibility()
    assert 'button "Open in Perfetto"' in tree and "Allow pop-ups" in tree


def test_hostile_names(serve: Serve) -> None:
    """The name of a file is text, in the page, its notices and what Perfetto gets."""
    served = None
    for name in HOSTILE[:6] + HOSTILE[14:20]:
        served = serve(name=name, beside=served)
        tab = served.open_perfetto()
        assert seen(tab, "traces")["traces"][0]["title"] == shown_name(name)
        assert served.page.title().strip() == " ".join(shown_name(name).split())
        assert served.opened.errors == []


def test_a_file_on_disk_has_no_perfetto(tmp_path: Path, open_page: OpenPage) -> None:
    """A page that is not served has no button for Perfetto and tells no server anything."""
    path = tmp_path / "page.html"
    path.write_text(document("A page", "The lead.", [FINDINGS]))
    opened = open_page(path)
    opened.page.wait_for_selector("[data-ready]")
    assert "Perfetto" not in opened.accessibility()
    assert "connect-src 'none'" in unescape(path.read_text())
    assert (opened.errors, opened.requests) == ([], [])
