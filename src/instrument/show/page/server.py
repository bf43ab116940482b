"""Serves one page, and one file that the page reads, to the browsers of this machine, until its tabs are closed.

The path holds a random token, so that only a reader who knows it gets an answer. The server listens on 127.0.0.1,
and refuses requests to another host name, by which a website could reach it through a browser (DNS rebinding).
Without CORS headers, no other site can read what it sends.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import sys
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from pathlib import Path
from socketserver import ThreadingTCPServer
from threading import Lock
from typing import Any, BinaryIO
from urllib.parse import parse_qs

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


_HOST = "127.0.0.1"
_HOSTS = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")  # any port: that of a tunnel may differ
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin-allow-popups",  # same-origin would cut the page off from its popups
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_POLL_S = 0.5
_STALLED_S = 60.0


class PageServer(ThreadingTCPServer):
    """Serves a page until the last tab that shows it is closed; a context manager, which frees the port.

    Args:
        port: the port of 127.0.0.1; 0 takes a free one.
        tabs: knows when the last tab is closed.

    Attributes:
        port: the port in use.
        url: the address of the page.
        page_path: the path of the page, which holds the token.
        file_path: the path of the file.
        alive_path: the path at which the page says that a tab has opened or closed.

    Raises:
        OSError: the port cannot be used.
    """

    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # elsewhere, two programs could then share the port
    timeout = _POLL_S

    def __init__(self, port: int = 0, tabs: OpenTabs | None = None) -> None:
        super().__init__((_HOST, port), _Handler)
        root = f"/{secrets.token_urlsafe()}/"
        self.tabs = tabs or OpenTabs()
        self.port = int(self.server_address[1])
        self.url = f"http://{_HOST}:{self.port}{root}"
        self.page_path, self.file_path, self.alive_path = root, f"{root}file", f"{root}alive"
        self.page = b""
        self.file: Path | None = None

    def serve(self, page: str, file: Path | None = None) -> None:
        """Serve until the last tab is closed.

        Args:
            page: the text of the page.
            file: the file that `file_path` sends, unchanged and in pieces; without it, that path gets a 404.
        """
        self.page, self.file = page.encode(), file
        while not self.tabs.all_closed:
            self.handle_request()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error of a request, but not that a browser closed the connection."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _STALLED_S
    server_version, sys_version = "instrument", ""

    def do_GET(self) -> None:
        """Send the page or the file."""
        if self._is_for(self.server.page_path):
            self.server.tabs.request()
            self._send("text/html; charset=utf-8", BytesIO(self.server.page))
        elif self.server.file is not None and self._is_for(self.server.file_path):
            try:
                file = self.server.file.open("rb")
            except OSError:
                self.send_error(HTTPStatus.GONE)
                return
            with file:
                self._send("application/octet-stream", file)
        else:
            self._refuse()

    def do_HEAD(self) -> None:
        """Send the headers alone."""
        self.do_GET()

    def do_POST(self) -> None:
        """Take a beacon of the page: ``?opened=TAB`` or ``?closed=TAB``."""
        if not self._is_for(self.server.alive_path):
            self._refuse()
            return
        beacon = parse_qs(self.path.partition("?")[2])
        for tab in beacon.get("opened", ()):
            self.server.tabs.open(tab)
        for tab in beacon.get("closed", ()):
            self.server.tabs.close(tab)
        self.send_response(HTTPStatus.NO_CONTENT)
        self.end_headers()

    def _is_for(self, path: str) -> bool:
        """Return whether the request is for this host and path, in a time that does not depend on the token."""
        requested = self.path.partition("?")[0].encode()
        return self._host_is_known and secrets.compare_digest(requested, path.encode())

    @property
    def _host_is_known(self) -> bool:
        return _HOSTS.fullmatch(self.headers.get("Host", "")) is not None

    def _refuse(self) -> None:
        self.send_error(HTTPStatus.NOT_FOUND if self._host_is_known else HTTPStatus.FORBIDDEN)

    def _send(self, kind: str, content: BinaryIO) -> None:
        size = content.seek(0, os.SEEK_END)
        content.seek(0)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if size and self.command != "HEAD":
            self.connection.sendfile(content, count=size)

    def end_headers(self) -> None:
        """Add the headers of every answer, errors included."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print no line for a request."""
