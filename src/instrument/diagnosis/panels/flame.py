"""The flame graph of a diagnosis: the CPU time of its steps, and the GPU work that they launched."""

from __future__ import annotations

from typing import Any

from ...traces.flame import flame_of
from ..diagnosis_data import DiagnosisData


def flame_section(diagnosis: DiagnosisData) -> dict[str, Any] | None:
    """Return the flame graph by CPU time and by GPU time; None for a trace without ranges."""
    facts = diagnosis.facts
    if facts is None:
        return None
    return flame_of(facts.trace, facts.gpu, facts.communication, facts.steps, diagnosis.each_step)
