"""`RunSummary`: the summary of the windows of a run, as text for a terminal or as fields of an event."""

from __future__ import annotations

import codecs
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.run_folder import how_to_show_snapshots
from ...base.units import counted
from ...read.measures.summary import Summary
from ..text.lines import line
from .console import heading, new_console, show
from .summary import MAX_OPERATORS, largest_regions, print_summary

if TYPE_CHECKING:  # importing it takes a tenth of a second, at the end of every run
    from ...explain.diagnosis.diagnosis import Diagnosis

_FIELDS = (
    "steps", "step_ns", "step_numbers", "step_times_ns", "no_region_ns", "outside_ns", "gpu_total_ns",
)  # fmt: skip
_REGION_FIELDS = ("path", "calls", "steps", "cpu_ns", "self_ns", "gpu_ns")


@dataclass(frozen=True)
class RunSummary:
    """The summary of the windows of a run.

    Attributes:
        summary: The summary.
        windows: The number of windows.
        phase: The phase of the program that these are windows of; empty for training steps.
        files: The traces that it was computed from.
        folder: The folder of the run.
        removed_files: How many traces it was computed from that are no longer there.
        snapshots: The memory snapshots of the run.
        ranks: Sentences on the ranks of the job.
        hidden: Regions that were not recorded because they are inside compiled code.
        worst_steps: The slow steps that a black box found with the largest delays, in words.
        diagnosis: The diagnosis of the last window; None for none.
    """

    summary: Summary
    windows: int
    phase: str
    files: Sequence[Path]
    folder: Path
    removed_files: int
    snapshots: Sequence[Path]
    ranks: Sequence[str]
    hidden: Sequence[str]
    worst_steps: Sequence[str]
    diagnosis: Diagnosis | None

    def as_text(self, terminal: Mapping[str, Any]) -> str:
        """Return it as text.

        Args:
            terminal: ``columns``, ``colors`` and ``encoding`` of the terminal; None for unknown ones.
        """
        encoding = _supported_encoding(terminal["encoding"])
        file = io.TextIOWrapper(io.BytesIO(), encoding, "backslashreplace", newline="")
        console = new_console(file=file, force_terminal=terminal["colors"], width=terminal["columns"])
        if self.phase:
            windows = counted(self.windows, "window")
            text = f"{self.phase}: {windows} in {self.folder}; a step is one block of this phase"
            show(console, [line(text, "bold")])
        print_summary(
            self.summary,
            files=self.files,
            folder=self.folder,
            removed_files=self.removed_files,
            ranks=self.ranks,
            hidden=self.hidden,
            console=console,
        )
        if self.snapshots:
            show(console, [line(how_to_show_snapshots(len(self.snapshots), self.folder))])
        if self.worst_steps:
            show(console, heading("The slowest steps (the first 32 are not judged)"))
            show(console, [line(f"  {step}") for step in self.worst_steps])
        if self.diagnosis is not None:
            show(console, heading("What is slow in the last window"))
            console.print(self.diagnosis, soft_wrap=True)
        file.flush()
        file.seek(0)
        return file.read()

    def as_fields(self) -> dict[str, Any]:
        """Return it as JSON values; times are sums over the steps."""
        summary = self.summary
        return {
            "phase": self.phase,
            "windows": self.windows,
            "folder": str(self.folder),
            "files": [str(path) for path in self.files],
            "removed_files": self.removed_files,
            "memory_snapshots": [str(path) for path in self.snapshots],
            **{name: getattr(summary, name) for name in _FIELDS},
            "regions": [
                {name: getattr(region, name) for name in _REGION_FIELDS}
                for region in largest_regions(summary.regions)
            ],
            "operators": [vars(operator) for operator in summary.operators[:MAX_OPERATORS]],
            "ranks": list(self.ranks),
            "hidden_regions": list(self.hidden),
            "slowest_steps": list(self.worst_steps),
            "diagnosis": self.diagnosis and self.diagnosis.verdict,
        }


def _supported_encoding(encoding: str) -> str:
    with suppress(LookupError):
        return codecs.lookup(encoding).name
    return "utf-8"
