"""`instrument memory`: what the memory of a GPU was at its peak, from snapshots of torch's allocator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import TraceError
from ..memory.breakdown import Breakdown
from ..memory.comparison import compare_peaks
from ..memory.read import read_memory
from ..memory.snapshot import MemorySnapshot
from ..report.memory_report import print_memory, print_memory_change
from .errors import describe, print_message
from .parsing import subcommand_of


def memory(
    snapshots: Annotated[
        list[Path], typer.Argument(metavar="SNAPSHOT [SNAPSHOT]", help="One snapshot, or two to compare.")
    ],
    device: Annotated[
        int | None,
        typer.Option(min=0, help="The GPU (default: the one with the highest peak).", metavar="N"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all parts as JSON, unrounded.")] = False,
) -> None:
    """Show what used the memory of a GPU at its peak: by category, line, module and region.

    SNAPSHOT is a memory snapshot of torch: of profile(memory="snapshot"), instrument run --memory snapshot, or
    torch.cuda.memory._dump_snapshot. Of two snapshots, the changes from the first to the second are shown.

    The exit code is 1 if a snapshot cannot be read, and 2 for wrong arguments.
    """
    if len(snapshots) > 2:
        raise typer.BadParameter(f"one or two are accepted: {len(snapshots)}", param_hint="SNAPSHOT")
    try:
        read = [read_memory(path) for path in snapshots]
    except (TraceError, OSError) as error:
        print_message(describe(error))
        raise typer.Exit(1) from None
    chosen = _device(read, device)
    peaks = [each.break_down(chosen) for each in read]
    if as_json:
        typer.echo(json.dumps(_as_dict(read, peaks), indent=2))
    elif len(read) == 2:
        first, second = zip(snapshots, peaks, strict=True)
        print_memory_change(first, second, Console())
    else:
        print_memory(read[0], chosen, Console())


def _device(read: list[MemorySnapshot], wanted: int | None) -> int:
    """Return the GPU to show: ``wanted``, or the one whose peak is the highest in all snapshots."""
    there = sorted(set.intersection(*(set(each.devices) for each in read)))
    if not there:
        print_message(f"no GPU has memory in {' and in '.join(str(each.path) for each in read)}")
        raise typer.Exit(1)
    if wanted is None:
        return max(there, key=lambda device: max(each.peak(device).bytes for each in read))
    if wanted not in there:
        names = ", ".join(map(str, there))
        raise typer.BadParameter(
            f"GPUs with memory in every snapshot are {names}: {wanted}", param_hint="--device"
        )
    return wanted


def _as_dict(read: list[MemorySnapshot], peaks: list[Breakdown]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "snapshots": [_peak(each, peak) for each, peak in zip(read, peaks, strict=True)],
    }
    if len(peaks) == 2:
        parts = compare_peaks(*peaks)
        found["changes"] = [{**part._asdict(), "change_bytes": part.change_bytes} for part in parts]
    return found


def _peak(snapshot: MemorySnapshot, found: Breakdown) -> dict[str, Any]:
    state = snapshot.state(found.peak.device)
    return {
        "path": str(snapshot.path),
        "device": found.peak.device,
        "peak_bytes": found.peak.bytes,
        "reserved_bytes": found.reserved_bytes,
        "cached_bytes": found.cached_bytes,
        "before_bytes": found.peak.before_bytes,
        "known_bytes": found.known_bytes,
        "inferred_bytes": found.inferred_bytes,
        "unknown_bytes": found.unknown_bytes,
        "uses": [_use(use) for use in found.uses],
        "growth": [
            {**growth._asdict(), "line": place.line, "file": place.file, "function": place.function}
            for place, growth in snapshot.growth(found.peak.device)
        ],
        "state": {**state._asdict(), "failures": [failure._asdict() for failure in state.failures]},
    }


def _use(use: Any) -> dict[str, Any]:
    place = use.place and use.place._asdict()
    return {**use._asdict(), "place": place, "modules": [each._asdict() for each in use.modules]}


subcommand = subcommand_of(memory)
