"""vLLM: prefill and decode as regions, and windows of engine iterations that are opened while it serves.

    attach("runs/x", file="runs/x/trigger")  # before the engine is made; then: touch runs/x/trigger

The model runner lives in processes that vLLM starts. What is attached in the main one reaches those that it forks;
`install`, as a plugin of vLLM or through ``instrument run``, reaches all of them.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import instrument

from .. import log
from ..guard import guard
from ..regions import dispatch
from .adapter import Adapter, require
from .environment import loop_from_environment
from .loop import Loop
from .server import Server

FEATURE = "following vLLM"
HOMES = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")  # of the GPUModelRunner
VARIABLE = "INSTRUMENT_SERVER"
"""Holds the arguments of `attach` as JSON."""


def attach(
    out: str | os.PathLike[str] = "runs/instrument", *, modules: int | bool | None = False, **options: Any
) -> Adapter:
    """Name the iterations of vLLM's model runner, and record windows of them on demand.

    Regions: "prefill", "decode" or, of a batch with both, "prefill+decode", with the number of tokens as the
    payload, and "sampling". A request is in its prefill until it has its first token.

    Args:
        out: the folder that windows land in.
        modules: regions of the model's modules: how many levels, None for all, False for none. CUDA graphs and
            compiled code have none.
        options: as `instrument.integrations.server.Server` takes them: ``active``, ``warmup``, ``file``,
            ``signal``, ...

    Returns:
        What was attached, with ``remove()``; it is a context manager as well.

    Raises:
        TypeError, ValueError: arguments that are not accepted.
        ImportError: vLLM is not installed.
    """
    server = Server(out, modules=modules, **options)
    require("vllm")
    return _follow(Adapter(server.loop), server)


@functools.cache
def install() -> None:
    """Have vLLM drive what the environment asks for, if it does: windows on demand, or those of a plan."""
    text = os.environ.get(VARIABLE)
    loop = None if text else loop_from_environment()
    try:
        if text:
            attach(**json.loads(text))
        elif loop is not None:
            _follow(Adapter(loop), loop)
    except (ImportError, TypeError, ValueError) as error:  # an environment variable must not stop a server
        log.warning(f"{VARIABLE} is ignored", reason=str(error))


def _follow(attachment: Adapter, server: Server | Loop) -> Adapter:
    runners = Runners(attachment, server)
    for home in HOMES if attachment.on else ():
        attachment.when_imported(home, FEATURE, runners.follow)
    return attachment


class Runners:
    """Follows the model runner of this process."""

    def __init__(self, attachment: Adapter, server: Server | Loop) -> None:
        self._attachment = attachment
        self._server = server

    def follow(self, module: Any) -> None:
        """Replace what an iteration consists of."""
        self._attachment.wrap(module.GPUModelRunner, "execute_model", self._execute)
        self._attachment.wrap(module.GPUModelRunner, "sample_tokens", self._attachment.region("sampling"))

    def _execute(
        self, original: Callable[..., Any], runner: Any, scheduled: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run an iteration, to which the sampling after it belongs: the one before ends here."""
        tokens = getattr(scheduled, "total_num_scheduled_tokens", 0)
        if kwargs.get("dummy_run") or not tokens:
            return original(runner, scheduled, *args, **kwargs)
        if self._attachment.loop.running:
            self._server.step()
        else:
            self._server.start(*(model for model in [getattr(runner, "model", None)] if model is not None))
        self._attachment.complete = True
        name = None
        if dispatch.recording:
            with guard.contained(FEATURE):
                name = phase(scheduled)
        if name is None:
            return original(runner, scheduled, *args, **kwargs)
        with instrument.annotate(name, payload=tokens):
            return original(runner, scheduled, *args, **kwargs)


def phase(scheduled: Any) -> str:
    """Return what a batch consists of, by vLLM's ``SchedulerOutput``."""
    new = {request.req_id for request in scheduled.scheduled_new_reqs}
    drafts = scheduled.scheduled_spec_decode_tokens
    before_output = getattr(scheduled.scheduled_cached_reqs, "is_context_phase", None)  # not in all versions

    def prefill(request: str, tokens: int) -> bool:
        if request in new:
            return True
        return bool(before_output(request)) if before_output else tokens > 1 + len(drafts.get(request, ()))

    phases = {prefill(request, tokens) for request, tokens in scheduled.num_scheduled_tokens.items()}
    if len(phases) > 1:
        return "prefill+decode"
    return "prefill" if True in phases else "decode"
