"""The subcommand `open`: what it prints, when it opens a browser, and how it ends."""

from __future__ import annotations

import base64
import gzip
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import pytest
from typer.testing import CliRunner

from instrument.start import cli
from instrument.start.commands import open as command
from tests.memory.snapshots import event, write
from tests.support.browser import OpenPage
from tests.support.programs import environment, shell_script
from tests.support.shared_traces import shared

pytestmark = pytest.mark.process

DATA = Path(__file__).parent / "data"
GPU_TRACE = DATA / "gpu_two_steps.json"
# The command, but a page that is away for a second, not for five, has closed.
COMMAND = """
from functools import partial
from instrument.start.cli import main
from instrument.show.page import server
server.OpenTabs = partial(server.OpenTabs, reload_s=1)
main()
"""
SCREEN = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION")


class Running:
    """The command, once it has printed its address."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process, self.url = process, process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]+/", self.url), process.communicate()

    @property
    def port(self) -> int:
        return int(self.url.split(":")[2].partition("/")[0])

    def interrupt(self) -> tuple[str, str, int]:
        """Press Ctrl-C; return the output, the messages and the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.wait_for_end()

    def wait_for_end(self) -> tuple[str, str, int]:
        self.process.wait(60)
        assert self.process.stdout is not None and self.process.stderr is not None
        return self.process.stdout.read(), self.process.stderr.read(), self.process.returncode


class Start(Protocol):
    """The type of the fixture `start`."""

    def __call__(self, *args: str | Path, stdin: Path | None = None, **env: str) -> Running: ...


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that starts the command without a screen, with variables of the environment."""
    with ExitStack() as processes:

        def start(*args: str | Path, stdin: Path | None = None, **env: str) -> Running:
            source = processes.enter_context(stdin.open()) if stdin else subprocess.DEVNULL
            process = processes.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", COMMAND, "open", *map(str, args)],
                    env={name: value for name, value in environment().items() if name not in SCREEN} | env,
                    stdin=source,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            processes.callback(process.kill)
            return Running(process)

        yield start


def data_of(url: str) -> dict[str, Any]:
    """Return the data of the page at an address."""
    with urllib.request.urlopen(url) as response:
        text = response.read().decode()
    (packed,) = re.findall(r'id="data">([^<]*)<', text)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_serves_until_interrupted(start: Start) -> None:
    """The command prints the address and what it does, serves page and trace, and ends with Ctrl-C and code 0."""
    running = start(GPU_TRACE, "--no-browser")
    data = data_of(running.url)
    assert data["title"] == GPU_TRACE.name
    assert data["serve"]["perfetto"] == "https://ui.perfetto.dev"
    with urllib.request.urlopen(f"http://127.0.0.1:{running.port}{data['serve']['trace']}") as response:
        assert response.read() == GPU_TRACE.read_bytes()
    out, err, code = running.interrupt()
    said = " ".join(out.split())
    assert (
        "on this machine alone" in said and "https://ui.perfetto.dev" in said and "Ctrl-C ends the command" in said
    )
    assert "ssh" not in said
    assert (err, code) == ("instrument: interrupted\n", 0)


def test_is_the_page_of_diagnose(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has the sections that `diagnose --html` writes; for both, the settings of pyproject.toml count."""
    (tmp_path / "pyproject.toml").write_text('[tool.instrument.diagnose]\nignore = ["dominant-kernel"]\n')
    monkeypatch.chdir(tmp_path)
    running = start(GPU_TRACE, "--no-browser")
    written = tmp_path / "page.html"
    assert CliRunner().invoke(cli.app, ["diagnose", str(GPU_TRACE), "--html", str(written)]).exit_code == 0
    assert data_of(running.url)["sections"] == data_of(written.as_uri())["sections"]
    assert "left out: dominant-kernel" in json.dumps(data_of(running.url)["sections"])
    assert data_of(written.as_uri())["serve"] == {}
    assert running.interrupt()[2] == 0


def test_over_ssh(start: Start, tmp_path: Path) -> None:
    """Over ssh, the command prints the line that forwards its port, and starts no browser."""
    stub = shell_script(tmp_path / "bin" / "xdg-open", f"echo $1 > {tmp_path}/opened")
    env = {
        "SSH_CONNECTION": "10.0.0.2 50000 10.0.0.1 22",
        "DISPLAY": ":10",
        "PATH": f"{stub.parent}:/usr/bin:/bin",
    }
    running = start(GPU_TRACE, **env)
    assert running.process.stdout is not None
    forward = f"ssh -N -L {running.port}:127.0.0.1:{running.port} {socket.gethostname()}\n"
    assert forward in iter(running.process.stdout.readline, "")
    assert running.interrupt()[2] == 0
    assert not (tmp_path / "opened").exists()


def test_opens_the_browser(start: Start, tmp_path: Path) -> None:
    """The browser gets the address, while the page is served: it may return only when it is closed."""
    fetch = f"import sys, urllib.request as u; open('{tmp_path}/page', 'wb').write(u.urlopen(sys.argv[1]).read())"
    stub = shell_script(
        tmp_path / "browser", f"'{sys.executable}' -c \"{fetch}\" $1; mv {tmp_path}/page {tmp_path}/done"
    )
    running = start(GPU_TRACE, BROWSER=str(stub))
    for _ in range(600):
        if (tmp_path / "done").exists():
            break
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(0.1)
    assert GPU_TRACE.name in (tmp_path / "done").read_text()
    assert running.interrupt()[2] == 0


