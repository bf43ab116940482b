"""Describes files, runs and memory snapshots to an agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...base.run_folder import NAME, RUNS, entries_of, files_of, phases_beside
from ...base.units import counted, parse_size, size
from ...read.jobs.kinds import SUFFIXES
from ...read.memory.breakdown import compare_peaks
from ...read.memory.read import chosen_snapshot, read_memory
from ...read.memory.snapshot import MemorySnapshot, as_dict, changes_as_dict
from .folders import RefusedError, ServedFolders

Answer = dict[str, Any]
_FILES = (*SUFFIXES, ".pickle")
_DEEP = 3  # folders below the one that is listed
_WINDOW = ("window", "status", "reason", "rank", "steps", "phase", "opened_by", "run")
_LISTED = 2_000

OF_RUNS = {
    "folders.windows.steps": "First and last step that the window recorded, from 0.",
    "folders.windows.timing.recorded_ns": "Median length of the steps that it recorded in ns, on the CPU.",
    "folders.windows.timing.run_steps": "Steps of the run so far, with up to 20 after the window.",
    "folders.windows.timing.usual_ns": "Mean length in ns of the steps of the run so far that are not slow.",
    "folders.phases.blocks": "Recorded blocks of the phase.",
    "folders.phases.median_ns": "Median length of a block in ns; of several windows, the median of their medians.",
    "folders.files.bytes": "Size of the file.",
}
_OF_ONE = {
    "peak_bytes": "Most bytes in use at once: as asked for, until freed for all streams. Null without a history: "
    "the peak is then the end.",
    "reserved_bytes": "Bytes that torch's allocator had from the driver then.",
    "cached_bytes": "reserved_bytes without the bytes in use, at least 0.",
    "before_bytes": "Part of peak_bytes that is older than the history.",
    "known_bytes": "Part of peak_bytes whose line is known.",
    "inferred_bytes": "Part without a line whose category other evidence shows.",
    "unknown_bytes": "Part of which nothing is known.",
    "uses.bytes": "Bytes in use at the peak of this line, modules, region, category, evidence; they add up to it.",
    "uses.blocks": "In how many blocks.",
    "largest_blocks.bytes": "The same of blocks of one size; the largest size first.",
    "growth.bytes": "Bytes that complete steps allocated at this line, and that are in use at the end.",
    "state.reserved_bytes": "Bytes from the driver at the end.",
    "state.used_bytes": "Bytes of the blocks in use at the end.",
    "state.largest_hole_bytes": "Largest free piece of a segment at the end.",
    "failed": "Allocations of the history that failed.",
    "failures.bytes": "What was asked for.",
    "failures.used_bytes": "Bytes in use then.",
    "failures.reserved_bytes": "Bytes from the driver then.",
    "failures.largest_hole_bytes": "Largest free piece of a segment then, of the stream that asked.",
    "failures.device_free_bytes": "Bytes that the driver had left; -1: not known.",
    "failures.limit_bytes": "Memory that the GPU had for the program.",
    "driver_traffic.returns.bytes": "Bytes given back to the driver.",
    "driver_traffic.taken_later_bytes": "Bytes taken from the driver after the first recorded step.",
    "larger_batch.factor": "How many times as large the batch can be; null: that is not known, or nothing grows.",
    "larger_batch.growing_bytes": "Bytes at the peak that grow with the batch.",
    "larger_batch.fixed_bytes": "Bytes at the peak that do not.",
    "larger_batch.doubled_bytes": "Peak with twice the batch, at any time: >= fixed_bytes + 2 * growing_bytes.",
    "larger_batch.limit_bytes": "Memory that the GPU has for the program.",
    "larger_batch.largest": "batch * factor, rounded down.",
}
OF_MEMORY = _OF_ONE | {
    "change_bytes": "Peak after - peak before.",
    **{f"{side}.{name}": text for side in ("before", "after") for name, text in _OF_ONE.items()},
    **{
        f"{name}.{side}_bytes": text
        for name in ("changes", "changes_by_region")
        for side, text in (
            ("before", "Its bytes at the peak before."),
            ("after", "Its bytes at the peak after."),
            ("change", "Part of change_bytes; all parts add up to it."),
        )
    },
}


def runs_answer(served: ServedFolders, folder: Path | None) -> Answer:
    """Return the runs and the traces in a folder, or in all folders that are served."""
    roots = served.folders if folder is None else [folder]
    found = [each for root in roots for each in _folders(served, root, _DEEP)]
    runs = sum("windows" in each for each in found)
    return {
        "summary": f"{counted(runs, 'run')} and {counted(len(found) - runs, 'other folder')} with files.",
        "source": {"served": [str(each) for each in served.folders], "out": served.out and str(served.out)},
        "window": {"of": "all windows in the manifest of each run"},
        "coverage": {"deep": f"files up to {_DEEP} folders down, with names that end in {', '.join(_FILES)}"},
        "data": {"folders": found},
    }


def _folders(served: ServedFolders, folder: Path, deep: int) -> list[Answer]:
    """Return what a folder holds, and those below it; one that cannot be listed holds nothing."""
    try:
        entries = sorted(folder.iterdir())[:_LISTED]
    except OSError:
        return []
    if (folder / NAME).is_file() or (folder / RUNS).is_file():
        return [_run(folder)]
    own = [each for each in entries if served.serves(each)]
    files = [each for each in own if each.is_file() and each.name.endswith(_FILES)]
    found = []
    if files:
        found = [
            {"folder": str(folder), "files": [{"file": each.name, "bytes": each.stat().st_size} for each in files]}
        ]
    if deep:
        for each in own:
            if each.is_dir() and not each.is_symlink():
                found += _folders(served, each, deep - 1)
    return found


def _run(folder: Path) -> Answer:
    """Return the windows of a run, the last first, and its phases."""
    entries = list(entries_of(folder))
    windows = []
    for entry in reversed(entries):
        files = [name for name in files_of(entry) if (folder / name).is_file()]
        timing = _dict(entry.get("timing"))
        lengths = _dict(timing.get("lengths"))
        about = {name: entry.get(name) for name in _WINDOW} | {"files": files}
        about["missing_files"] = len(files_of(entry)) - len(files)
        about["timing"] = {name: timing.get(name) for name in ("recorded_ns", "run_steps")}
        windows.append(about | {"timing": about["timing"] | {"usual_ns": lengths.get("usual_ns")}})
    phases = [
        each._asdict() | {"window": str(each.window)}
        for each in (phases_beside(folder, entries[-1]) if entries else ())
    ]
    return {"folder": str(folder), "windows": windows, "phases": phases}


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def snapshot_of(path: Path, rank: int | None) -> MemorySnapshot:
    """Read the memory snapshot of a file or of the folder of a run; errors as those of `read_memory`."""
    return read_memory(chosen_snapshot(path, rank).path)


def memory_answer(
    snapshots: list[MemorySnapshot], device: int | None, limit: str | None, batch: int | None
) -> Answer:
    """Return the memory at the peak of one snapshot, or what changed from one to another.

    Args:
        snapshots: one or two.
        device: the GPU; None for the one with the highest peak.
        limit: the memory that the GPU has for the program.
        batch: the batch size of the program.

    Raises:
        ValueError: no snapshot has memory of the GPU, or the limit is not a size.
    """
    chosen = _device(snapshots, device)
    limit_bytes = None if limit is None else parse_size(limit, "limit")
    parts = [as_dict(each, chosen, limit_bytes, batch) for each in snapshots]
    for part in parts:
        part.pop("timeline")
    data = parts[0]
    said = (
        f"At its peak, {size(data['peak_bytes'])} are allocated." if data["peak_bytes"] else "No history, no peak."
    )
    if len(parts) == 2:
        peaks = [each.break_down(chosen) for each in snapshots]
        if not all(each.recorded for each in peaks):
            raise RefusedError(
                "One of the snapshots has no history, and so no peak.", "Ask for each of them alone."
            )
        change = sum(each.change_bytes for each in compare_peaks(*peaks))
        changes = changes_as_dict(snapshots[0], snapshots[1], chosen)
        sides = {
            side: {name: part[name] for name in ("peak_bytes", "reserved_bytes")}
            for side, part in zip(("before", "after"), parts, strict=True)
        }
        data = {"device": chosen, "change_bytes": change, **sides, **changes}
        said = f"The peak changed by {change:,} bytes."
    return {
        "summary": said,
        "source": {"files": [str(each.path) for each in snapshots], "device": chosen},
        "window": {"of": "the history in the snapshot; of the peak: its moment"},
        "coverage": {"of": "all memory of torch's allocator; known_bytes of peak_bytes have a line"},
        "data": data,
    }


def _device(snapshots: list[MemorySnapshot], wanted: int | None) -> int:
    """Return the GPU to show: ``wanted``, or the one whose peak is the highest in all snapshots.

    Raises:
        ValueError: a snapshot has no memory of this GPU.
    """
    there = sorted(set.intersection(*(set(each.devices) for each in snapshots)))
    if not there or (wanted is not None and wanted not in there):
        raise ValueError(f'"device" must have memory in every snapshot; such are: {there}')
    return (
        max(there, key=lambda each: max(one.peak(each).bytes for one in snapshots)) if wanted is None else wanted
    )
