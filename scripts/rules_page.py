"""Writes docs/rules.md: every rule of `instrument diagnose`, and on how many real traces it fires.

``python -m scripts.rules_page FOLDER`` reads the traces in FOLDER (``make traces`` puts them into build/traces).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from instrument.base.errors import TraceError
from instrument.explain.diagnosis.diagnose import BUILT_IN, Diagnosis, diagnose
from instrument.explain.rules.rule import RULES, Rule

PAGE = Path(__file__).parent.parent / "docs" / "rules.md"
_SHOWN = 3
_HEAD = """# Rules

What `instrument diagnose` looks for. Each rule is a function that yields findings, or says what the trace lacks.

The time to win is the most that removing the cause can give per step: GPU time counts as far as the GPU sets the
length of the step, CPU time as far as the GPU idles for it. A threshold `share` is the least share of the step
that a finding must be worth. A rule that never fires on the real traces is marked "not seen in a real trace";
tests show it on a made one.

Leave a rule out with `--ignore RULE`, change a threshold with `--set RULE.NAME=VALUE`, or write both into
`pyproject.toml`:

```toml
[tool.instrument.diagnose]
ignore = ["memsets"]
input-wait = {share = 0.1}
```

Rules of your own are functions with the decorator `instrument.rule`, in a module imported before `diagnose` is
called, or one that an entry point of the group `instrument.rules` names. [The guide](diagnose.md) shows one.

<!-- Made by python -m scripts.rules_page; tests/test_rules_page.py compares. -->
"""


def samples(folder: Path) -> list[Path]:
    """Return the traces and memory snapshots in a folder, without those that were damaged on purpose."""
    patterns = ("*.json", "*.json.gz", "*.sqlite", "*.pickle")
    found = sorted(path for pattern in patterns for path in folder.rglob(pattern))
    return [path for path in found if not path.name.startswith(("malformed", "reference"))]


def jobs(folder: Path) -> list[str]:
    """Return the patterns of the traces in a folder that are the ranks of one job."""
    patterns = Counter(re.sub(r"_r\d+\.", "_r*.", str(path)) for path in samples(folder))
    return sorted(pattern for pattern, ranks in patterns.items() if ranks > 1)


def diagnosed(folder: Path) -> Iterator[tuple[str, Diagnosis]]:
    """Yield the name and the diagnosis of each trace and each job in a folder that can be read."""
    paths: list[str | Path] = [*samples(folder), *jobs(folder)]
    for path in paths:
        try:
            yield Path(path).name, diagnose(path)
        except TraceError:
            continue


def fired(found: Iterable[tuple[str, Diagnosis]]) -> tuple[dict[str, list[str]], int]:
    """Return the names of the traces on which each rule fires, and the number of traces."""
    names: dict[str, list[str]] = defaultdict(list)
    count = 0
    for name, diagnosis in found:
        count += 1
        for rule in dict.fromkeys(each.rule for each in diagnosis.findings):
            names[rule].append(name.partition(".")[0])
    return names, count


def entry(rule: Rule) -> str:
    """Return the text about a rule, without how often it fires."""
    title, _, rest = inspect.getdoc(rule.function).partition("\n\n")  # type: ignore[union-attr]
    thresholds = ", ".join(f"`{name}` {value:g}" for name, value in rule.thresholds.items()) or "none"
    return f"### {rule.name}\n\n{title}\n\n{rest}\n\nThresholds: {thresholds}.".replace("\n\n\n", "\n")


def seen(rule: str, names: dict[str, list[str]], count: int) -> str:
    """Return on how many traces a rule fires, in a sentence."""
    if not names[rule]:
        return f"Not seen in a real trace (0 of {count})."
    shown = ", ".join(f"`{name}`" for name in names[rule][:_SHOWN])
    return f"Fires on {len(names[rule])} of {count} real traces: {shown}{', ...' * (len(names[rule]) > _SHOWN)}."


def page(names: dict[str, list[str]], count: int) -> str:
    """Return the page."""
    parts = [_HEAD]
    for module in BUILT_IN:
        own = [rule for rule in RULES.values() if rule.function.__module__ == module.__name__]
        subject = inspect.getdoc(module).removeprefix("Rules on ").rstrip(".")  # type: ignore[union-attr]
        subject = subject if subject.startswith("torch") else subject[0].upper() + subject[1:]
        parts.append(f"\n## {subject}\n")
        parts += [f"\n{entry(rule)} {seen(rule.name, names, count)}\n" for rule in own]
    return "".join(parts)


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "build/traces"
    rules, traces = fired(diagnosed(Path(folder)))
    if not traces:
        raise SystemExit(f"{folder} has no traces; `make traces` downloads them")
    PAGE.write_text(page(rules, traces))
