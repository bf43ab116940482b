"""The description of one public training script: where it is, how it is run and what is true of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """A replacement in a file of the repository: `old` occurs there once, and `new` has as many lines."""

    file: str
    old: str
    new: str


def waits(file: str, **lines: str) -> tuple[str, ...]:
    """Return ``FILE:LINE OP`` for each line number in `lines`, whose keywords are the operations."""
    return tuple(f"{file}:{line} {op}" for op, numbers in lines.items() for line in numbers.split())


@dataclass(frozen=True)
class Script:
    """A public training script with the facts that a person found by reading it.

    Attributes:
        name: what it is called here.
        repository: ``OWNER/NAME`` on GitHub.
        commit: the commit, 40 hexadecimal digits.
        file: the script, relative to `folder`.
        folder: the working directory, relative to the repository's root.
        parts: the folders and files of the repository that are needed.
        shows: why it is in the list.
        args: its command line.
        updates: how many optimizer updates a process makes; where several optimizers take turns, those of
            the first one to step; without an optimizer, the backward passes.
        counted: how `updates` was counted by hand.
        loss: a regular expression whose group is the loss that the script prints.
        regions: names that a recorded window must contain.
        waits: ``FILE:LINE OP`` of each line that makes the CPU wait for the GPU, where the script uses one.
        data: makes the data, given the root of the checkout.
        edits: changes without which the script does not run here or does not end.
        times: regular expressions of printed times, rates and process numbers, which differ from run to run.
        cpu_lines: lines that are printed only where no GPU is used.
        needs: packages that it imports beside torch and numpy.
        env: environment variables.
        launcher: a command in front of the script, such as torchrun.
        processes: how many processes train.
        evaluations: how often a process that does not train calls the model.
        ordered: whether lines come in the same order each time.
        repeatable: whether two plain runs print the same numbers.
        gpu_args: added to `args` under `instrument syncs`, so that the script uses a GPU.
        without_syncs: why it cannot run under `instrument syncs`.
    """

    name: str
    repository: str
    commit: str
    file: str
    folder: str
    parts: tuple[str, ...]
    shows: str
    args: str
    updates: int
    counted: str
    loss: str
    regions: tuple[str, ...]
    waits: tuple[str, ...] = ()
    data: Callable[[Path], None] = lambda root: None
    edits: tuple[Edit, ...] = ()
    times: tuple[str, ...] = ()
    cpu_lines: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()
    processes: int = 1
    evaluations: int = 0
    ordered: bool = True
    repeatable: bool = True
    gpu_args: str = ""
    without_syncs: str = ""
