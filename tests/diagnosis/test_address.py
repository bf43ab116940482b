"""The address of a page keeps what is shown: opened anew, it shows the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from scripts import chromium

import instrument
from instrument.base.page_file import write_page
from instrument.explain.comparison.comparison import compare
from instrument.show.page.document import document
from tests.support.browser import OpenedPage, OpenPage

from .made_loops import GEMM, STEP, MadeLoop, nested_loop

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PICTURES = """[...document.querySelectorAll("canvas")]
    .filter((canvas) => canvas.checkVisibility())
    .map((canvas) => canvas.toDataURL())"""
OPEN = "document.querySelectorAll('details[open]').length"
MARKED = "document.querySelector('.timeline-status').textContent"


SETTLE_MS = 450  # state.js writes into the address no more often than every 400 ms
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of a loop with waits, many kernels, nested operators and a roofline."""
    loop = nested_loop()
    for number in range(30):
        loop.work(f"kernel_{number}", number * 10, number * 10 + 1, number * 10 + 3 + number * 7 % 8)
    loop.work("kernel_7", 400, 401, 402)
    loop.operator("aten::item", 900, 990).call("cudaStreamSynchronize", 901, 989)
    return instrument.diagnose(loop.trace()).to_html(tmp_path_factory.mktemp("page") / "page.html")


def opened(open_page: OpenPage, page: Path | str) -> OpenedPage:
    found = open_page(page)
    found.page.wait_for_selector("[data-ready]")
    return found


@pytest.fixture(scope="module")
def browsers(browser: Browser, path: Path) -> Iterator[list[OpenedPage]]:
    """Return the page in two contexts, which share nothing; many tests load it there anew."""
    with ExitStack() as contexts:
        yield [
            OpenedPage(
                contexts.enter_context(chromium.new_context(browser, width=1280, height=800, dark=False)), url
            )
            for url in 2 * [path.as_uri()]
        ]


def load(found: OpenedPage, url: str) -> None:
    """Load an address as if no page was there before."""
    found.page.goto("about:blank")
    found.page.mouse.move(0, 0)
    found.page.goto(url)
    found.page.wait_for_selector("[data-ready]")


def click(name: str, *more: str) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        for each in (name, *more):
            page.locator(each).first.click()

    return act


def fill(where: str, words: str) -> Callable[[Page], None]:
    return lambda page: page.locator(where).first.fill(words)


def press(where: str, *names: str) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        page.locator(where).first.focus()
        for name in names:
            page.keyboard.press(name)

    return act


ACTS = {
    "sort": (click("#kernels th:nth-child(3) button"), "kernels.sort=-Calls"),
    "sort upward": (click("#kernels th:first-child button"), "kernels.sort=Kernel"),
    "filter": (fill("#kernels input", "kernel_1"), "kernels.filter=kernel_1"),
    "all rows": (click("#kernels .data > button"), "kernels.all=1"),
    "table behind a picture": (click("text=What the GPU does in the step, as a table"), "overview.open=1"),
    "evidence": (click("article summary"), "finding-1.open=1"),
    "closed lanes": (click(".timeline-group summary"), "lanes-1.open=0"),
    "finding": (click("text=Show in the timeline"), "mark=finding-1"),
    "step": (click("text=The steps as a table", "#timeline tbody button"), "mark=step-0"),
    "zoom": (press(".timeline-ruler canvas", "w", "d"), "t="),
    "slice": (press(".timeline-ruler canvas", "."), "slice=0,"),
    "flame graph": (click("#flame [data-value=cpu]"), "flame.by=cpu"),
    "node": (click(".flame-node:has-text('aten::mm')"), "flame.node="),
    "search": (fill("#flame input", "mm"), "flame.search=mm"),
    "operator": (click("circle.dot"), "operator=1"),
    "theme": (press("body", "t"), "theme=dark"),
}  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
def test_address_keeps(path: Path, browsers: list[OpenedPage], act: str) -> None:
    """What a person does is in the address, which shows the same in another browser."""
    act_on, expected = ACTS[act]
    one, other = browsers
    load(one, path.as_uri())
    assert "#" not in one.page.url
    before = one.accessibility(), one.page.evaluate(OPEN), one.page.evaluate(PICTURES)
    act_on(one.page)
    one.page.wait_for_timeout(SETTLE_MS)
    one.page.evaluate("document.activeElement.blur()")
    shown = one.accessibility(), one.page.evaluate(OPEN), one.page.evaluate(PICTURES)
    assert expected in one.page.url.replace("%2C", ",")
    assert shown != before
    load(other, one.page.url)
    other.page.evaluate(DRAWN)
    assert (other.accessibility(), other.page.evaluate(OPEN), other.page.evaluate(PICTURES)) == shown
    assert (one.errors, other.errors, {*other.requests}) == ([], [], {path.as_uri()})


