"""A server ends after the last tab, but not because of a reload or a tab that sleeps."""

from __future__ import annotations

import pytest

from instrument.show.page import server
from instrument.show.page.server import OpenTabs


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(server, "time", clock)
    return clock


def after(clock: Clock, seconds: float, tabs: OpenTabs) -> bool:
    """Return whether all tabs are closed after this time."""
    clock.now += seconds
    return tabs.all_closed


def test_no_tab_yet(clock: Clock) -> None:
    """Without a tab, the server waits for one."""
    assert not after(clock, 1e6, OpenTabs())


def test_the_last_tab(clock: Clock) -> None:
    """Some seconds after the last of two tabs has closed, all are closed."""
    tabs = OpenTabs(reload_s=5)
    tabs.open("a")
    tabs.open("b")
    tabs.close("a")
    assert not after(clock, 1e6, tabs)
    tabs.close("b")
    assert not after(clock, 4.9, tabs)
    assert after(clock, 0.2, tabs)


def test_a_reload(clock: Clock) -> None:
    """A page that closes and opens stays open, also if its closing arrives after the request of the new page."""
    tabs = OpenTabs(reload_s=5, load_s=60)
    tabs.open("a")
    tabs.request()
    tabs.close("a")
    assert not after(clock, 50, tabs)
    tabs.open("b")
    assert not after(clock, 1e6, tabs)
    tabs.close("b")
    assert after(clock, 5.1, tabs)


def test_a_page_that_never_opens(clock: Clock) -> None:
    """A page that was requested and never shown keeps the server for a while only."""
    tabs = OpenTabs(reload_s=5, load_s=60)
    tabs.open("a")
    tabs.close("a")
    tabs.request()
    assert not after(clock, 59, tabs)
    assert after(clock, 2, tabs)


def test_a_tab_that_sleeps(clock: Clock) -> None:
    """A tab that says nothing for days is open, and one that returns from the cache of its browser opens again."""
    tabs = OpenTabs(reload_s=5)
    tabs.open("a")
    assert not after(clock, 1e6, tabs)
    tabs.close("a")
    clock.now += 3
    tabs.open("a")
    assert not after(clock, 1e6, tabs)
