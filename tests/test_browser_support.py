"""tests/support/browser.py reports what a page in a real Chromium does."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from scripts import chromium

from tests.support.browser import OpenPage, executable
from tests.support.programs import shell_script

POLICY = "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\">"
PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
ASKS = """
<script>
  addEventListener("message", event => document.body.append(event.data));
  const tab = open("other.html");
  const timer = setInterval(() => tab.postMessage("PING", "*"), 20);
  addEventListener("message", () => clearInterval(timer));
</script>
"""
ANSWERS = """
<script>
  addEventListener("message", event => event.source.postMessage("PONG", event.origin));
  console.error("in the other tab");
</script>
"""


@pytest.fixture
def page(tmp_path: Path) -> Callable[[str], Path]:
    """Write a page with the given body and return its file."""

    def write(body: str, name: str = "page.html") -> Path:
        path = tmp_path / name
        path.write_text(f"<!doctype html><title>A page</title>{body}", encoding="utf-8")
        return path

    return write


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """Serve the test's folder on 127.0.0.1 and return its URL."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path))) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_clean_page(page: Callable[..., Path], open_page: OpenPage) -> None:
    """A page that reports and requests nothing has neither errors nor requests, with a fragment in its URL too."""
    path = page("<style>p { color: red }</style><p>text</p><script>console.log(1)</script>")
    for place in (path, f"{path.as_uri()}#state"):
        opened = open_page(place)
        assert (opened.errors, opened.requests) == ([], [])


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("console.error('wrong')", "error: wrong"),
        ("console.warn('odd')", "warning: odd"),
        ("throw new Error('thrown')", "uncaught: thrown"),
        ("Promise.reject(new Error('rejected'))", "uncaught: rejected"),
        ("setTimeout(() => { throw new Error('later') })", "uncaught: later"),
    ],
)
def test_errors(script: str, error: str, page: Callable[..., Path], open_page: OpenPage) -> None:
    """Errors and warnings in the console, exceptions and rejected promises are errors."""
    assert open_page(page(f"<script>{script}</script>")).errors == [error]


def test_later_error(page: Callable[..., Path], open_page: OpenPage) -> None:
    """An error after a click is there when the test asks next."""
    opened = open_page(page("<button onclick='missing()'>Go</button>"))
    assert opened.errors == []
    opened.page.get_by_role("button", name="Go").click()
    assert opened.errors == ["uncaught: missing is not defined"]


@pytest.mark.parametrize("url", ["http://elsewhere.example/a.png", "http://192.0.2.1/a.png", PIXEL])
def test_requests(url: str, page: Callable[..., Path], open_page: OpenPage) -> None:
    """An image from elsewhere is a request, and so is one in a data: URL; another machine is not reached."""
    opened = open_page(page(f"<img src='{url}'>"))
    assert opened.requests == [url]
    failed = ["error: Failed to load resource: net::ERR_NAME_NOT_RESOLVED"]
    assert opened.errors == ([] if url == PIXEL else failed)


def test_blob_and_web_socket(page: Callable[..., Path], open_page: OpenPage) -> None:
    """A blob: URL and a web socket are requests."""
    opened = open_page(page("<script>new Image().src = URL.createObjectURL(new Blob([]))</script>"))
    assert [url.partition(":")[0] for url in opened.requests] == ["blob"]
    opened = open_page(page("<script>new WebSocket('ws://elsewhere.example')</script>"))
    assert opened.requests == ["ws://elsewhere.example/"]


def test_content_security_policy(page: Callable[..., Path], open_page: OpenPage) -> None:
    """What the page's policy blocks is an error, and does not run."""
    opened = open_page(page(f"{POLICY}<script>document.title = 'run'</script>"))
    (error,) = opened.errors
    assert "violates the following Content Security Policy directive" in error
    assert opened.page.title() == "A page"


@pytest.mark.parametrize("dark", [False, True])
def test_dark_mode_and_size(dark: bool, page: Callable[..., Path], open_page: OpenPage) -> None:
    """A page is shown in the color scheme and the size that the test names."""
    opened = open_page(page("<p>text</p>"), width=360, height=640, dark=dark)
    assert opened.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == dark
    assert opened.page.evaluate("[innerWidth, innerHeight, devicePixelRatio]") == [360, 640, 1]


def test_accessibility(page: Callable[..., Path], open_page: OpenPage) -> None:
    """The tree has roles, names, values, descriptions and states, but nothing that screen readers leave out."""
    opened = open_page(
        page(
            "<main><h2>Time</h2><button aria-expanded='false'><b>Sort</b></button><p>3 <b>ms</b></p>"
            "<p aria-hidden='true'>hidden</p><div><span>idle</span></div>"
            "<input type='range' aria-label='zoom' value='3'>"
            "<svg role='img' aria-label='chart' aria-description='40% idle'></svg></main>"
        )
    )
    assert opened.accessibility().splitlines() == [
        'RootWebArea "A page"',
        '  main ""',
        '    heading "Time" level=2',
        '    button "Sort" expanded=false',
        '    paragraph ""',
        '      StaticText "3 "',
        '      StaticText "ms"',
        '    StaticText "idle"',
        '    slider "zoom" value="3"',
        '    image "chart" description="40% idle"',
    ]


def test_two_tabs(page: Callable[..., Path], open_page: OpenPage, served: str) -> None:
    """Two tabs exchange a message; what the second one reports and requests is known too."""
    page(ASKS, "asks.html")
    page(ANSWERS, "other.html")
    opened = open_page(f"{served}/asks.html")
    opened.page.get_by_text("PONG").wait_for()
    assert opened.requests == [f"{served}/other.html"]
    assert opened.errors == ["error: in the other tab"]


def test_a_page_has_its_own_storage(page: Callable[..., Path], open_page: OpenPage) -> None:
    """What a page stores is not there when it is opened again."""
    script = "document.title = localStorage.length; localStorage.setItem('key', 'value')"
    path = page(f"<script>{script}</script>")
    assert [open_page(path).page.title() for _ in range(2)] == ["0", "0"]


def test_fonts(page: Callable[..., Path], open_page: OpenPage) -> None:
    """Text is as wide on every machine that has the DejaVu fonts."""
    families = {"system-ui": "DejaVu Sans", "sans-serif": "DejaVu Sans", "monospace": "DejaVu Sans Mono"}
    spans = (f"<span style='font: 16px {name}'>width of text</span><br>" for name in sum(families.items(), ()))
    opened = open_page(page("".join(spans)))
    widths = opened.page.evaluate("[...document.querySelectorAll('span')].map(each => each.offsetWidth)")
    assert widths[::2] == widths[1::2]


def test_skips_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a browser, the test skips and says what to run."""
    pytest.importorskip("playwright")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(pytest.skip.Exception, match=r"run scripts/install-chromium\.sh"):
        executable()


@pytest.mark.parametrize("script", ["echo Chromium 130.0 snap", "echo install the snap >&2; exit 1"])
def test_a_snap_is_no_browser(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ubuntu's command that starts a snap does not count, with or without the snap; the next name on PATH does."""
    shell_script(tmp_path / "chromium-browser", script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(chromium, "NAMES", ("chromium-browser", "google-chrome"))
    assert chromium.executable() is None
    chrome = shell_script(tmp_path / "google-chrome", "echo Google Chrome 130.0")
    assert chromium.executable() == str(chrome)
