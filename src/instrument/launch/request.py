"""`LaunchRequest`: a program to run under a vendor's profiler; `Vendor`: the interface of a profiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from .installed import Tool


@dataclass(frozen=True)
class LaunchRequest:
    """A program to run under a vendor's profiler.

    Attributes:
        command: the program with its arguments.
        out: the folder for reports and for the ``manifest.jsonl`` of the windows.
        windows: the number of windows in the schedule; None if endless or unknown; 0 records the whole run.
        environment: the environment variables of the program.
        regions: measure only the kernels inside these regions (ncu).
        launches: measure at most this many kernel launches (ncu); None is 100.
        extra: further options, passed to the tool unchanged.
    """

    command: Sequence[str]
    out: Path
    windows: int | None
    environment: Mapping[str, str]
    regions: Sequence[str] = ()
    launches: int | None = None
    extra: Sequence[str] = ()


class Vendor(Protocol):
    """The interface of a vendor's profiler.

    Attributes:
        title: the profiler's name for people.
        get: where to get the profiler.
        rank: the placeholder for the rank of a process in the name of its report; None if one report contains all.
        percent: the escape for a percent sign in that name.
    """

    title: str
    get: str
    rank: str | None
    percent: str

    def prefix(self, request: LaunchRequest, tool: Tool, report: str, *, workers: bool) -> list[str]:
        """Return the command line up to the program.

        Args:
            request: the program to run.
            tool: the installed profiler.
            report: the path of the report without its suffix.
            workers: whether each rank of a job runs under its own tool.
        """

    def reports(self, report: Path) -> list[Path]:
        """Return the written reports, in order."""

    def show(self, reports: Sequence[Path], console: Console) -> None:
        """Print the content of the reports."""
