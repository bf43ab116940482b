"""Exports what moved in the numbers and regions of a step as SARIF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...base.findings import Site
from ...explain.contract.number_file import Change, Part
from .contract import BETTER, Checked, amounts
from .sarif import location, log, notification, root_of_repository


def to_sarif(checked: Checked) -> str:
    """Return what moved as one log: a result for each place, or at the file for a number without places."""
    root, results = root_of_repository(), list[dict[str, Any]]()
    rules: dict[str, dict[str, Any]] = {}

    def add(name: str, what: str, site: Site, text: str, level: str) -> None:
        rule = rules.setdefault(name, _rule(name, what))
        about = {"ruleId": rule["id"], "ruleIndex": list(rules).index(name), "level": level}
        results.append({**about, "message": {"text": text}, "locations": [location(site, root)]})

    for change in checked.changes:
        places = [
            (part.spot.site, _sentence(change, part))
            for part in change.parts
            if part.spot is not None and part.spot.site is not None
        ]
        if not places and checked.numbers_file is not None:
            places = [(_line_of(checked.folder / checked.numbers_file, change.name), _sentence(change, None))]
        for site, text in places:
            level = "note" if change.better else "error"
            add(change.name, f"{change.name} of a step has moved", site, text, level)
    if checked.regions_file is not None:
        site = Site(str(checked.folder / checked.regions_file), 1, "")
        for sentence in checked.regions:
            add("regions", "The regions of a step have moved", site, sentence, "error")
    notes = [notification(text) for text in checked.notes]
    notes += [notification(checked.failure, "error")] if checked.failure else []
    return log(list(rules.values()), results, notes, not checked.failure, root)


def _rule(name: str, what: str) -> dict[str, Any]:
    return {
        "id": f"contract/{name}",
        "shortDescription": {"text": what},
        "fullDescription": {"text": what},
        "help": {"text": f"{what}. If that is meant, record it: instrument check with --update."},
        "properties": {"tags": ["performance", "gpu"]},
    }


def _sentence(change: Change, part: Part | None) -> str:
    was, now, difference = amounts(change.name, change)
    text = f"{change.name} of a step: {was} to {now} ({difference})"
    if part is not None:
        was, now, difference = amounts(change.name, part)
        text += f", of which here: {was} to {now} ({difference})"
    return f"{text}; {BETTER}" if change.better else text


def _line_of(file: Path, name: str) -> Site:
    lines = file.read_text(encoding="utf-8-sig").splitlines() if file.is_file() else []
    number = next((at for at, line in enumerate(lines, 1) if line.split(" ")[0] == name), 1)
    return Site(str(file), number, "")
