"""`OpenTabs`: the tabs that show a page, by what the page tells its server."""

from __future__ import annotations

import math
import time
from threading import Lock

_RELOAD_S = 5.0
_LOAD_S = 60.0


class OpenTabs:
    """The tabs that show a page.

    A tab says when it opens and when it closes. One that a browser puts to sleep says neither and stays open, like
    the tab of a laptop that sleeps; only Ctrl-C ends the server after a crash of the browser.

    Args:
        reload_s: how long the last tab may be away, in seconds, because a reload closes and opens it.
        load_s: how long a page may take to arrive and to open its tab, in seconds.
    """

    def __init__(self, reload_s: float = _RELOAD_S, load_s: float = _LOAD_S) -> None:
        self._reload_s, self._load_s = reload_s, load_s
        self._tabs = set[str]()
        self._end = math.inf  # until the first tab has closed
        self._loaded_by = -math.inf
        self._lock = Lock()

    def request(self) -> None:
        """Note that the page was requested: a tab will open."""
        with self._lock:
            self._loaded_by = time.monotonic() + self._load_s

    def open(self, tab: str) -> None:
        """Note that a tab has opened."""
        with self._lock:
            self._tabs.add(tab)
            self._loaded_by = -math.inf

    def close(self, tab: str) -> None:
        """Note that a tab has closed."""
        with self._lock:
            self._tabs.discard(tab)
            self._end = time.monotonic() + self._reload_s

    @property
    def all_closed(self) -> bool:
        """Whether there was a tab, the last has closed, and none has opened since."""
        with self._lock:
            return not self._tabs and time.monotonic() >= max(self._end, self._loaded_by)
