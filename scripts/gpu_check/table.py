"""The results as text, with a paragraph for each check, and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HEADER = f"{'check':14} {'result':8} {'time':>8}  what was found, and what is expected"
_SHOWN = {"passed": "ok", "failed": "FAILED"}
_LONGEST = 400  # characters of a reason; the JSON has all of it


def heading(name: str, result: Mapping[str, Any]) -> str:
    """Return a check's name, status and duration."""
    status = _SHOWN.get(result["status"], result["status"])
    return f"{name:14} {status:8} {result['seconds']:6.1f} s"


def row(name: str, result: Mapping[str, Any], width: int) -> str:
    """Return a check's heading, reason and figures, wrapped to ``width``."""
    reason = " ".join(result.get("reason", "").split())
    reason = reason if len(reason) <= _LONGEST else f"{reason[: _LONGEST // 2]} ... {reason[-_LONGEST // 2 :]}"
    text = "; ".join(filter(None, [reason, *figures_of(result.get("figures", {}), result.get("expected", {}))]))
    first = f"{heading(name, result)}  "
    lines = textwrap.wrap(
        text, max(width, 2 * len(first)), initial_indent=first, subsequent_indent=" " * len(first),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(lines) or first.rstrip()


def figures_of(figures: Mapping[str, float | str], expected: Mapping[str, str]) -> Iterator[str]:
    """Yield each figure in words: "before 1.200 ms", "after 1.224 ms (1.02 x, expected at most 1.05 x)"."""
    for name, value in figures.items():
        if name.endswith(" ratio"):
            continue
        text = f"{value} {name}" if isinstance(value, int) else f"{name}: {value}"
        notes = [f"expected {expected[name]}"] if name in expected else []
        if name.endswith(" ms"):
            text, ratio = f"{name.removesuffix(' ms')} {value:.3f} ms", f"{name.removesuffix('ms')}ratio"
            if ratio in figures:
                notes.append(f"{figures[ratio]:.2f} x")
            if ratio in expected:
                notes.append(f"expected {expected[ratio]}")
        yield text + (f" ({', '.join(notes)})" if notes else "")


def counts(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the number of checks by status: "15 passed, 1 skipped"."""
    statuses = Counter(result["status"] for result in results.values())
    return ", ".join(f"{count} {status}" for status, count in statuses.items())


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the results so far, so that an interrupted run keeps them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(results, indent=2) + "\n")
    part.replace(path)
