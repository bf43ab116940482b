"""The page of a diagnosis: its sections in order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...page.document import document
from ...page.names import shown_name
from ..diagnosis_data import DiagnosisData
from .findings import findings_section
from .flame import flame_section
from .memory import memory_sections
from .overview import overview_section
from .ranks import ranks_section
from .roofline import roofline_section
from .tables import table_sections
from .timeline import timeline_section


def page_of(diagnosis: DiagnosisData, *, serve: Mapping[str, str | int] | None = None) -> str:
    """Return the text of the page.

    Args:
        diagnosis: the diagnosis.
        serve: see `document`.
    """
    sections = [
        overview_section(diagnosis),
        findings_section(diagnosis),
        timeline_section(diagnosis),
        flame_section(diagnosis),
        *memory_sections(diagnosis),
        roofline_section(diagnosis),
        ranks_section(diagnosis),
        *table_sections(diagnosis),
    ]
    return document(
        shown_name(Path(diagnosis.path).name),
        shown_name(diagnosis.verdict),
        [section for section in sections if section is not None],
        serve=serve,
    )
