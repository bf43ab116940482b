"""Exports findings as SARIF 2.1.0, the format of code scanning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...base.findings import Site, SyncFinding
from ...base.source_paths import root_of
from ...explain.waits.fixes import fix_of
from ...explain.waits.report import SyncReport

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"high": "error", "medium": "warning", "low": "note"}
_BASE = "%SRCROOT%"
_NOT_COVERED = (
    "Code in the step could not be checked, so synchronizations may be missing there.",
    "Run the step with live detection on a GPU to see them.",
)


def root_of_repository() -> Path:
    """Return the root of the repository of the current folder; the folder itself outside of one."""
    try:
        current = Path.cwd()
    except FileNotFoundError:  # it was removed
        current = Path(Path(__file__).anchor)
    return root_of(current) or current


def to_sarif(reports: Sequence[SyncReport]) -> str:
    """Return the findings of ``reports`` as one log with one run, as code scanning requires.

    Files are relative to the root of the repository of the current folder. A finding
    without a location, and what ended a run, become notifications of the tool.
    """
    root = root_of_repository()
    results: list[dict[str, Any]] = []
    rules: dict[str, dict[str, Any]] = {}
    notifications: list[dict[str, Any]] = []
    for one in reports:
        for finding in one.findings:
            rule = _rule(finding)
            rules.setdefault(rule["id"], rule)
            if finding.site is None and finding.via is None:
                notifications.append(notification(f"{_message(one, finding)} (thread {finding.thread or '?'})"))
            else:
                results.append(_result(one, finding, root) | {"ruleIndex": list(rules).index(rule["id"])})
        notifications += [notification(sentence) for sentence in one.coverage]
        if one.unavailable_reason:
            notifications.append(notification(f"nothing could be checked: {one.unavailable_reason}", "error"))
        if one.ended is not None:
            notifications.append(notification(f"the run ended early: {one.ended}", "error"))
    successful = all(one.finished and not one.unavailable_reason for one in reports)
    return log(list(rules.values()), results, notifications, successful, root)


def log(
    rules: list[dict[str, Any]],
    results: list[dict[str, Any]],
    notifications: list[dict[str, Any]],
    successful: bool,
    root: Path,
) -> str:
    """Return a log with one run, whose files are relative to ``root``."""
    run = {
        "tool": {"driver": {"name": "instrument", "rules": rules}},
        "originalUriBaseIds": {_BASE: {"uri": f"{root.as_uri()}/".replace("////", "///")}},
        "invocations": [{"executionSuccessful": successful, "toolExecutionNotifications": notifications}],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _rule(finding: SyncFinding) -> dict[str, Any]:
    if not finding.covered:
        return {
            "id": "sync/not-covered",
            "shortDescription": {"text": "Not covered"},
            "fullDescription": {"text": _NOT_COVERED[0]},
            "help": {"text": " ".join(_NOT_COVERED)},
        }
    # One rule for all lines of the operation; the message has the fix for a library's line
    fix, what = fix_of(replace(finding, via=None)), f"{finding.op} makes the CPU wait for the GPU"
    text, markdown = fix.text, fix.text
    if fix.before:
        text += f"\nBefore:\n{fix.before}\nAfter:\n{fix.after}"
        markdown += f"\n```python\n# before\n{fix.before}\n# after\n{fix.after}\n```"
    copied = f"/{finding.direction}" if finding.direction else ""
    return {
        "id": f"sync/{finding.op}{copied}",
        "shortDescription": {"text": what},
        "fullDescription": {"text": f"{what}, which then has nothing to do until the CPU has launched more work."},
        "help": {"text": text, "markdown": markdown},
        "properties": {"tags": ["performance", "gpu"]},
    }


def _message(results: SyncReport, finding: SyncFinding) -> str:
    if not finding.covered:
        return f"Not covered: {finding.cause}"
    often = str(results.pattern(finding))
    region = f", in region {'/'.join(finding.region)}" if finding.region else ""
    fix = f" {finding.fix.text}" if finding.fix else ""
    return f"{finding.op} makes the CPU wait for the GPU: {finding.cause} ({often}{region}).{fix}"


def _result(results: SyncReport, finding: SyncFinding, root: Path) -> dict[str, Any]:
    site = finding.site or finding.via
    assert site is not None
    result: dict[str, Any] = {
        "ruleId": _rule(finding)["id"],
        "level": _LEVELS[results.severity(finding)],
        "message": {"text": _message(results, finding)},
        "locations": [location(site, root)],
        "partialFingerprints": {"instrumentSync/v1": finding.fingerprint},
        "occurrenceCount": max(finding.count, 1),
    }
    if finding.site and finding.via:
        via = location(finding.via, root) | {
            "id": 1,
            "message": {"text": "the line of the library that synchronizes"},
        }
        result["relatedLocations"] = [via]
    if finding.allowed is not None:
        kind = "external" if finding.fingerprint in results.listed else "inSource"
        result["suppressions"] = [{"kind": kind, "justification": finding.allowed}]
    return result


def location(site: Site, root: Path) -> dict[str, Any]:
    """Return the location of a line."""
    region: dict[str, Any] = {"startLine": max(site.line, 1)}
    if site.code:
        region["snippet"] = {"text": site.code}
    logical = [{"name": site.function, "kind": "function"}] if site.function else []
    physical = {"artifactLocation": _artifact_location(site.file, root), "region": region}
    return {"physicalLocation": physical, "logicalLocations": logical}


def _artifact_location(file: str, root: Path) -> dict[str, str]:
    """Return the location of ``file`` relative to ``root``; its absolute URI if it is elsewhere."""
    path = Path(file)
    if path.is_relative_to(root):
        path = path.relative_to(root)
    elif path.is_absolute():
        return {"uri": path.as_uri()}
    return {"uri": quote(path.as_posix()), "uriBaseId": _BASE}


def notification(text: str, level: str = "note") -> dict[str, Any]:
    """Return a message of the tool that has no location."""
    return {"level": level, "message": {"text": text}}
