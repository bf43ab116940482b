"""What went wrong, in one sentence."""

from __future__ import annotations


def sentence(error: Exception) -> str:
    """Return what went wrong, for a person."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read {error.filename}: {error.strerror}"
    return str(error)
