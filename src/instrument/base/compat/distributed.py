"""Process groups, as operators of torch.distributed take them, and the group that sends nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

FAKE = "fake"
"""The name of the backend that sends nothing."""

_NO_DESCRIPTION = "undefined"


class Group(NamedTuple):
    """A process group.

    Attributes:
        name: tells it from all others.
        shown: its description, or its name if it has none.
        size: the number of its ranks.
    """

    name: str
    shown: str
    size: int


def group_of(argument: Any) -> Group | None:
    """Return a process group that an operator takes; None for anything else.

    Args:
        argument: a process group, or its name.
    """
    import torch

    group = _unboxed(argument)
    if isinstance(argument, str):
        resolve = getattr(torch.distributed.distributed_c10d, "_resolve_process_group", None)
        try:
            group = resolve(argument) if resolve is not None else None
        except (LookupError, RuntimeError, ValueError):  # another text
            return None
    if group is None:
        return None
    described = group.group_desc not in ("", _NO_DESCRIPTION)
    return Group(group.group_name, group.group_desc if described else group.group_name, group.size())


def _unboxed(argument: Any) -> Any:
    import torch

    if not isinstance(argument, torch.ScriptObject) or not torch.distributed.is_available():
        return None
    kind = getattr(torch.distributed.distributed_c10d, "ProcessGroup", None)
    try:
        group = kind.unbox(argument) if kind is not None else None
        return group if group is None or group.group_name else None
    except (AttributeError, RuntimeError):  # another object, or another version of torch
        return None


def fake_store() -> Any:
    """Register the backend `FAKE` and return a store for it.

    Raises:
        RuntimeError: this version of torch has none.
    """
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        raise RuntimeError("this version of torch has no process group that sends nothing") from None
    return FakeStore()


def finished_work(results: list[Any]) -> Any:
    """Return the `Work` of a collective that is over; None if this version of torch cannot make one.

    Args:
        results: the tensors that it made.
    """
    import torch

    make = getattr(getattr(torch._C, "_distributed_c10d", None), "_create_work_from_future", None)
    if make is None:
        return None
    future_of: Any = torch.futures.Future
    future = future_of()
    future.set_result(results)
    return make(future)
