"""Prints the outcome of a run under a vendor's profiler."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import stderr
from ..config import settings
from ..console import print_line
from ..guard import guard
from ..run_folder import NAME, entries_of
from ..traces.trace_files import rank_from_name
from ..windows.manifest import size_of
from .request import LaunchRequest, Vendor


def manifest_size(out: Path) -> int:
    """Return the size of the manifest, before the run."""
    return size_of(out / NAME) or 0


def print_outcome(vendor: Vendor, request: LaunchRequest, report: Path, manifest: int, code: int) -> None:
    """Print a summary of the reports on standard error or, if there are none, the reason.

    Args:
        vendor: the profiler.
        request: the program that ran.
        report: the path of the reports without the suffix that the tool adds.
        manifest: the `manifest_size` before the run.
        code: the program's exit code.
    """
    text = io.StringIO()  # standard error may be closed or full
    console = Console(file=text, width=Console(stderr=True).width)
    with guard.contained("reading the report"):
        reports = vendor.reports(report)
        if reports:
            _print_reports(vendor, reports, rank_from_name(report), console)
        else:
            reason = missing_report_reason(request, list(entries_of(request.out, manifest)), code)
            print_line(console, f"instrument: {vendor.title} wrote no report: {reason}")
    with suppress(OSError, ValueError, AttributeError):  # closed, broken or missing
        stderr.write(text.getvalue(), sys.stderr)


def _print_reports(vendor: Vendor, reports: Sequence[Path], rank: int | None, console: Console) -> None:
    for path in reports:
        print_line(console, f"instrument: {vendor.title} wrote {path}")
    if not settings.summary or rank:  # only the first of ranks that were each launched this way
        return
    try:
        vendor.show(reports, console)
    except Exception as error:  # a truncated report, a tool that fails to export it: the run itself succeeded
        print_line(console, f"instrument: the report cannot be summarized: {error}")


def missing_report_reason(request: LaunchRequest, windows: Sequence[dict[str, Any]], code: int) -> str:
    """Return the likely reason for a missing report, and how to fix it.

    Args:
        request: the program that ran.
        windows: the outcome of each window, as in the manifest.
        code: the program's exit code.
    """
    ended = f"the program ended with exit code {code}"
    if request.windows == 0:
        return f"{ended}; see the profiler's messages above" if code else "see its messages above"
    if any(window.get("status") in ("recorded", "partial") for window in windows):
        return "a window opened, but was not recorded; see its messages above, and run it again"
    if windows:
        first = windows[0]
        span = "-".join(str(step) for step in dict.fromkeys(first.get("planned_steps", ())) if step is not None)
        fix = "; choose earlier steps" if first.get("status") == "not reached" else ""
        return f"window {first.get('window')} (steps {span}) was {first.get('status')}, {first.get('reason')}{fix}"
    if code:
        return f"{ended} before a window opened, or the profiler could not start it; see its messages above"
    return (
        "no window opened, because no steps were found: the program needs a supported framework, an optimizer "
        "or instrument.profile; or record the whole run: --steps all"
    )
