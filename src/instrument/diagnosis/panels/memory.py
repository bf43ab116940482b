"""The memory of the GPU with the highest peak, from the memory snapshot of a diagnosis."""

from __future__ import annotations

from typing import Any

from ...memory.page_sections import sections_of
from ..diagnosis_data import DiagnosisData


def memory_sections(diagnosis: DiagnosisData) -> list[dict[str, Any]]:
    """Return the memory over time, the peak, and what went wrong; nothing without a snapshot of a GPU."""
    snapshot = diagnosis.snapshot
    device = None if snapshot is None else snapshot.fullest_device
    return [] if snapshot is None or device is None else sections_of(snapshot, device)
