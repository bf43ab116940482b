"""Writes the diagnosis of a recorded window into files beside its trace."""

from __future__ import annotations

from pathlib import Path

from ..part_file import part_file
from ..traces.timing import Timing
from .diagnose import diagnose


def write_diagnosis(trace: Path, timing: Timing | None = None) -> list[Path]:
    """Diagnose ``trace``, write NAME.diagnosis.json and NAME.diagnosis.html beside it, and return their paths.

    Args:
        trace: the file, plain or gzipped.
        timing: the steps around the window; by default those in the manifest, if it has a line for the trace.

    Raises:
        TraceError, OSError: the trace cannot be read, or a file cannot be written.
    """
    found = diagnose(trace, timing=timing)
    stem = trace.name
    for suffix in (".gz", ".json", ".trace", ".pt"):
        stem = stem.removesuffix(suffix)
    data, page = (trace.with_name(f"{stem}.diagnosis.{kind}") for kind in ("json", "html"))
    with part_file(data) as part:
        part.write_text(found.to_json(), "utf-8")
        part.replace(data)
    return [data, found.to_html(page)]
