"""Serves a page from a thread of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from instrument.show.page.server import OpenTabs, PageServer

POLL_S = 0.02  # how long a server waits for a request before it looks whether the last tab is closed


@contextmanager
def serving(server: PageServer, page: str, file: Path | None = None) -> Iterator[Thread]:
    """Serve a page in a thread, and end it as the last tab would, if it still runs."""
    server.timeout = POLL_S
    thread = Thread(target=server.serve, args=(page, file))
    thread.start()
    try:
        yield thread
    finally:
        end(server, thread)


def end(server: PageServer, thread: Thread) -> None:
    """Close all tabs, and wait until the server has ended."""
    server.tabs = OpenTabs(reload_s=0)
    server.tabs.open("a")
    server.tabs.close("a")
    thread.join(30)
    assert not thread.is_alive()
