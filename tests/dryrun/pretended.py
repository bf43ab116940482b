"""Helpers for tests of the pretended GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Noted:
    """Keeps records of synchronizations and of what is not covered."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.gaps: list[str] = []

    def record_sync(self, op: str, cause: str = "", **_: object) -> None:
        self.waits.append(op)

    def note_stream(self, kind: str, stream: int | None, event: int = 0) -> None:
        pass

    def record_not_covered(self, why: str) -> None:
        self.gaps.append(why)


class OnCpu(TorchFunctionMode):
    """Makes tensors for the GPU on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(one, torch.device) else one for one in args)
        return function(*args, **kwargs)
