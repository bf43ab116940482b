"""The step as one bar, and its figures."""

from __future__ import annotations

from typing import Any

from ...page.names import shown_name
from ...units import count, duration, percentage
from ..diagnosis_data import DiagnosisData
from ..idle_causes import CAUSES
from ..verdict import PARTS, definition_of_part

_CLASSES = {
    "input": "input",
    "synchronization": "synchronization",
    "launch_latency": "latency",
    **dict.fromkeys(
        ("compilation", "garbage_collection", "allocation", "module_loading", "launch_overhead"), "overhead"
    ),
}
"""The class, and so the color, of a cause of idle time; of all others, "other"."""

BUSY_WORDS = {"compute": "compute", "communication": "exposed communication", "copies": "exposed memcpys"}
"""The words for the parts of a step during which a GPU works."""


def idle_class(cause: str) -> str:
    """Return the class of a cause of idle time, which gives its color."""
    return _CLASSES.get(cause, "other")


def overview_section(diagnosis: DiagnosisData) -> dict[str, Any] | None:
    """Return the parts of a step (busy time of the GPU by class, idle time by cause) and the figures.

    None for a memory snapshot, which has no times, if there is nothing else to say of it.
    """
    notes = [shown_name(text) for text in _notes(diagnosis) if text]
    if not diagnosis.step_ns and not notes:
        return None
    return {
        "id": "overview",
        "type": "overview",
        "title": "Where the step goes" if diagnosis.has_steps else "Where the time goes",
        "step_ns": diagnosis.step_ns,
        "each": diagnosis.each_step,
        "parts": _parts(diagnosis),
        "figures": list(_figures(diagnosis)),
        "notes": notes,
    }


def _parts(diagnosis: DiagnosisData) -> list[dict[str, Any]]:
    if not diagnosis.has_gpu:
        return [
            {"name": name, "class": name, "ns": ns, "definition": definition_of_part(name, gpu=False)}
            for name, ns in diagnosis.parts.items()
            if ns
        ]
    busy = [
        {"name": words, "class": name, "ns": diagnosis.parts[name], "definition": PARTS[name]}
        for name, words in BUSY_WORDS.items()
        if diagnosis.parts.get(name)
    ]
    idle = [
        {
            "name": f"idle: {cause.replace('_', ' ')}",
            "class": idle_class(cause),
            "ns": ns,
            "definition": f"The GPU idles while {CAUSES[cause]}.",
        }
        for cause, ns in diagnosis.idle_by_cause.items()
        if ns
    ]
    return busy + idle if diagnosis.parts else []


def _figures(diagnosis: DiagnosisData) -> list[tuple[str, str]]:
    figures = []
    if diagnosis.step_ns:
        figures.append(("mean step" if diagnosis.has_steps else "window", duration(diagnosis.step_ns)))
    if diagnosis.has_steps:
        figures.append(("steps recorded", count(diagnosis.steps)))
    if diagnosis.stretch is not None:
        low, high = diagnosis.stretch_range or (diagnosis.stretch, diagnosis.stretch)
        span = f"{diagnosis.stretch:.2f} x" + f" ({low:.2f} to {high:.2f})" * (low < high)
        figures.append(("recorded step / step outside the window", span))
    if diagnosis.rank is not None:
        figures.append(("rank", str(diagnosis.rank)))
    if diagnosis.goodput["mfu"] is not None:
        figures.append(("model FLOPs utilization", percentage(diagnosis.goodput["mfu"])))
    if diagnosis.memory is not None:
        figures.append(("memory allocated at the peak", f"{diagnosis.memory.peak_bytes / 1e6:,.0f} MB"))
    return figures


def _notes(diagnosis: DiagnosisData) -> list[str]:
    coverage = [diagnosis.coverage_text] if diagnosis.parts else []
    rest = (diagnosis.mfu_text, diagnosis.memory_text, *diagnosis.rules_texts)
    return [diagnosis.opened_text, *coverage, *diagnosis.source_texts, *rest]
