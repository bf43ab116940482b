"""What the torch that is installed can do, where versions differ."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion


def names_activities() -> bool:
    """Tell whether torch's profiler takes the names of single activities, as it does since 2.12."""
    return "activity_filters" in inspect.signature(torch.autograd.profiler.profile).parameters


@functools.cache
def compiles_clipping() -> bool:
    """Return whether `clip_grad_norm_` becomes a part of a graph; torch 2.6 breaks the graph there."""
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    clip = torch.compile(torch.nn.utils.clip_grad_norm_, backend="eager", fullgraph=True)
    try:
        clip([weight], 1.0)
    except torch._dynamo.exc.Unsupported:
        return False
    finally:
        torch._dynamo.reset()
    return True


def records_all_threads() -> Any:
    """Return the configuration of a profiler that records all threads; skip the test if torch has none."""
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        pytest.skip("this version of torch cannot record all threads")


# A number that is assigned to elements is copied to the GPU first, before torch 2.15.
copies_numbers = TorchVersion(torch.__version__) < (2, 15)
selects_combinations_by_mask = TorchVersion(torch.__version__) < (2, 14)
shards_on_cpu = hasattr(torch.cpu.Stream, "record_event")  # FSDP needs it, from torch 2.7 on

has_a_timeout = pytest.mark.skipif(
    "post_processing_timeout_s" not in inspect.signature(torch.profiler.profile).parameters,
    reason="torch's profiler has no post_processing_timeout_s",
)
