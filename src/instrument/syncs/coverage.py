"""Sentences on what live detection cannot see."""

from __future__ import annotations

from ..base.compat import gpu
from ..base.config import settings

SWITCHED_OFF = "INSTRUMENT=0 turns everything off: synchronizations are not detected"
IN_DRY_RUN = "a dry run is in progress, and lists the synchronizations itself"
NO_GPU = (
    "torch can use no GPU, so synchronizations are not detected: "
    "instrument.dry_run and `instrument syncs` find them without one"
)
UNUSED = (
    "the program never initialized CUDA, so no synchronization could be seen: "
    "instrument.dry_run and `instrument syncs` find them without a GPU"
)
_ALWAYS = (
    "Not seen: libraries that call CUDA without torch, memory that the driver frees, and operators that "
    "synchronize inside CUDA's own libraries (unique, sparse coalesce).",
    "Not timed: operators called through torch.ops, and backward nodes written in C++.",
    "Regions opened in steps that were not checked are unknown.",
)
_BY_WARNING = (
    "This version of torch has no callback before a synchronization: those it warns about are counted without a "
    "time, those on threads of autograd at the end of the backward pass."
)
_ERROR_MODE = (
    'torch.cuda.set_sync_debug_mode("error") stays in force: torch raises before most synchronizations, which are '
    "not listed."
)


def reason_unavailable() -> str | None:
    """Return why nothing can be found in this process; None if it can, or may once CUDA is initialized.

    A torch that is built for GPUs is not queried for one, as that initializes the driver.
    """
    if not settings.enabled:
        return SWITCHED_OFF
    if settings.dry_run:
        return IN_DRY_RUN
    import torch

    return None if gpu.built_for_cuda() or torch.cuda.is_available() else NO_GPU


def reason_unused() -> str | None:
    """Return why nothing can have been found if the program did not initialize CUDA; else None."""
    return UNUSED if gpu.built_for_cuda() and gpu.initialized("cuda") is None else None


def sentences(reason: str | None, *, traced: bool, error_mode: bool, every: int, steps: int) -> list[str]:
    """Return sentences on what was not checked, and what cannot be seen.

    Args:
        reason: why nothing is checked; None if something is.
        traced: whether torch calls back before synchronizations.
        error_mode: whether torch raises before synchronizations.
        every: one step in ``every`` was checked.
        steps: number of steps that were checked.
    """
    if reason is not None:
        return [f"{reason[0].upper()}{reason[1:]}."]
    said = [f"{steps} steps were checked: the first ones, then one in {every}."] if every > 1 and steps else []
    said += [] if traced else [_BY_WARNING]
    said += [_ERROR_MODE] if error_mode else []
    return [*said, *_ALWAYS]
