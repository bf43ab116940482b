"""Runs in each Python process of ``instrument run`` before the program: hooks modules that it will import."""

from __future__ import annotations

import functools
import importlib
import json
import os
from types import ModuleType
from typing import Any

from ...base import stderr
from ...base.config import RUN, settings
from ...base.guard import guard
from ...base.imports import ImportHook

ADAPTERS = {
    "transformers.trainer": "transformers",
    "lightning.pytorch": "lightning",
    "pytorch_lightning": "lightning",
    "megatron.core": "megatron",
    "deepspeed": "deepspeed",
    "torchtitan": "torchtitan",
    "vllm": "vllm",
}
"""The adapter of each framework, by the module that a training imports."""


@guard.contained("instrument run")
def begin() -> None:
    """Attach to frameworks as they are imported, and to torch's optimizers for programs without a framework.

    Imports nothing heavy: not every Python process of a program trains.
    """
    if not settings.enabled or not os.environ.get(RUN):
        return
    stderr.remember()
    for module, adapter in () if _has_step_on() else ADAPTERS.items():
        ImportHook(module, functools.partial(_install, adapter)).apply()
    ImportHook("torch", _follow).apply()


def _has_step_on() -> bool:
    """Return whether the command line defines what a step is, so that frameworks do not."""
    try:
        return bool(json.loads(os.environ[RUN])["step_on"])
    except (ValueError, TypeError, KeyError):
        return False


@guard.contained("following the framework")
def _install(adapter: str, _: ModuleType) -> None:
    importlib.import_module(f"instrument.integrations.{adapter}").install()


@guard.contained("following optimizers")
def _follow(_: Any) -> None:
    from ...integrations.loop import loop_from_environment
    from .session import Session

    loop = loop_from_environment()
    if loop is not None:
        Session(loop).begin()
