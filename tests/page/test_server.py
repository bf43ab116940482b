"""The server of a page: who can read what, with which headers, and when it ends."""

from __future__ import annotations

import http.client
import re
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from instrument.show.page.server import OpenTabs, PageServer

from .serving import POLL_S, serving

PAGE = "<!doctype html><title>é</title>"


@contextmanager
def served(file: Path | None = None) -> Iterator[PageServer]:
    """Serve `PAGE`, and end."""
    with PageServer() as server, serving(server, PAGE, file):
        yield server


def ask(
    server: PageServer, path: str, method: str = "GET", host: str | None = None, address: str = "127.0.0.1"
) -> tuple[http.client.HTTPResponse, bytes]:
    """Return the answer of a request and its body."""
    connection = http.client.HTTPConnection(address, server.port, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{server.port}")
        connection.endheaders()
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a\r\nX-Injected: 1\u202e.json.gz"
    path.write_bytes(b"\x1f\x8b" + bytes(range(256)) * 5000)
    return path


def test_page_and_file(file: Path) -> None:
    """The page and the bytes of the file are sent, and for HEAD their headers alone."""
    with served(file) as server:
        page, text = ask(server, server.page_path)
        assert (page.status, text.decode()) == (200, PAGE)
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        sent, content = ask(server, server.file_path)
        assert (sent.status, content) == (200, file.read_bytes())
        assert sent.headers["Content-Type"] == "application/octet-stream"
        assert sent.headers["Content-Encoding"] is None
        for path, size in (server.page_path, len(text)), (server.file_path, len(content)):
            head, nothing = ask(server, path, "HEAD")
            assert (head.status, head.headers["Content-Length"], nothing) == (200, str(size), b"")


def test_token(file: Path) -> None:
    """Each server has a token of at least 128 random bits, without which nothing is found."""
    with served(file) as server, served() as other:
        token = server.page_path.strip("/")
        assert re.fullmatch(r"[\w-]{22,}", token) and token != other.page_path.strip("/")
        assert server.url == f"http://127.0.0.1:{server.port}/{token}/"
        wrong = f"/{token[:-1]}{'a' if token[-1] != 'a' else 'b'}"
        for path in ("/", "/favicon.ico", "//", f"/{token}", f"/{token}/../file", f"{wrong}/", f"{wrong}/file",
                     other.page_path, other.file_path, f"/{token}/file/..", "/%2e%2e/etc/passwd"):  # fmt: skip
            answer, text = ask(server, path)
            assert answer.status == 404, path
            assert PAGE.encode() not in text
        assert ask(server, f"{wrong}/alive?opened=a", "POST")[0].status == 404
        assert ask(server, other.file_path)[0].status == 404


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "[::1]:{port}", "0.0.0.0:{port}",
     "127.0.0.1:{port}@evil.example", "[", "127.0.0.1:", "127.0.0.1:80 evil.example"],
)  # fmt: skip
def test_other_hosts(host: str, file: Path) -> None:
    """A request to any other host name is refused, so that no website reaches the server by a name of its own."""
    with served(file) as server:
        named = host.format(port=server.port)
        for method, path in ("GET", server.page_path), ("GET", server.file_path), ("POST", server.alive_path):
            answer, text = ask(server, path, method, host=named)
            assert answer.status == 403
            assert PAGE.encode() not in text


def test_own_hosts() -> None:
    """The page is served as 127.0.0.1 and as localhost, at the port that a tunnel has on the user's machine."""
    with served() as server:
        for host in ("127.0.0.1", "localhost", "localhost:1234", "127.0.0.1:65535"):
            assert ask(server, server.page_path, host=host)[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "X"])
def test_methods(method: str, file: Path) -> None:
    """The page and the file can be read only, and no answer permits other sites anything."""
    with served(file) as server:
        for path in (server.page_path, server.file_path):
            answer, _ = ask(server, path, method)
            assert answer.status in (404, 501)
            assert not [name for name in answer.headers if name.lower().startswith("access-control")]


def test_headers(file: Path) -> None:
    """Every answer forbids caches, guesses of its type, referrers, frames and use by other sites."""
    with served(file) as server:
        paths = (server.page_path, server.file_path, "/", server.alive_path)
        for answer, _ in [ask(server, path) for path in paths] + [ask(server, server.alive_path, "POST")]:
            headers = answer.headers
            assert headers["Cache-Control"] == "no-store"
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert headers["Cross-Origin-Opener-Policy"] == "same-origin-allow-popups"
            assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
            assert "Access-Control-Allow-Origin" not in headers
            assert "X-Injected" not in headers
            assert "Python" not in headers["Server"]


def test_this_machine_only() -> None:
    """The server listens on 127.0.0.1, on no other address of this machine."""
    with served() as server:
        assert server.server_address[0] == "127.0.0.1"
        for address in ("127.0.0.2", "::1", socket.gethostbyname(socket.gethostname())):
            if address != "127.0.0.1":
                with pytest.raises(OSError):
                    socket.create_connection((address, server.port), timeout=5).close()


def test_a_large_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A file larger than memory could be sent: it is read in pieces, and a reader may stop without a traceback."""
    path, size = tmp_path / "large", 200_000_000
    with path.open("wb") as out:
        out.truncate(size)
    with served(path) as server:
        tracemalloc.start()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", server.file_path)
        response = connection.getresponse()
        assert sum(len(part) for part in iter(lambda: response.read(1 << 20), b"")) == size
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20_000_000
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", server.file_path)
        connection.getresponse().read(10)
        connection.close()
        assert ask(server, server.page_path)[0].status == 200
    assert capfd.readouterr().err == ""


def test_a_file_that_is_gone(file: Path) -> None:
    """Without the file, the page can tell that it is gone."""
    with served(file) as server:
        file.unlink()
        assert ask(server, server.file_path)[0].status == 410
        assert ask(server, server.page_path)[0].status == 200
    with served() as server:
        assert ask(server, server.file_path)[0].status == 404


def test_garbage(capfd: pytest.CaptureFixture[str]) -> None:
    """Malformed requests are refused or ignored, and the server goes on."""
    with served() as server:
        for sent in (b"", b"\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n",
                     b"GET / HTTP/1.1\r\nHost: [\r\n\r\n",
                     b"GET http://[ HTTP/1.1\r\n\r\n",
                     "GET /é/ HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), b"A" * 70_000 + b"\r\n"):  # fmt: skip
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
        assert ask(server, server.page_path)[0].status == 200
    assert "Traceback" not in capfd.readouterr().err


def test_ends_after_the_last_tab() -> None:
    """The server ends when each tab that has opened has closed, and its port is free then."""
    with PageServer(tabs=OpenTabs(reload_s=0)) as server:
        server.timeout = POLL_S
        thread = Thread(target=server.serve, args=(PAGE,))
        thread.start()
        for beacon in ("opened=a", "opened=b", "closed=a"):
            assert ask(server, f"{server.alive_path}?{beacon}", "POST")[0].status == 204
        thread.join(20 * POLL_S)
        assert thread.is_alive()
        ask(server, f"{server.alive_path}?closed=b", "POST")
        thread.join(30)
        assert not thread.is_alive()
    with PageServer(server.port):
        pass


def test_a_port_that_is_taken() -> None:
    """Two servers cannot share a port."""
    with PageServer() as server, pytest.raises(OSError, match="in use"):
        PageServer(server.port)
