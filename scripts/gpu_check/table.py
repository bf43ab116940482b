"""The results as a person reads them, one line a check, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SHOWN = {"passed": "ok", "failed": "FAILED"}
_LONGEST = 400  # of a reason, all of which is in the JSON


def line(name: str, result: dict[str, Any]) -> str:
    """Return the line of a check: its name, how it ended, for how long it ran, why, and its figures."""
    status = _SHOWN.get(result["status"], result["status"])
    reason = " ".join(result.get("reason", "").split())
    reason = reason if len(reason) <= _LONGEST else f"{reason[: _LONGEST // 2]} ... {reason[-_LONGEST // 2 :]}"
    said = "; ".join(filter(None, [reason, ", ".join(said_of(result.get("figures", {})))]))
    return f"{name:14} {status:8} {result['seconds']:6.1f} s  {said}".rstrip()


def said_of(figures: dict[str, float | str]) -> Iterator[str]:
    """Yield each figure in words: "before 1.200 ms", "after a window 1.224 ms (1.02 x)", "12 kernels"."""
    for name, value in figures.items():
        words = name.replace("_", " ")
        if name.endswith("_ms"):
            ratio = figures.get(f"{name.removesuffix('ms')}ratio")
            yield f"{words.removesuffix(' ms')} {value:.3f} ms" + (f" ({ratio:.2f} x)" if ratio else "")
        elif not name.endswith("_ratio"):
            yield f"{value} {words}" if isinstance(value, int) else f"{words}: {value}"


def write(path: Path, results: dict[str, Any]) -> None:
    """Write what is known so far, so that a run that is cut short leaves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(results, indent=2) + "\n")
    part.replace(path)
