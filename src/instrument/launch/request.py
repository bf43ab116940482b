"""What is to be run under a vendor's profiler, and what a profiler has to know about itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from .installed import Tool


@dataclass(frozen=True)
class LaunchRequest:
    """What the user asked for.

    Attributes:
        command: the program with its arguments.
        out: the folder for reports; windows leave their ``manifest.jsonl`` there.
        windows: how many the plan has; None where they go on for ever or nobody knows; 0 records the whole run.
        environment: of the program.
        regions: ncu: measure the kernels inside these only.
        launches: ncu: measure so many kernel launches at most; None is 100.
        extra: further options for the tool, as they are.
    """

    command: Sequence[str]
    out: Path
    windows: int | None
    environment: Mapping[str, str]
    regions: Sequence[str] = ()
    launches: int | None = None
    extra: Sequence[str] = ()


class Vendor(Protocol):
    """One vendor's profiler.

    Attributes:
        title: what people call it.
        get: how to come by it.
        rank: what stands for the rank of a process in the name of its report; None where one report holds all.
        percent: what stands for a percent sign there.
    """

    title: str
    get: str
    rank: str | None
    percent: str

    def prefix(self, request: LaunchRequest, tool: Tool, report: str, *, workers: bool) -> list[str]:
        """Return the command line up to the program.

        Args:
            request: what to run.
            tool: what to run it with.
            report: the path of the report without its suffix.
            workers: each rank of a job is run under a tool of its own.
        """

    def reports(self, report: Path) -> list[Path]:
        """Return what was written, in order."""

    def show(self, reports: Sequence[Path], console: Console) -> None:
        """Print what the reports say."""
