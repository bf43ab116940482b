"""`instrument memory`: what the memory of a GPU was at its peak, from snapshots of torch's allocator."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...base.units import parse_size
from .. import cli

if TYPE_CHECKING:
    from ...read.memory.batch import BatchFit
    from ...read.memory.snapshot import MemorySnapshot


def memory(
    snapshots: list[Path] = cli.argument(
        "SNAPSHOT [SNAPSHOT]", "One snapshot, or two to compare: files, or folders of a run or of a window."
    ),
    device: int | None = cli.option("N", "The GPU (default: the one with the highest peak).", min=0),
    limit: str | None = cli.option(
        "SIZE",
        "The memory that the GPU has for the program: how large can the batch be? GB is 10^9 bytes, and "
        "GiB 2^30, in which torch's errors count: 79GiB for a card of 80 GB. (default: what it had, which "
        "a snapshot says that instrument recorded or that has a failed allocation)",
    ),
    batch: list[int] | None = cli.option(
        "N", "The batch size of the snapshot; given twice, of the two snapshots.", min=1, max=10**12
    ),
    rank: int | None = cli.option(
        "N", "The rank, of several in a folder (default: the lowest with a snapshot).", min=0
    ),
    as_json: bool = cli.flag("--json", "Print all parts as JSON, unrounded."),
    as_html: Path | None = cli.HTML,
) -> None:
    """Show what used the memory of a GPU at its peak: by category, line, module and region.

    SNAPSHOT is a memory snapshot of torch: of profile(memory="snapshot"), instrument run --memory snapshot, or
    torch.cuda.memory._dump_snapshot. Of the folder of a run, that of the newest window is taken. Of two snapshots,
    the changes from the first to the second are shown. --html writes one file, which needs no network, with the
    memory over time, and the peak by region, module and line.

    The exit code is 1 if a snapshot cannot be read or the page cannot be written, and 2 for wrong arguments.
    """
    from ...read.memory.read import read_memory
    from ...read.memory.snapshot import as_dict
    from ...show.sections.memory import page_of
    from ...show.terminal.console import new_console, show
    from ...show.terminal.memory import memory_report

    if as_html is not None and as_json:
        raise cli.exit_unusable("--html and --json exclude each other")
    with cli.value_of("SNAPSHOT"):
        if len(snapshots) > 2:
            raise ValueError(f"one or two are accepted: {len(snapshots)}")
    batches = _batches(batch or [], len(snapshots))
    with cli.value_of("--limit"):
        limit_bytes = None if limit is None else parse_size(limit, "limit")
        if limit_bytes is not None and len(snapshots) == 2 and not batches and not as_json:
            raise ValueError("with two snapshots it needs --batch twice")
    with cli.errors_reported():
        read = [read_memory(_file(path, rank)) for path in snapshots]
    chosen = _device(read, device)
    if len(read) == 2:
        _show_change(read[0], read[1], chosen, batches, limit_bytes, as_json, as_html)
    elif as_html is not None:
        _write(page_of(read[0], chosen, limit_bytes, *batches), as_html)
    elif as_json:
        typer.echo(json.dumps({"snapshots": [as_dict(read[0], chosen, limit_bytes, *batches)]}, indent=2))
    else:
        console = new_console()
        show(console, memory_report(read[0], chosen, console.width, limit_bytes, *batches))


def _show_change(
    before: MemorySnapshot,
    after: MemorySnapshot,
    device: int,
    batches: list[int],
    limit_bytes: int | None,
    as_json: bool,
    as_html: Path | None,
) -> None:
    """Print or write what changed from one snapshot to the other."""
    from ...read.memory.batch import fit_texts
    from ...read.memory.snapshot import as_dict, changes_as_dict
    from ...show.sections.memory import page_of_change
    from ...show.terminal.console import new_console, show
    from ...show.terminal.memory import memory_change

    for each in (before, after):
        if not each.break_down(device).recorded:
            raise cli.exit_unusable(f"{each.path} has no history of GPU {device}, and so no peak to compare")
    fit = _fit(before, after, device, batches)
    limit = after.known_limit(device) if limit_bytes is None else limit_bytes
    if as_html is not None:
        _write(page_of_change(before, after, device, fit_texts(fit, limit) if fit else []), as_html)
    elif as_json:
        parts = [as_dict(each, device, limit_bytes) for each in (before, after)]
        typer.echo(json.dumps({"snapshots": parts} | changes_as_dict(before, after, device, fit), indent=2))
    else:
        show(new_console(), memory_change(before, after, device, fit_texts(fit, limit) if fit else []))


def _write(text: str, path: Path) -> None:
    from ...base.page_file import write_page

    cli.write_html(partial(write_page, text=text), path)


def _file(path: Path, rank: int | None) -> Path:
    """Return the file to read, and print which one of a folder it is."""
    from ...read.memory.read import chosen_snapshot

    chosen = chosen_snapshot(path, rank)
    if chosen.text:
        cli.print_message(chosen.text)
    return chosen.path


def _batches(given: list[int], snapshots: int) -> list[int]:
    """Return the batch sizes of the snapshots; none if none are given."""
    with cli.value_of("--batch"):
        if given and len(given) != snapshots:
            raise ValueError(f"one for each snapshot is accepted: {', '.join(map(str, given))}")
        if len(given) == 2 and given[0] == given[1]:
            raise ValueError(f"two different ones are accepted: {given[0]}, {given[1]}")
    return given


def _fit(before: MemorySnapshot, after: MemorySnapshot, device: int, batches: list[int]) -> BatchFit | None:
    """Return how the passes grow with the batch; None if the batch sizes are not known."""
    from ...read.memory.batch import fit_batches

    if not batches:
        return None
    with cli.value_of("--batch"):
        for each in (before, after):
            if each.failed(device):
                needed = "an estimate from two batch sizes needs snapshots in which no allocation failed"
                raise ValueError(f"{needed}: {each.path}")
        first, second = ((each.timeline(device), each.passes) for each in (before, after))
        return fit_batches(first, second, (batches[0], batches[1]))


def _device(read: list[MemorySnapshot], wanted: int | None) -> int:
    """Return the GPU to show: ``wanted``, or the one whose peak is the highest in all snapshots."""
    there = sorted(set.intersection(*(set(each.devices) for each in read)))
    if not there:
        cli.print_message(f"no GPU has memory in {' and in '.join(str(each.path) for each in read)}")
        raise typer.Exit(1)
    if wanted is None:
        return max(there, key=lambda device: max(each.peak(device).bytes for each in read))
    with cli.value_of("--device"):
        if wanted not in there:
            raise ValueError(f"GPUs with memory in every snapshot are {', '.join(map(str, there))}: {wanted}")
    return wanted


subcommand = cli.subcommand_of(memory)