def test_usual_state_is_not_in_the_address(path: Path, open_page: OpenPage) -> None:
    """What is as it was at first leaves the address again."""
    page = opened(open_page, path).page
    for name in ("cpu", "gpu"):
        page.locator(f"#flame [data-value={name}]").click()
    for _ in range(2):
        page.get_by_text("What the GPU does in the step, as a table").click()
        page.keyboard.press("t")
        page.locator("circle.dot").first.click()
    for words in ("mm", ""):
        page.locator("#kernels input").fill(words)
    page.wait_for_timeout(SETTLE_MS)
    assert page.url.partition("#")[2] == ""


def test_back_and_forward(path: Path, open_page: OpenPage) -> None:
    """Another address of the page, and "back" from it, show what they say."""
    page = opened(open_page, path).page
    kernels, usual = page.locator("#kernels tbody tr"), page.evaluate(MARKED)
    page.evaluate("location.hash = 'kernels.filter=kernel_7&overview.open=1&mark=finding-1&theme=dark'")
    page.wait_for_function("[...document.querySelectorAll('#overview details')].at(-1).open")
    assert kernels.count() == 1 and page.locator("#kernels input").input_value() == "kernel_7"
    assert page.evaluate(MARKED).startswith("Marked: ")
    page.go_back()
    page.wait_for_function("![...document.querySelectorAll('#overview details')].at(-1).open")
    assert kernels.count() > 1 and page.evaluate(MARKED) == usual
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


HOSTILE = [
    "<img src=x onerror=alert(1)>", "__proto__", "constructor", "-1", "1e999,NaN", "-Infinity,5", "%", "%E0%A4",
    "javascript:alert(1)", "[[[]]]", '{"a":', "x" * 50_000, "\u202e", "0,99999999999999999999", "0.5", "",
]  # fmt: skip
KEYS = [
    "t", "mark", "slice", "flame.by", "flame.part", "flame.node", "flame.search", "operator", "order", "parts",
    "theme", "kernels.sort", "kernels.filter", "kernels.all", "overview.open", "lanes-1.open", "__proto__",
]  # fmt: skip


def test_hostile_addresses(path: Path, open_page: OpenPage) -> None:
    """An address that nobody's click made neither raises nor runs anything, at the start and later."""
    found = opened(open_page, path)
    for words in HOSTILE:
        found.page.evaluate("(hash) => { location.hash = hash; }", "&".join(f"{key}={words}" for key in KEYS))
    assert (found.errors, found.requests) == ([], [])
    for words in HOSTILE:
        hash_ = "&".join(f"{key}={words if '%' in words else quote(words)}" for key in KEYS)
        load(found, f"{path.as_uri()}#{hash_}")
        assert (found.errors, {*found.requests}) == ([], {path.as_uri()})
        assert found.page.locator("main img, main script").count() == 0


def test_order_of_ranks(tmp_path: Path, open_page: OpenPage) -> None:
    """The order of the ranks is kept, unless it is the usual one."""
    times = [{"rank": at, "step": 9, "compute": 5, "waited": at, "caused": 0, "last": 0} for at in range(3)]
    section = {"id": "ranks", "type": "ranks", "title": "Ranks", "notes": [], "each": "per step", "shown": 0}
    section |= {"compared": 9, "ranks": times}
    one = opened(open_page, write_page(tmp_path / "page.html", document("Ranks", "The ranks.", [section])))
    one.page.get_by_label("Order").select_option("waited")
    other = opened(open_page, one.page.url)
    assert other.page.locator(".rank:not(.head)").first.text_content().startswith("rank 2")
    other.page.get_by_label("Order").select_option("rank")
    other.page.wait_for_timeout(SETTLE_MS)
    assert "#" not in other.page.url


def test_parts_of_a_comparison(tmp_path: Path, open_page: OpenPage) -> None:
    """The parts of a comparison, by region, are kept."""
    slow, fast = MadeLoop(busy=False), MadeLoop(busy=False)
    for start in range(0, 3 * STEP, STEP):
        for loop, took in ((slow, 700), (fast, 400)):
            loop.region("forward", start, start + 300)
            loop.operator("aten::mm", start, start + 100)
            loop.work(GEMM, start + 10, start + 20, start + 20 + took)
    one = opened(open_page, compare(slow.trace(), fast.trace()).to_html(tmp_path / "page.html"))
    one.page.get_by_role("button", name="By region").click()
    other = opened(open_page, one.page.url)
    assert "order=region" in one.page.url
    assert other.page.locator(".waterfall").inner_text() == one.page.locator(".waterfall").inner_text()
    other.page.get_by_role("button", name="By kind").click()
    other.page.wait_for_timeout(SETTLE_MS)
    assert "#" not in other.page.url
