"""The SARIF 2.1.0 output has what its schema and GitHub's code scanning require."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from instrument.base.findings import NOT_COVERED, Site
from instrument.explain.waits.report import SyncReport
from instrument.show.text.sarif import to_sarif
from instrument.syncs.baseline import Baseline, BaselineEntry

from .reports import finding, report, script


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file in a repository whose subfolder is the current folder."""
    path = script(tmp_path, "src/my code/train #1.py")
    monkeypatch.chdir(path.parent)
    return path


def run_of(*reports: SyncReport) -> dict[str, Any]:
    """Return the only run of the log, after checking the schema's requirements."""
    log = json.loads(to_sarif(reports))
    assert ("2.1.0", "https://json.schemastore.org/sarif-2.1.0.json") == (log["version"], log["$schema"])
    (run,) = log["runs"]
    assert set(run) <= {"tool", "originalUriBaseIds", "invocations", "columnKind", "results"}
    driver = run["tool"]["driver"]
    assert driver["name"]
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(ids) == len(set(ids))
    for rule in driver["rules"]:
        texts = [rule["shortDescription"], rule["fullDescription"], rule["help"]]
        assert all(isinstance(text["text"], str) and text["text"] for text in texts)
    for base in run["originalUriBaseIds"].values():
        assert base["uri"].startswith("file:///")
        assert base["uri"].endswith("/")
    (invocation,) = run["invocations"]
    assert isinstance(invocation["executionSuccessful"], bool)
    for notification in invocation["toolExecutionNotifications"]:
        assert notification["level"] in ("none", "note", "warning", "error")
        assert notification["message"]["text"]
    assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
    for result in run["results"]:
        _check(result, ids, set(run["originalUriBaseIds"]))
    return run


def _check(result: dict[str, Any], rules: list[str], bases: set[str]) -> None:
    assert rules[result["ruleIndex"]] == result["ruleId"]
    assert result["level"] in ("none", "note", "warning", "error")
    assert result["message"]["text"]
    assert len(result["locations"]) == 1
    for location in result["locations"] + result.get("relatedLocations", []):
        artifact = location["physicalLocation"]["artifactLocation"]
        assert re.fullmatch(r"[A-Za-z0-9._~!$&'()*+,;=:@/%-]+", artifact["uri"])
        assert artifact["uri"].startswith("file:///") or artifact["uriBaseId"] in bases
        assert not artifact["uri"].startswith(("/", ".."))
        assert location["physicalLocation"]["region"]["startLine"] >= 1
    assert all(isinstance(value, str) for value in result["partialFingerprints"].values())
    assert all(one["kind"] in ("inSource", "external") for one in result.get("suppressions", []))


def test_result(path: Path) -> None:
    """A result has the line, a path relative to the repository, and the fix."""
    found = report(finding("item", 3, path, region=("train", "forward")))
    run = run_of(found)
    (result,) = run["results"]
    assert result == {
        "ruleId": "sync/item",
        "ruleIndex": 0,
        "level": "error",
        "message": {
            "text": "item makes the CPU wait for the GPU: reads a value back from the GPU (once in the step, in "
            "region train/forward). Keep the numbers on the GPU and read them only every so many steps."
        },
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": "src/my%20code/train%20%231.py", "uriBaseId": "%SRCROOT%"},
                    "region": {"startLine": 3, "snippet": {"text": "total = loss.item()"}},
                },
                "logicalLocations": [{"name": "step", "kind": "function"}],
            }
        ],
        "partialFingerprints": {"instrumentSync/v1": found.findings[0].fingerprint},
        "occurrenceCount": 1,
    }
    (rule,) = run["tool"]["driver"]["rules"]
    assert "total += loss.detach()" in rule["help"]["markdown"]
    assert run["originalUriBaseIds"]["%SRCROOT%"]["uri"] == f"{path.parents[2].as_uri()}/"
    assert run["invocations"] == [{"executionSuccessful": True, "toolExecutionNotifications": []}]


def test_levels(path: Path) -> None:
    """The level of a result is the finding's severity."""
    found = [
        finding("item", 3, path),
        finding("to", 2, path, direction="H2D"),
        finding("bool", 4, path, steps=(None,)),
        finding(NOT_COVERED, 5, path),
    ]
    levels = {result["ruleId"]: result["level"] for result in run_of(report(*found))["results"]}
    assert {
        "sync/item": "error",
        "sync/to/H2D": "warning",
        "sync/bool": "note",
        "sync/not-covered": "note",
    } == levels


def test_suppressions(path: Path) -> None:
    """Allowed findings are suppressed results with a reason, from the code or from a file."""
    found = report(finding("item", 3, path), finding("bool", 4, path, allowed="in the code"))
    fingerprint = found.syncs[0].fingerprint
    Baseline({fingerprint: BaselineEntry(fingerprint, None, "in a file")}).allow(found, "x")
    suppressed = {result["ruleId"]: result["suppressions"] for result in run_of(found)["results"]}
    assert {
        "sync/item": [{"kind": "external", "justification": "in a file"}],
        "sync/bool": [{"kind": "inSource", "justification": "in the code"}],
    } == suppressed


def test_locations(path: Path) -> None:
    """A library line is a related location, other files have absolute URIs, and no line gives a notification."""
    via = Site("/v/site-packages/torch/x.py", 9, "f")
    results = run_of(
        report(
            finding("item", 3, path, via=via),
            finding("bool", site=None, via=via),
            finding("int", site=Site("<stdin>", 0, "")),
            finding("cpu", site=None, thread="loader"),
        )
    )
    uris = [r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in results["results"]]
    assert {"src/my%20code/train%20%231.py", "file:///v/site-packages/torch/x.py", "%3Cstdin%3E"} == set(uris)
    related = [result["relatedLocations"] for result in results["results"] if "relatedLocations" in result]
    assert ["file:///v/site-packages/torch/x.py"] == [
        one[0]["physicalLocation"]["artifactLocation"]["uri"] for one in related
    ]
    (notification,) = results["invocations"][0]["toolExecutionNotifications"]
    assert "thread loader" in notification["message"]["text"]


def test_several_targets(path: Path) -> None:
    """Several targets share one run, as GitHub accepts one per tool; errors and coverage are notifications."""
    failed = report(finding("item", 3, path), error=ValueError("bad"), coverage=["a sentence"])
    run = run_of(
        report(finding("item", 3, path), finding("bool", 4, path)), failed, report(unavailable_reason="no GPU")
    )
    assert 3 == len(run["results"])
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"] is False
    assert [
        ("note", "a sentence"),
        ("error", "the run ended early: ValueError: bad"),
        ("error", "nothing could be checked: no GPU"),
    ] == [(one["level"], one["message"]["text"]) for one in invocation["toolExecutionNotifications"]]


def test_one_report(path: Path) -> None:
    """`SyncReport.to_sarif` returns the log of one report."""
    found = report(finding("item", 3, path))
    assert found.to_sarif() == to_sarif([found])
