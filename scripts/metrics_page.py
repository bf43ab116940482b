"""Writes docs/metrics.md from the definitions: ``python -m scripts.metrics_page``."""

from __future__ import annotations

from pathlib import Path

from instrument.explain.diagnosis.verdict import PARTS
from instrument.explain.metrics.idle import CAUSES
from instrument.explain.metrics.memory_use import CATEGORIES
from instrument.explain.metrics.metrics import DEFINITIONS, WINDOWS

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
_HEAD = """# Metrics

Every key of `instrument.metrics`, which `instrument summarize --json` prints, with its definition, unit and
window. `metrics.about(key)` gives the same, and the coverage: the share of the GPU time for which the trace has
what the metric needs, named in the last column.

<!-- Made by python -m scripts.metrics_page; tests/test_metrics_page.py compares. -->

| key | definition | unit | window | needs |
|---|---|---|---|---|
"""
_BASES = {"all": "", "blocks": "grids", "threads": "grids and threads of the GPU", "loop": "steps and launches"}
_BASES |= {"counters": "samples of counters", "power": "samples of power"}


def page() -> str:
    """Return the page."""
    parts = [_HEAD]
    for key, (text, unit, window, basis) in DEFINITIONS.items():
        parts.append(f"| `{key}` | {text} | {unit} | {window} | {_BASES.get(basis, basis)} |\n")
    parts.append("\n## Windows\n\n| window | time |\n|---|---|\n")
    parts += [f"| {name} | {text} |\n" for name, text in WINDOWS.items()]
    parts.append("\n## Parts of a step\n\nThe parts in `instrument diagnose` add up to the step.\n\n")
    parts.append("| part | what it is |\n|---|---|\n")
    parts += [f"| {name} | {text} |\n" for name, text in PARTS.items()]
    parts.append("\n## Causes of idle time\n\nAt each moment the first that applies counts.\n\n")
    parts.append("| cause | what it means |\n|---|---|\n")
    parts += [f"| {name.replace('_', ' ')} | {text} |\n" for name, text in CAUSES.items()]
    parts.append("\n## Categories of memory\n\nThey add up to the allocated bytes at the peak.\n\n")
    parts.append("| category | what it is |\n|---|---|\n")
    parts += [f"| {name.replace('_', ' ')} | {text} |\n" for name, text in CATEGORIES.items()]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
