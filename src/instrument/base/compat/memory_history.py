"""The history of torch's CUDA allocator: what the GPU's memory was allocated for, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_RECORDS = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")


def is_supported() -> bool:
    """Return whether this build of torch has the history, and says whether it is on; needs no GPU."""
    import torch

    return all(hasattr(torch._C, name) for name in (_RECORDS[0], "_cuda_isHistoryEnabled", "_cuda_memorySnapshot"))


def is_on() -> bool:
    """Return whether somebody records the history; CUDA must be initialized, as for all functions below."""
    import torch

    return bool(torch._C._cuda_isHistoryEnabled())


def turn_on(stacks: str, entries: int) -> None:
    """Begin a new history of the newest ``entries`` events of each GPU; ``stacks`` as torch takes it."""
    import torch

    torch.cuda.memory._record_memory_history("all", context="all", stacks=stacks, max_entries=entries)


def turn_off() -> None:
    """End the history; torch then forgets its events."""
    import torch

    torch.cuda.memory._record_memory_history(None)


def snapshot() -> tuple[dict[str, Any], int]:
    """Return the state of the allocator with the history so far, and the number of the current GPU.

    torch describes all stacks meanwhile, with the interpreter held: seconds for 100,000 events.
    """
    import torch

    return torch.cuda.memory._snapshot(), torch.cuda.current_device()


def free_bytes(device: int) -> int:
    """Return the memory of a GPU that its driver has left, for any process."""
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


def attach_out_of_memory_observer(observer: Callable[[int, int, int, int], None]) -> bool:
    """Have ``observer`` called before each out-of-memory error, until the process ends: torch cannot remove it.

    It gets the GPU, the bytes that were asked for, those that the process may have, and those that are free. It
    is called on the thread that allocates, and must not raise: its error would replace that of torch.

    Returns:
        Whether this version of torch has such observers.
    """
    import torch

    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(observer)
    return attach is not None


def switches() -> list[tuple[Any, str]]:
    """Return the module and the names of the functions by which anybody turns the history on or off."""
    import torch

    return [(torch._C, name) for name in _RECORDS if hasattr(torch._C, name)]
