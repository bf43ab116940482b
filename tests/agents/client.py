"""Asks a server of `instrument mcp` in this process, by the client of the SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client

from instrument.start.agent.folders import ServedFolders
from instrument.start.agent.server import server_of


class Reply(NamedTuple):
    """What a client got: the text, the JSON data, and whether it was refused."""

    text: str
    data: Any
    refused: bool


class Answers:
    """Asks questions, one after the other."""

    def __init__(self, portal: BlockingPortal, client: Client) -> None:
        self._portal, self._client = portal, client

    def ask(self, tool: str, **arguments: Any) -> Reply:
        """Ask a tool."""
        return reply(self._portal.call(partial(self._client.call_tool, tool, arguments)))

    def tools(self) -> list[Any]:
        """Return the tools as the server lists them."""
        return list(self._portal.call(self._client.list_tools).tools)


def reply(result: Any) -> Reply:
    """Return what a client got; an answer is the same as text and as data."""
    (content,) = result.content
    if not result.is_error:
        assert json.loads(content.text) == result.structured_content
    return Reply(content.text, result.structured_content, bool(result.is_error))


@contextmanager
def asked(*folders: Path, out: Path | None = None) -> Iterator[Answers]:
    """Yield a client of a server for these folders."""
    with start_blocking_portal() as portal:
        client = Client(server_of(ServedFolders(folders, out)))
        with portal.wrap_async_context_manager(client):
            yield Answers(portal, client)
