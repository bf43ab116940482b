"""docs/rules.md lists every rule as its docstring says, and how often it fires on the real traces."""

from __future__ import annotations

import re

from scripts.rules_page import PAGE, diagnosed, entry, fired, page

from instrument.explain.diagnosis.diagnose import Diagnosis
from instrument.explain.rules.rule import RULES
from tests.support.shared_traces import FOLDER, shared


def test_every_rule_is_described() -> None:
    """Each rule is on the page with its docstring, its thresholds, and where it was seen."""
    text = PAGE.read_text()
    for rule in RULES.values():
        assert entry(rule) in text, f"{rule.name}: run python -m scripts.rules_page FOLDER"
    assert sorted(re.findall(r"^### (.+)$", text, re.MULTILINE)) == sorted(RULES)
    assert "(0 of 0)" not in text, "the page was made without traces"
    assert len(re.findall(r"Fires on \d+ of \d+ real traces: |Not seen in a real trace ", text)) == len(RULES)


def test_the_readme_counts_the_rules() -> None:
    """The README has the number of rules."""
    assert f"[{len(RULES)} rules](docs/rules.md)" in (PAGE.parent.parent / "README.md").read_text()


def checked(found: tuple[str, Diagnosis]) -> tuple[str, Diagnosis]:
    """Check that no rule fails, wins more than the step, or has a finding without evidence."""
    name, diagnosis = found
    assert diagnosis.failed == {}, name
    assert all(each.evidence and (each.win_ns or 0) <= diagnosis.step_ns + 1 for each in diagnosis.findings), name
    return found


def test_every_real_trace() -> None:
    """Each real trace has a sound diagnosis; from those that the page was made from, it is made alike."""
    shared("tl_h100_owlv2.json.gz")
    (count,) = set(re.findall(r" \(0 of (\d+)\)", PAGE.read_text()))
    names, read = fired(map(checked, diagnosed(FOLDER)))
    assert read > 20
    if read == int(count):
        assert page(names, read) == PAGE.read_text()
