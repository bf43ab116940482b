"""The description of one public training script: its source, its command line and its expected results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """A replacement in a file of the repository; `old` occurs there once, and `new` has as many lines."""

    file: str
    old: str
    new: str


def syncs(file: str, **lines: str) -> tuple[str, ...]:
    """Return ``FILE:LINE OP`` for each line number in `lines`, whose keywords are the operations."""
    return tuple(f"{file}:{line} {op}" for op, numbers in lines.items() for line in numbers.split())


@dataclass(frozen=True)
class Script:
    """A public training script with facts that a person found by reading it.

    Attributes:
        name: the name in the results.
        repository: ``OWNER/NAME`` on GitHub.
        commit: the commit, 40 hexadecimal digits.
        file: the script, relative to `folder`.
        folder: the working directory, relative to the repository's root.
        parts: the needed folders and files of the repository.
        shows: the reason why it is in the list.
        args: its command line.
        updates: the number of optimizer updates of a process; of several optimizers, the updates of the
            first one to step; without an optimizer, the backward passes.
        counted: how `updates` was counted by hand.
        loss: a regular expression whose group is the loss that the script prints.
        regions: names that a recorded window must contain.
        syncs: ``FILE:LINE OP`` of each line that synchronizes if the script uses a GPU.
        data: writes the data, given the root of the checkout.
        edits: changes that the script needs to run on this machine and to end.
        times: regular expressions of printed times, rates and process numbers, which differ from run to run.
        cpu_lines: lines that are printed only without a GPU.
        needs: packages that it imports besides torch and numpy.
        env: environment variables.
        launcher: a command in front of the script, such as torchrun.
        processes: the number of processes that train.
        evaluations: the number of model calls of a process that does not train.
        ordered: whether lines are printed in the same order each time.
        repeatable: whether two plain runs print the same numbers.
        gpu_args: arguments that make the script use a GPU, added under `instrument syncs`.
        without_syncs: the reason why it cannot run under `instrument syncs`.
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
    syncs: tuple[str, ...] = ()
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
