"""The results as a person reads them, a paragraph for each check, and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HEADER = f"{'check':14} {'result':8} {'time':>8}  what was found, and what is expected"
_SHOWN = {"passed": "ok", "failed": "FAILED"}
_LONGEST = 400  # of a reason, all of which is in the JSON


def heading(name: str, result: Mapping[str, Any]) -> str:
    """Return the name of a check, how it ended and for how long it ran."""
    status = _SHOWN.get(result["status"], result["status"])
    return f"{name:14} {status:8} {result['seconds']:6.1f} s"


def row(name: str, result: Mapping[str, Any], width: int) -> str:
    """Return a check's heading, its reason and its figures, wrapped to ``width``."""
    reason = " ".join(result.get("reason", "").split())
    reason = reason if len(reason) <= _LONGEST else f"{reason[: _LONGEST // 2]} ... {reason[-_LONGEST // 2 :]}"
    said = "; ".join(filter(None, [reason, *figures_of(result.get("figures", {}), result.get("expected", {}))]))
    first = f"{heading(name, result)}  "
    lines = textwrap.wrap(
        said, max(width, 2 * len(first)), initial_indent=first, subsequent_indent=" " * len(first),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(lines) or first.rstrip()


def figures_of(figures: Mapping[str, float | str], expected: Mapping[str, str]) -> Iterator[str]:
    """Yield each figure in words: "before 1.200 ms", "after 1.224 ms (1.02 x, expected at most 1.05 x)"."""
    for name, value in figures.items():
        if name.endswith(" ratio"):
            continue
        said = f"{value} {name}" if isinstance(value, int) else f"{name}: {value}"
        aside = [f"expected {expected[name]}"] if name in expected else []
        if name.endswith(" ms"):
            said, ratio = f"{name.removesuffix(' ms')} {value:.3f} ms", f"{name.removesuffix('ms')}ratio"
            if ratio in figures:
                aside.append(f"{figures[ratio]:.2f} x")
            if ratio in expected:
                aside.append(f"expected {expected[ratio]}")
        yield said + (f" ({', '.join(aside)})" if aside else "")


def counts(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return how many checks had each status: "15 passed, 1 skipped"."""
    ways = Counter(result["status"] for result in results.values())
    return ", ".join(f"{count} {status}" for status, count in ways.items())


def write(path: Path, results: dict[str, Any]) -> None:
    """Write what is known so far, so that a run that is cut short leaves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(results, indent=2) + "\n")
    part.replace(path)
