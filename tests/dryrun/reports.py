"""Helpers that run a step and summarize its report."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument import dry_run
from instrument.base.findings import SyncFinding
from instrument.explain.waits.report import SyncReport
from tests.support import warm
from tests.support.programs import environment

Wait = tuple[str, int, str]  # the operation, how often, the line


def listed(report: SyncReport) -> list[Wait]:
    """Return the synchronizations of a report, from the first line to the last."""
    found = sorted(report.syncs, key=lambda found: (found.site.line if found.site else 0, found.op))
    return [(each.op, each.count, each.site.code if each.site else "") for each in found]


def gpu(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", **options)


def ran(step: Callable[[], Any], **options: Any) -> SyncReport:
    """Return the report of a step that ran to its end."""
    report = dry_run(step, **options)
    if report.error is not None:
        raise report.error
    return report


def waits(step: Callable[[], Any], **options: Any) -> list[Wait]:
    """Return the synchronizations of a step that is fully covered."""
    report = ran(step, **options)
    assert [] == [found.cause for found in report.not_covered]
    return listed(report)


def only(report: SyncReport) -> SyncFinding:
    (found,) = report.syncs
    return found


both = pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])


SOURCE = str(Path(instrument.__file__).parent.parent)


def finished(step: Callable[[], object], **more: Any) -> SyncReport:
    """Return the report of a run without an error."""
    report = dry_run(step, **more)
    assert report.error is None, report
    return report


def ops(report: SyncReport) -> dict[str, int]:
    """Return how often each operation synchronized."""
    counts: Counter[str] = Counter()
    for found in report.syncs:
        counts[found.op] += found.count
    return dict(counts)


def notes(report: SyncReport) -> list[str]:
    return [found.cause for found in report.not_covered]


def alone(code: str) -> Any:
    """Return the JSON that ``code`` prints in a process of its own."""
    printed = warm.run([sys.executable, "-c", code], environment(), check=True).stdout
    return json.loads(printed.splitlines()[-1])  # gloo prints lines of its own
