"""How a question becomes a reply: in a thread, with its progress, within its limit of tokens, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import anyio
import anyio.to_thread
from mcp.server.mcpserver import Context
from mcp_types import CallToolResult, TextContent
from pydantic import BaseModel

from ...base.errors import TraceError
from ...read.jobs.progress import watching
from .answers import fitted, plain, text_of
from .folders import RefusedError, ServedFolders
from .kept import Request

_LOG = logging.getLogger(__name__)
_PROGRESS_S = 0.5
Work = Callable[[], dict[str, Any]]


class Answer(BaseModel):
    """The shape of each answer; docs/agents.md says what its keys hold."""

    summary: str
    source: dict[str, Any]
    window: dict[str, Any]
    coverage: dict[str, Any]
    data: dict[str, Any]
    definitions: dict[str, str]
    left_out: list[str]


Answered = Annotated[CallToolResult, Answer]


async def reply(
    context: Context, served: ServedFolders, work: Work, definitions: Mapping[str, str], most: int
) -> CallToolResult:
    """Return what ``work`` returns in a thread, or why it fails; report how far reading is meanwhile.

    If the request is cancelled, a file that is being read is left, and other work ends unnoticed.

    Args:
        context: the request.
        served: what the thread may read and write.
        work: makes the answer.
        definitions: what the numbers in it are, by their path in ``data``.
        most: the number of tokens.
    """
    request = Request()
    async with anyio.create_task_group() as group:
        group.start_soon(_report, context, request)
        try:
            made = await anyio.to_thread.run_sync(
                partial(_made, served, work, definitions, most, request), abandon_on_cancel=True
            )
        finally:
            request.cancelled = True
        group.cancel_scope.cancel()
    return made


def _made(
    served: ServedFolders, work: Work, definitions: Mapping[str, str], most: int, request: Request
) -> CallToolResult:
    token = watching.set(request.advance)
    try:
        with served.guarding():
            answer = fitted(plain(work()), definitions, most)
        return CallToolResult(content=[_text(answer)], structured_content=answer)
    except RefusedError as error:
        return refusal(error.reason, error.advice)
    except TraceError as error:
        return refusal(f"The file cannot be read: {error.reason}", "Call runs to see which others there are.")
    except ValueError as error:
        return refusal(str(error), "Change this argument, and ask again.")
    except OSError as error:
        return refusal(f"The file cannot be opened: {error.strerror}", "Call runs to see what there is.")
    except ModuleNotFoundError as error:
        return refusal(f"This needs {error.name}, which is not installed.", "Ask a person to install it.")
    except MemoryError:
        return refusal("The file does not fit into memory.", "instrument slim makes smaller ones of traces.")
    except Exception as error:
        _LOG.exception("an answer failed")
        return refusal(f"This is an error of the server: {type(error).__name__}.", "Report it to a person.")
    finally:
        watching.reset(token)


async def _report(context: Context, request: Request) -> None:
    """Report how much of a file was read, from time to time."""
    reported = (0, 0)
    while True:
        await anyio.sleep(_PROGRESS_S)
        now = request.read_bytes, request.of_bytes
        if now != reported:
            reported = now
            await context.report_progress(now[0], now[1], "reading, in bytes")


def _text(value: dict[str, Any]) -> TextContent:
    return TextContent(type="text", text=text_of(value))


def refusal(reason: str, advice: str) -> CallToolResult:
    """Return the reply to a question that is not answered: why, and what to do."""
    return CallToolResult(content=[_text(plain({"refused": reason, "do": advice}))], is_error=True)
