"""What the torch that is installed can do, where versions differ."""

from __future__ import annotations

import inspect

import torch


def names_activities() -> bool:
    """Tell whether torch's profiler takes the names of single activities, as it does since 2.12."""
    return "activity_filters" in inspect.signature(torch.autograd.profiler.profile).parameters
