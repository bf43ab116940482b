"""Process groups, as operators of torch.distributed take them."""

from __future__ import annotations

from typing import Any


def group_name(argument: Any) -> str:
    """Return "group " and the name of the process group that an operator takes; "" for anything else."""
    import torch

    if not isinstance(argument, torch.ScriptObject) or not torch.distributed.is_available():
        return ""
    kind = getattr(torch.distributed.distributed_c10d, "ProcessGroup", None)
    if kind is None:
        return ""
    try:
        group = kind.unbox(argument)
        return f"group {group.group_desc or group.group_name}"
    except (AttributeError, RuntimeError):  # another object, or another version of torch
        return ""
