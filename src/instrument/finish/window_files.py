"""Writes the diagnosis and the summary of a recorded window into files beside its trace."""

from __future__ import annotations

from pathlib import Path

from ..base.files import part_file
from ..base.run_folder import DIAGNOSIS
from ..explain.diagnosis.diagnose import diagnose
from ..read.jobs.read import read_trace
from ..read.measures.summary import summarize
from ..read.measures.timing import Timing
from ..show.terminal.summary import summary_text


def write_diagnosis(trace: Path, timing: Timing | None = None) -> list[Path]:
    """Diagnose ``trace``, write NAME.diagnosis.json and NAME.diagnosis.html beside it, and return their paths.

    Args:
        trace: the file, plain or gzipped.
        timing: the steps around the window; by default those in the manifest, if it has a line for the trace.

    Raises:
        TraceError, OSError: the trace cannot be read, or a file cannot be written.
    """
    found = diagnose(trace, timing=timing)
    data = _write(_beside(trace, DIAGNOSIS[1:]), found.to_json())
    return [data, found.to_html(_beside(trace, "diagnosis.html"))]


def write_summary(trace: Path) -> Path:
    """Write the summary of ``trace`` as text to NAME.summary.txt beside it, and return that path.

    Raises:
        TraceError, OSError: the trace cannot be read, or the file cannot be written.
    """
    text = summary_text(summarize(read_trace(trace)), files=[trace], folder=trace.parent)
    return _write(_beside(trace, "summary.txt"), text)


def _beside(trace: Path, suffix: str) -> Path:
    stem = trace.name
    for known in (".gz", ".json", ".trace", ".pt"):
        stem = stem.removesuffix(known)
    return trace.with_name(f"{stem}.{suffix}")


def _write(path: Path, text: str) -> Path:
    with part_file(path) as part:
        part.write_text(text, "utf-8")
        part.replace(path)
    return path
