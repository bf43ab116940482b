"""vLLM: prefill and decode as regions, and windows of engine iterations that are opened while it serves.

    attach("runs/x", file="runs/x/trigger")  # before the engine is made; then: touch runs/x/trigger

vLLM starts processes of its own for the model runner. `attach` reaches those that the main process forks;
`install`, as a plugin of vLLM or through ``instrument run``, reaches all of them.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import instrument

from ..base import log
from ..base.guard import guard
from ..record.regions import dispatch
from .adapter import Adapter, Removal, require
from .loop import Loop, loop_from_environment
from .server import Server

__all__ = ["attach", "install"]

FEATURE = "following vLLM"
RUNNER_MODULES = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
VARIABLE = "INSTRUMENT_SERVER"
"""Holds the arguments of `attach` as JSON."""


class VLLMAdapter(Adapter):
    """Follows the model runner of this process.

    Args:
        driven: the object that iterations of the runner drive: windows on demand, or a loop with a schedule.
    """

    feature = FEATURE

    def __init__(self, driven: Server | Loop) -> None:
        super().__init__(driven.loop if isinstance(driven, Server) else driven)
        self._loop_or_server = driven

    def install_hooks(self) -> None:
        """Hook the class of the model runner."""
        if isinstance(self._loop_or_server, Server):
            self.apply(Removal(self._loop_or_server.detach))
        for module in RUNNER_MODULES:
            self.when_imported(module, self._imported)

    def _imported(self, module: Any) -> None:
        self.wrap(module.GPUModelRunner, "execute_model", self._execute)
        self.wrap(module.GPUModelRunner, "sample_tokens", self.in_region("sampling"))

    def _execute(
        self, original: Callable[..., Any], runner: Any, scheduled: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run an iteration, which lasts until the next one begins, and so includes the sampling."""
        tokens = getattr(scheduled, "total_num_scheduled_tokens", 0)
        if kwargs.get("dummy_run") or not tokens:
            return original(runner, scheduled, *args, **kwargs)
        if self.loop.running:
            self._loop_or_server.step()
        else:
            models = [runner.model] if getattr(runner, "model", None) is not None else []
            driven = self._loop_or_server
            start = driven.attach if isinstance(driven, Server) else driven.start
            start(*models)
        self.step_complete = True
        name = None
        if dispatch.recording:
            with guard.contained(FEATURE):
                name = phase(scheduled)
        if name is None:
            return original(runner, scheduled, *args, **kwargs)
        with instrument.annotate(name, payload=tokens):
            return original(runner, scheduled, *args, **kwargs)


@guard.prepared(FEATURE, otherwise=VLLMAdapter.inert)
def attach(
    out: str | os.PathLike[str] = "runs/instrument", *, modules: int | bool | None = False, **options: Any
) -> VLLMAdapter:
    """Name the iterations of vLLM's model runner, and record windows of them on demand.

    Regions: "prefill", "decode" or, for a batch with both, "prefill+decode", with the number of tokens as the
    payload, and "sampling". A request is in its prefill until it has its first token.

    Args:
        out: the folder for the recorded windows.
        modules: regions for the model's modules: how many levels, None for all, False for none. CUDA graphs and
            compiled code have none.
        options: the arguments of `instrument.integrations.server.Server`: ``active``, ``warmup``, ``file``,
            ``signal``, ...

    Returns:
        The adapter, which ``detach()`` removes; it is also a context manager.

    Raises:
        TypeError, ValueError: wrong arguments.
        ImportError: vLLM is not installed.
    """
    server = Server(out, modules=modules, **options)
    require("vllm")
    return VLLMAdapter(server).attach()


@functools.cache
def install() -> None:
    """Attach to vLLM if the environment requests windows on demand or by a schedule."""
    text = os.environ.get(VARIABLE)
    loop = None if text else loop_from_environment()
    try:
        if text:
            attach(**json.loads(text))
        elif loop is not None:
            VLLMAdapter(loop).attach()
    except (ImportError, TypeError, ValueError) as error:  # an environment variable must not stop a server
        log.warning(f"{VARIABLE} is ignored", reason=str(error))


def phase(scheduled: Any) -> str:
    """Return the phase of a batch, "prefill", "decode" or "prefill+decode", from vLLM's ``SchedulerOutput``."""
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
