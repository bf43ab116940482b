"""``instrument open``: shows the diagnosis of a trace in the browser, from where it opens Perfetto."""

from __future__ import annotations

import os
import socket
import sys
import webbrowser
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer

from ...base.printable import shell_line
from .. import cli

if TYPE_CHECKING:
    from ...read.tables.trace import Trace
    from ...show.page.server import PageServer

_PERFETTO = "https://ui.perfetto.dev"
_UNREADABLE = {
    "nsight systems": "reports of Nsight Systems",
    "rocprof": "files of rocprofv3",
    "xplane": "XPlane files",
    "memory snapshot": "memory snapshots",
}
"""The formats that Perfetto cannot read."""


def open_command(
    trace: str = cli.TRACE,
    no_browser: bool = cli.flag("--no-browser", "Print the address, and open no browser."),
    port: int = cli.option("N", "The port of 127.0.0.1; 0 takes a free one.", default=0, min=0, max=65535),
    perfetto: str = cli.option("URL", "The address of Perfetto.", default=_PERFETTO),
    steps_from: str | None = cli.STEPS_FROM,
    rank: int | None = cli.RANK,
    collectives: str = cli.COLLECTIVES,
) -> None:
    """Show the diagnosis of a trace in the browser, and its findings in Perfetto.

    The page is that of instrument diagnose TRACE --html FILE. Its buttons open the trace in Perfetto, in another
    tab, and scroll to a finding there. The page is served on this machine alone, at an address with a random
    token. The command ends with Ctrl-C, or when the last tab with the page is closed.

    The exit code is 0 when it has ended in one of these ways, 1 if the trace cannot be read or the port is taken,
    and 2 for options that are wrong or do not fit the trace.
    """
    from .diagnose import rule_settings

    with cli.errors_reported(unreadable=2):
        _check_address(perfetto)
        ignored, thresholds = rule_settings([], [])
    options = {"ignore": ignored, "thresholds": thresholds, "collectives": collectives}
    with _server(port) as server:
        page, file = _page(trace, server, perfetto, options | {"steps_from": steps_from, "rank": rank})
        try:
            _announce(server, perfetto if file else None)
            if not no_browser and can_show():
                Thread(target=_show, args=(server.url,), daemon=True).start()  # it may return when it is closed
            server.serve(page, file)
            cli.print_message("the last tab is closed")
        except KeyboardInterrupt:  # the usual end, so no failure
            cli.print_message("interrupted")


def _check_address(url: str) -> None:
    """Check that ``url`` can be opened, and extended by a range of time.

    Raises:
        ValueError: it cannot.
    """
    try:
        parts = urlsplit(url)
        accepted = parts.scheme in ("http", "https") and parts.hostname and not parts.fragment
        _ = parts.port  # raises ValueError unless it is a number
    except ValueError:
        accepted = False
    if not accepted or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"--perfetto must be an address with http or https and without a fragment: {url!r:.200}")


def _server(port: int) -> PageServer:
    """Return the server; it is made before the trace is read, so that a taken port is reported at once."""
    from ...show.page.server import PageServer

    try:
        return PageServer(port)
    except OSError as error:
        cli.print_message(f"cannot use port {port} of 127.0.0.1: {error.strerror}")
        raise typer.Exit(1) from None


def _page(trace: str, server: PageServer, perfetto: str, options: Mapping[str, Any]) -> tuple[str, Path | None]:
    """Return the page, and the file if Perfetto can read it; the tables of the trace are freed."""
    from ...base.printable import shown_name
    from ...explain.diagnosis.diagnose import diagnose
    from ...show.sections.diagnosis import page_of

    with cli.errors_reported():
        diagnosis = diagnose(trace, **options)
    assert diagnosis.facts is not None
    path, reason = Path(diagnosis.path), _unreadable(diagnosis.facts.trace)
    serve: dict[str, str | int] = {"alive": server.alive_path, "name": shown_name(path.name)}
    if reason:
        serve["perfetto_reason"] = reason
    else:
        serve |= {"trace": server.file_path, "perfetto": perfetto, "start_ns": diagnosis.facts.window[0]}
    return page_of(diagnosis, serve=serve), None if reason else path


def _unreadable(trace: Trace) -> str:
    """Return why Perfetto cannot read the file of a trace; "" if it can."""
    if trace.format in _UNREADABLE:
        return f"This trace cannot be opened in Perfetto, which does not read {_UNREADABLE[trace.format]}."
    if not trace.path.is_file():
        return "This trace cannot be opened in Perfetto, because it was read from a stream: give a file."
    return ""


def _announce(server: PageServer, perfetto: str | None) -> None:
    """Print the address, what the page does, and how to reach it over ssh."""
    from ...show.terminal.console import new_console, print_line, print_wrapped

    console = new_console()
    print_line(console, server.url)
    sends = f" Its buttons send the trace to a tab of {perfetto}, which keeps it in the browser." * bool(perfetto)
    print_wrapped(
        console,
        f"This page shows the diagnosis, on this machine alone.{sends} Ctrl-C ends the command, and so does "
        "closing the last tab with the page.",
    )
    if os.environ.get("SSH_CONNECTION"):
        print_wrapped(
            console, "To see it on your own machine, run this there, with the name by which it reaches this one:"
        )
        forward = f"{server.port}:127.0.0.1:{server.port}"
        print_line(console, shell_line(["ssh", "-N", "-L", forward, socket.gethostname()]))


def can_show() -> bool:
    """Return whether a browser would appear before the user, and not in this terminal or on another screen."""
    if os.environ.get("BROWSER"):  # editors set it, also over ssh
        return True
    screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return bool(screen) and not os.environ.get("SSH_CONNECTION")


def _show(url: str) -> None:
    with suppress(webbrowser.Error, OSError):
        webbrowser.open(url)


subcommand = cli.subcommand_of(open_command)
