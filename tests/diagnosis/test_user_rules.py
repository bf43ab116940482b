"""Rules of users: how they are added, and that what they do wrong stays theirs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import instrument
from instrument.base.config import settings
from instrument.base.findings import Evidence, Finding
from instrument.explain.rules.rule import GROUP, Rule, apply_rules
from instrument.explain.rules.trace_facts import MissingEvidenceError, TraceFacts

from .made_loops import MadeLoop
from .test_diagnose import idle_loop, run, write


def test_rules_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule of a user runs; one that fails is reported, one that lacks evidence is, too."""
    monkeypatch.setattr(settings, "strict", False)

    @instrument.rule("always")
    def always(facts: TraceFacts, *, most: int = 2) -> Iterator[Finding]:
        yield facts.finding(f"more than {most}", win_ns=round(facts.step_ns))

    @instrument.rule("broken")
    def broken(facts: TraceFacts) -> Iterator[Finding]:
        yield facts.finding("before", win_ns=None)
        raise RuntimeError("no")

    @instrument.rule("abstains")
    def abstains(facts: TraceFacts) -> Iterator[Finding]:
        raise MissingEvidenceError("no shapes")
        yield

    found = instrument.diagnose(MadeLoop().trace(), thresholds={"always": {"most": 7}})
    assert (found.findings[0].rule, found.findings[0].title) == ("always", "more than 7")
    assert found.failed == {"broken": "RuntimeError('no')"}
    assert found.abstained["abstains"] == "no shapes"


def test_what_the_decorator_checks() -> None:
    """A finding below the rule's share of a step is left out; a rule on GPU times abstains without them."""

    @instrument.rule("small", share=0.2)
    def small(facts: TraceFacts) -> Iterator[Finding]:
        number = Evidence("tenth", 0.1, "1", "A tenth.")
        yield facts.finding("a tenth", number, win_ns=round(facts.step_ns / 10))

    @instrument.rule("on-gpu", gpu=True)
    def on_gpu(facts: TraceFacts) -> Iterator[Finding]:
        yield facts.finding("seen")

    trace = MadeLoop().trace()
    assert not any(each.rule == "small" for each in instrument.diagnose(trace).findings)
    found = instrument.diagnose(trace, thresholds={"small": {"share": 0.05}}).findings
    assert [each.evidence[0].name for each in found if each.rule == "small"] == ["tenth"]
    without = instrument.diagnose(replace(trace, gpu=trace.gpu.where(slice(0, 0))))
    assert without.abstained["on-gpu"] == "the trace has no GPU work"


def test_a_place_with_a_visible_and_a_hidden_finding() -> None:
    """Nothing became of a finding that is visible on both sides, if its rule hides another one at its place."""

    @instrument.rule("twice", share=0.1)
    def twice(facts: TraceFacts) -> Iterator[Finding]:
        half_ns = round(facts.step_ns / 2)
        yield facts.finding("seen", win_ns=facts.win_by("--without dataloader", half_ns))
        yield facts.finding("hidden", win_ns=facts.win_by("--without dataloader", 0, half_ns))

    trace = idle_loop().trace()
    assert "hidden" in {each.title for each in instrument.diagnose(trace).hidden}
    change = instrument.compare(trace, trace)
    assert {name: findings for name, findings in change.findings().items() if findings} == {}


@pytest.mark.parametrize(("name", "error"), [(1, TypeError), ("Two Words", ValueError), ("", ValueError)])
def test_names_of_rules(name: Any, error: type[Exception]) -> None:
    """A rule has a name in lower case with hyphens."""
    with pytest.raises(ValueError, match=r'"of" must be one of compute, communication, .*: .kernels.'):
        instrument.rule("fills", of="kernels")
    with pytest.raises(error, match='"name" must be'):
        instrument.rule(name)


