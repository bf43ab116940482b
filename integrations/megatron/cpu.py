"""Lets megatron-core, whose schedules and optimizers use CUDA, run on a machine without it.

Not for training, but to try a script and for tests. Code that selects a CUDA device gets the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


def _is_cuda(device: Any) -> bool:
    number = isinstance(device, int) and not isinstance(device, bool)
    return number or (isinstance(device, (str, torch.device)) and str(device).startswith("cuda"))


class CudaIsCpu(TorchFunctionMode):
    """Places CUDA tensors on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # asserted: 'torch.cuda.FloatTensor'
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


@contextlib.contextmanager
def no_cuda() -> Iterator[None]:
    """Run the body with the CPU in place of every CUDA device."""
    from megatron.core.tensor_parallel import random

    def nothing(*_, **__):
        return contextlib.nullcontext()

    with (
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.object(torch.cuda, "synchronize", lambda *_: None),
        mock.patch.object(random.CudaRNGStatesTracker, "fork", nothing),
        CudaIsCpu(),
    ):
        yield
