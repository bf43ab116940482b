"""Reads the logs that programs leave with SIMGPU_LOG: what each stream ran, in order."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.simgpu import Entry


def read_logs(folder: Path) -> list[Entry]:
    """Return the entries of all logs `log-...` in a folder, in the order of their calls."""
    lines = [line for path in folder.glob("log-*") for line in path.read_text().splitlines()]
    return sorted((Entry(**json.loads(line)) for line in lines), key=lambda entry: (entry.enqueued, entry.start))


def works(entries: Iterable[Entry]) -> dict[tuple[int, int], list[str]]:
    """Return the names of what ran, without the calls that waited, by device and stream."""
    found: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for entry in entries:
        if not entry.returned:
            found[entry.device, entry.stream].append(entry.name or f"{entry.kind} of {entry.bytes} bytes")
    return dict(found)
