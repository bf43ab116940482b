"""What came of a run under a vendor's profiler, in words."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from ..config import settings
from ..guard import guard
from ..report.console import line
from ..traces.find import rank_of
from ..windows.manifest import NAME, entries_of, size_of
from .request import LaunchRequest, Vendor


def size(out: Path) -> int:
    """Return how much of the manifest there is before the run."""
    return size_of(out / NAME) or 0


def tell(vendor: Vendor, request: LaunchRequest, report: Path, manifest: int, code: int) -> None:
    """Print on standard error what the reports say or, where there are none, why.

    Args:
        vendor: who recorded.
        request: what was asked for.
        report: the path of the reports up to what the tool adds to it.
        manifest: the `size` of the manifest before the run.
        code: the program's exit code.
    """
    console = Console(file=io.StringIO(), width=Console(stderr=True).width)  # not what may be closed or full
    with guard.contained("looking for the report"):
        reports = vendor.reports(report)
        if reports:
            _read(vendor, reports, rank_of(report), console)
        else:
            reason = why(request, list(entries_of(request.out, manifest)), code)
            line(console, f"instrument: {vendor.title} left no report: {reason}")
    with suppress(OSError, ValueError, AttributeError):  # closed, broken or missing
        sys.stderr.write(console.file.getvalue())  # type: ignore[attr-defined]
        sys.stderr.flush()


def _read(vendor: Vendor, reports: Sequence[Path], rank: int | None, console: Console) -> None:
    for path in reports:
        line(console, f"instrument: {vendor.title} wrote {path}")
    if not settings.summary or rank:  # of ranks that were each launched so, the first speaks
        return
    try:
        vendor.show(reports, console)
    except Exception as error:  # a report that is cut off, a tool that cannot export it: the run itself went well
        line(console, f"instrument: the report is there, but {error}")


def why(request: LaunchRequest, windows: Sequence[dict[str, Any]], code: int) -> str:
    """Return the likely reason for a missing report, and the cure.

    Args:
        request: what was asked for.
        windows: what came of them, as in the manifest.
        code: the program's exit code.
    """
    ended = f"the program ended with exit code {code}"
    if request.windows == 0:
        return f"{ended}; see what the profiler says above" if code else "see what it says above"
    if any(window.get("status") in ("recorded", "partial") for window in windows):
        return "the window was marked, but not recorded; see what it says above, and run it again"
    if windows:
        first = windows[0]
        span = "-".join(str(step) for step in dict.fromkeys(first.get("planned_steps", ())) if step is not None)
        cure = "; ask for earlier steps" if first.get("status") == "not reached" else ""
        return (
            f"window {first.get('window')} (steps {span}) was {first.get('status')}, {first.get('reason')}{cure}"
        )
    if code:
        return f"{ended} before a window opened, or the profiler could not start it; see what it says above"
    return (
        "no window opened, since nothing told steps: the program needs a framework that tells them, an optimizer "
        "or instrument.profile; or record the whole run: --steps all"
    )