def test_no_browser(start: Start, tmp_path: Path) -> None:
    """With --no-browser none is started."""
    stub = shell_script(tmp_path / "browser", f"touch {tmp_path}/started")
    running = start(GPU_TRACE, "--no-browser", BROWSER=str(stub))
    data_of(running.url)
    assert running.interrupt()[2] == 0
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("env", "shown"),
    [({}, sys.platform in ("darwin", "win32")), ({"DISPLAY": ":0"}, True), ({"WAYLAND_DISPLAY": "w"}, True),
     ({"DISPLAY": ":10", "SSH_CONNECTION": "a"}, False), ({"BROWSER": "b", "SSH_CONNECTION": "a"}, True)],
)  # fmt: skip
def test_where_a_browser_appears(env: dict[str, str], shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser is opened where the user sits: with a screen and not over ssh, or where BROWSER names one."""
    for name in SCREEN:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert command.can_show() is shown


def test_closing_the_tab(start: Start, open_page: OpenPage) -> None:
    """Closing the only tab ends the command, after a reload did not."""
    running = start(GPU_TRACE, "--no-browser")
    opened = open_page(running.url)
    opened.page.wait_for_selector("[data-ready]")
    opened.page.reload()
    opened.page.wait_for_selector("[data-ready]")
    assert opened.errors == []
    with pytest.raises(subprocess.TimeoutExpired):
        running.process.wait(2)
    opened.page.close()
    _, err, code = running.wait_for_end()
    assert (err, code) == ("instrument: the last tab is closed\n", 0)


def test_a_real_trace_in_perfetto(start: Start, open_page: OpenPage) -> None:
    """The findings of a real trace lead to their place on the clock of its file."""
    path = shared("tl_h100_owlv2.json.gz")
    times = [
        event["ts"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if event.get("dur")
    ]
    handler = partial(SimpleHTTPRequestHandler, directory=str(DATA))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as perfetto, ExitStack() as ends:
        Thread(target=perfetto.serve_forever, daemon=True).start()
        ends.callback(perfetto.shutdown)
        running = start(
            path, "--no-browser", "--perfetto", f"http://127.0.0.1:{perfetto.server_port}/perfetto.html"
        )
        page = open_page(running.url).page
        with page.expect_popup() as popup:
            page.get_by_role("button", name="Show in Perfetto").first.click()
        popup.value.wait_for_function("seen.ranges.length > 0")
        seen = popup.value.evaluate("seen")
        assert seen["traces"][0]["size"] == path.stat().st_size
        shown = seen["ranges"][0]
        assert min(times) / 1e6 <= shown["timeStart"] < shown["timeEnd"] <= max(times) / 1e6
        assert running.interrupt()[2] == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nsys/h100_2gpu_1s.sqlite", "Nsight Systems"), ("tl_rocprofv3_908_results.json.gz", "rocprofv3")],
)
def test_what_perfetto_cannot_read(start: Start, name: str, reason: str) -> None:
    """For a file that Perfetto cannot read, the page says so, has no button, and does not serve the file."""
    running = start(shared(name), "--no-browser")
    serve = data_of(running.url)["serve"]
    assert reason in serve["perfetto_reason"]
    assert serve.keys() == {"alive", "name", "perfetto_reason"}
    out, _, code = running.interrupt()
    assert ("Perfetto" in out, code) == (False, 0)


def test_a_memory_snapshot(start: Start, tmp_path: Path) -> None:
    """Its diagnosis is shown, and the page has no button, because Perfetto cannot read it."""
    running = start(write(tmp_path / "a.pickle", [[event("alloc", 1, 512)]]), "--no-browser")
    assert "does not read memory snapshots" in data_of(running.url)["serve"]["perfetto_reason"]
    assert 0 == running.interrupt()[2]


def test_standard_input(start: Start) -> None:
    """A trace from a pipe is shown, but cannot be read again for Perfetto."""
    running = start("-", "--no-browser", stdin=GPU_TRACE)
    page = data_of(running.url)
    assert "read from a stream" in page["serve"]["perfetto_reason"]
    assert "trace" not in page["serve"]
    assert running.interrupt()[2] == 0


@pytest.mark.parametrize(
    "url",
    ["", "ui.perfetto.dev", "javascript:alert(1)", "file:///etc/passwd", "data:text/html,x", "https://", "https:///x",
     "ftp://a", "http://a:b", "http://a b", "http://é", "http://a\n", "http://[", "https://ui.perfetto.dev/#!/viewer"],
)  # fmt: skip
def test_addresses_of_perfetto(url: str) -> None:
    """Only an address with http or https is opened."""
    result = CliRunner().invoke(cli.app, ["open", str(GPU_TRACE), "--perfetto", url])
    assert result.exit_code == 2
    assert "instrument: --perfetto must be an address with http or https" in result.output


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    """A missing file, a port that is taken and a rank that does not exist are reported in one line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for args, message, code in (
            ([str(tmp_path / "missing.json")], "missing.json: No such file", 1),
            ([str(tmp_path / "missing.json"), "--port", port], f"cannot use port {port} of 127.0.0.1: Address", 1),
            ([str(GPU_TRACE), "--rank", "7"], "--rank must be the rank of the trace", 2),
            ([str(GPU_TRACE), "--collectives", "("], "collectives", 2),
            ([str(GPU_TRACE), "--steps-from", "none such"], "none such", 2),
        ):
            result = CliRunner().invoke(cli.app, ["open", "--no-browser", *args])
            assert (message in result.output, result.exit_code) == (True, code), result.output
            assert len(result.output.splitlines()) == 1


def test_the_chosen_port(start: Start) -> None:
    """The page is at the port that --port names."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running = start(GPU_TRACE, "--no-browser", "--port", str(port))
    assert running.port == port
    assert running.interrupt()[2] == 0
