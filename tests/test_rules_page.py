"""docs/rules.md lists every rule as its docstring says, and how often it fires on the real traces."""

from __future__ import annotations

import re

from scripts.rules_page import PAGE, entry, fired, page

from instrument.diagnosis.rule import RULES
from tests.support.shared_traces import FOLDER, shared


def test_every_rule_is_described() -> None:
    """Each rule is on the page with its docstring, its thresholds, and where it was seen."""
    text = PAGE.read_text()
    for rule in RULES.values():
        assert entry(rule) in text, f"{rule.name}: run python -m scripts.rules_page FOLDER"
    assert sorted(re.findall(r"^### (.+)$", text, re.MULTILINE)) == sorted(RULES)
    assert len(re.findall(r"Fires on \d+ of \d+ real traces: |Not seen in a real trace ", text)) == len(RULES)


def test_counts_are_those_of_the_real_traces() -> None:
    """With the real traces that the page was made from, it is made alike."""
    shared("tl_h100_owlv2.json.gz")
    (count,) = set(re.findall(r" \(0 of (\d+)\)", PAGE.read_text()))
    names, read = fired(FOLDER)
    if read == int(count):
        assert page(names, read) == PAGE.read_text()
