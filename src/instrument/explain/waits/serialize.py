"""Exports a report as JSON."""

from __future__ import annotations

import json
from typing import Any

from ...base.findings import Site, SyncFinding
from .report_data import ReportData

VERSION = 1


def to_json(results: ReportData) -> str:
    """Return the report as JSON text."""
    return json.dumps(as_dict(results), indent=2)


def as_dict(results: ReportData) -> dict[str, Any]:
    """Return the report as a dict of JSON values; while ``version`` is 1, keys are only added.

    ``source`` ("live", "dry run", "trace"), ``steps`` (number checked; 0: the whole run counts as one step),
    ``syncs_per_step`` (synchronizations that are not allowed, the greatest number in any step), ``median_syncs``
    (their median), ``finished``, ``error`` (null, or what ended the run), ``unavailable`` (empty, or why nothing
    could be checked), ``dropped`` (synchronizations at lines that are not listed), ``exceeded`` (sentences on the
    budget), ``coverage`` (sentences), and ``findings``, worst first, each with

    - ``status`` ("sync", "allowed", "not covered"), ``severity`` ("high", "medium", "low"), ``op``, ``cause``;
    - ``site`` and ``via`` (null, or file, line, function, code), ``vias`` (line and count of each), ``thread``,
      ``backward``, ``region`` (the names from the outermost, of the region with most calls), ``regions`` (path and
      count of each);
    - ``count``, ``pattern`` ("in 1 of 7 steps, 61 times"), ``in_steps`` (number of steps that synchronize there),
      ``outside`` (calls outside the steps), ``per_step`` (mean), ``step`` (the first), ``steps`` (number and
      count of each; number null outside steps);
    - ``direction`` ("H2D", "D2H", null), ``bytes``, ``blocked_ns``, ``timed`` (number of calls in
      that sum), ``untimed`` (why it is null), ``idle_ns``: integers, null where unknown;
    - ``allowed`` (the reason, or null), ``forbidden`` (inside `no_syncs`), ``fingerprint``, and ``fix`` (text,
      before, after; null for what is not covered).
    """
    return {
        "version": VERSION,
        "source": results.source,
        "steps": results.steps,
        "syncs_per_step": results.max_in_step(*results.syncs),
        "median_syncs": results.typical(*results.syncs),
        "finished": results.finished,
        "error": results.ended,
        "unavailable": results.unavailable_reason,
        **{name: getattr(results, name) for name in ("dropped", "exceeded", "coverage")},
        "findings": [_finding(results, found) for found in results.findings],
    }


def _finding(results: ReportData, found: SyncFinding) -> dict[str, Any]:
    pattern = results.pattern(found)
    return {
        "status": "not covered" if not found.covered else "sync" if found.allowed is None else "allowed",
        "severity": results.severity(found),
        "op": found.op,
        "cause": found.cause,
        "site": _site(found.site),
        "via": _site(found.via),
        "vias": [{"line": _site(via), "count": count} for via, count in found.vias.most_common()],
        **{name: getattr(found, name) for name in ("thread", "backward", "region")},
        "regions": [{"path": path, "count": count} for path, count in found.regions.most_common()],
        "count": found.count,
        "pattern": str(pattern),
        "in_steps": len(pattern.counts),
        "outside": pattern.outside,
        "per_step": results.per_step(found),
        "step": found.step,
        "steps": [{"number": number, "count": count} for number, count in found.steps.items()],
        **{name: getattr(found, name) for name in ("direction", "bytes", "blocked_ns", "timed")},
        "untimed": results.why_untimed(found),
        **{name: getattr(found, name) for name in ("idle_ns", "allowed", "forbidden", "fingerprint")},
        "fix": found.fix and vars(found.fix),
    }


def _site(site: Site | None) -> dict[str, Any] | None:
    return None if site is None else vars(site) | {"code": site.code}
