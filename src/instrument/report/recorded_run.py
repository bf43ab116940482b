"""The windows that a run recorded into a folder, from its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..run_folder import traces_in
from ..traces.ranks import TraceSet


@dataclass(frozen=True)
class RecordedRun:
    """The windows of one rank in the last run in a folder.

    Attributes:
        folder: the folder.
        rank: the rank.
        windows: the trace of each window with its line of the manifest, in order.
    """

    folder: Path
    rank: int
    windows: list[tuple[Path, Mapping[str, Any]]]

    @property
    def hidden(self) -> list[str]:
        """Regions that were not recorded because they are inside compiled code."""
        names = self.windows[-1][1].get("hidden_regions")
        return [str(name) for name in names] if isinstance(names, list) else []

    @property
    def title(self) -> str:
        """A title for the windows."""
        return f"the {len(self.windows)} windows of the last run in {self.folder}"

    def before_last(self) -> dict[Path, str]:
        """Return the traces of the windows before the last one, each with its description."""
        return {file: f"rank {self.rank}, {_steps(entry)}" for file, entry in self.windows[:-1]}


def find_recorded_run(path: str, traces: TraceSet, rank: int | None = None) -> RecordedRun | None:
    """Return the windows of a rank's run, by default the lowest's; None if ``path`` is not the folder of a run.

    Traces of that rank's other runs are added to `TraceSet.left_out`.
    """
    rank = next(iter(traces)) if rank is None else rank
    trace = traces[rank]
    files = dict(traces_in(Path(path)))
    own = files.get(trace.path)
    if own is None:
        return None
    windows = []
    for file, entry in files.items():
        if entry.get("run") == own.get("run"):
            windows.append((file, entry))
        elif entry.get("rank") == own.get("rank"):
            traces.left_out[file] = f"rank {rank}, {_steps(entry)}, another run"
    return RecordedRun(Path(path), rank, windows)


def _steps(entry: Mapping[str, Any]) -> str:
    steps = entry["steps"]
    return f"steps {'-'.join(map(str, steps))}" if isinstance(steps, list) else "steps"
