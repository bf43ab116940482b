"""What live detection cannot see, in sentences."""

from __future__ import annotations

import sys

from .. import gpu
from ..config import settings

OFF = "INSTRUMENT=0 turns everything off: no wait is looked for"
DRY = "a dry run is under way, and lists the waits itself"
NO_GPU = (
    "there is no GPU that torch can use, so no wait is looked for: "
    "instrument.dry_run and `instrument syncs` find them without one"
)
UNUSED = (
    "the program never initialized CUDA, so no wait could be seen: "
    "instrument.dry_run and `instrument syncs` find them without a GPU"
)
_ALWAYS = (
    "Not seen: libraries that call CUDA without torch, memory that the driver frees, and operators that wait "
    "inside CUDA's own libraries (unique, sparse coalesce).",
    "Not timed: waits of operators called through torch.ops, and of backward nodes written in C++.",
    "Regions that were opened while nothing was looked at are not known.",
)
_BY_WARNING = (
    "This version of torch does not tell before a wait: those it warns of are counted without a time, "
    "those on threads of autograd at the end of the backward pass."
)
_ERROR_MODE = (
    'torch.cuda.set_sync_debug_mode("error") stays as it is: torch raises before most waits, which are not listed.'
)


def missing() -> str | None:
    """Return why nothing can be found in this process now; None where it can, or may once CUDA is initialized.

    A torch that is built for GPUs is not asked whether there is one: that initializes the driver.
    """
    if not settings.enabled:
        return OFF
    if getattr(sys.modules.get("instrument.dryrun.session"), "active", False):
        return DRY
    import torch

    return None if gpu.built_for_cuda() or torch.cuda.is_available() else NO_GPU


def unused() -> str | None:
    """Return why nothing can have been found so far where the program did not initialize CUDA; else None."""
    return UNUSED if gpu.built_for_cuda() and gpu.initialized("cuda") is None else None


def sentences(why: str | None, *, traced: bool, error_mode: bool, every: int, steps: int) -> list[str]:
    """Return what was not looked at, and what cannot be seen.

    Args:
        why: nothing is looked for.
        traced: torch tells before waits.
        error_mode: torch raises before waits.
        every: one step in so many was looked at,
        steps: so many in all.
    """
    if why is not None:
        return [f"{why[0].upper()}{why[1:]}."]
    said = [f"{steps} steps were looked at: the first ones, then one in {every}."] if every > 1 and steps else []
    said += [] if traced else [_BY_WARNING]
    said += [_ERROR_MODE] if error_mode else []
    return [*said, *_ALWAYS]