def test_rules_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution adds rules by an entry point; one that cannot be imported is reported."""
    (tmp_path / "house_rules.py").write_text(
        "import instrument\n@instrument.rule('house')\ndef house(facts):\n    '''Ours.'''\n"
        "    yield facts.finding('ours', win_ns=None)\n"
    )
    about = tmp_path / "house-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: house\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{GROUP}]\nhouse = house_rules\ngone = no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = instrument.diagnose(MadeLoop().trace())
    assert [each.title for each in found.findings] == ["ours"]
    assert found.failed == {"gone": "ModuleNotFoundError(\"No module named 'no_such_module'\")"}
    assert "ours" not in run(write(tmp_path / "one.json", MadeLoop()), "--ignore", "house").stdout
    sys.modules.pop("house_rules")


def test_a_rule_replaces_one_of_the_library() -> None:
    """A later rule of the same name replaces the earlier one, wherever the decorator was imported first."""
    instrument.rule("ours")(lambda facts: [])
    instrument.rule("ours")(lambda facts: [])
    assert instrument.diagnose(idle_loop().trace()).replaced == ()
    instrument.rule("input-wait")(lambda facts: [facts.finding("ours", win_ns=None)])
    found = instrument.diagnose(idle_loop().trace())
    assert "ours" in {each.title for each in found.findings}
    said = "Rules of the library that others of the same name replace: input-wait."
    assert said in str(found)
    assert said in found.to_markdown()
    assert json.loads(found.to_json())["replaced"] == ["input-wait"]
    assert instrument.diagnose(idle_loop().trace(), ignore=["input-wait"]).replaced == ()


def test_a_rule_that_yields_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no finding is an error of the rule, and the others go on."""
    monkeypatch.setattr(settings, "strict", False)
    instrument.rule("odd")(lambda facts: ["text"])
    found = instrument.diagnose(idle_loop().trace())
    assert found.failed["odd"].startswith('TypeError("a rule must yield findings')
    assert found.findings[0].rule == "input-wait"


@pytest.mark.parametrize(
    "wrong",
    [
        {"win_ns": -1}, {"win_ns": math.nan}, {"win_ns": math.inf}, {"win_ns": 10**12}, {"win_ns": "3"},
        {"title": 3}, {"title": ""}, {"evidence": 5}, {"evidence": ["text"]}, {"fix": "faster"},
        {"severity": "huge"}, {"confidence": None}, {"coverage": 7.0}, {"at": "here"}, {"region": "loss"},
        {"evidence": [Evidence("a", math.nan, "1", "A.")]}, {"site": "train.py:3"}, {"nothing": 1},
    ],
)  # fmt: skip
def test_wrong_findings(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A finding with a wrong field fails its rule; what it yielded before counts, and the output is still JSON."""
    monkeypatch.setattr(settings, "strict", False)

    @instrument.rule("odd")
    def odd(facts: TraceFacts) -> Iterator[Finding]:
        yield facts.finding("good", win_ns=None)
        yield facts.finding(**{"title": "bad", "win_ns": 5, **wrong})

    found = instrument.diagnose(idle_loop().trace())
    assert [*found.failed] == ["odd"]
    assert {"good", "bad"} & {each.title for each in found.findings} == {"good"}
    assert found.to_json() and found.to_markdown() and str(found)


def test_a_rule_that_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that ends the program does not end the diagnosis."""
    monkeypatch.setattr(settings, "strict", False)
    instrument.rule("exits")(lambda facts: sys.exit(3))
    assert instrument.diagnose(idle_loop().trace()).failed == {"exits": "SystemExit(3)"}


def test_a_rule_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule cannot change what other rules read, and the trace stays the user's."""
    monkeypatch.setattr(settings, "strict", False)

    @instrument.rule("writes-gpu")
    def writes_gpu(facts: TraceFacts) -> Iterator[Finding]:
        facts.gpu.duration_ns[:] = 0
        yield facts.finding("changed", win_ns=None)

    @instrument.rule("writes-regions")
    def writes_regions(facts: TraceFacts) -> Iterator[Finding]:
        facts.trace.regions.name[:] = 0
        yield facts.finding("changed", win_ns=None)

    trace = idle_loop().trace()
    found = instrument.diagnose(trace)
    assert {*found.failed} == {"writes-gpu", "writes-regions"}
    trace.gpu.duration_ns[:] += np.int64(1)


def test_the_order_of_findings_with_an_unknown_win() -> None:
    """An unknown win counts as the least of its severity: a severe cause comes before small wins, a hint after."""
    wins = {"tenth": 0.2, "little": 0.05, "least": 0.001}

    def found(facts: TraceFacts) -> Iterator[Finding]:
        for name, share in wins.items():
            yield facts.finding(name, win_ns=int(share * facts.step_ns))
        for severity in ("low", "medium", "high"):
            yield facts.finding(severity, severity=severity)

    applied = apply_rules(TraceFacts(idle_loop().trace()), [Rule("order", found)], {})
    titles = [each.title for each in applied.findings]
    assert titles == ["tenth", "high", "little", "medium", "least", "low"]
