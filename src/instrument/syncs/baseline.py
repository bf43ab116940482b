"""`Baseline`: a file of known synchronizations, for "no new syncs" in CI and as an allowlist with reasons.

It is text with a line for each: fingerprint, maximum in a step (or ``*``), reason, and after `` # `` the call site
at the time of writing. Such a file may have comments, needs no library to read, and merges well.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..base.findings import SyncFinding
from ..base.reasoned_lines import read_lines, with_place, write_lines
from ..base.source_paths import portable
from ..explain.waits.report import SyncReport

_HEAD = (
    "# Known synchronizations, for `instrument syncs --baseline` and `--allowlist`. One line for each:",
    "# fingerprint, maximum in a step (or *), reason  # place",
)
_LINE = re.compile(r"([0-9a-f]{16})\s+(\d{1,9}|\*)(?:\s+(.*))?")


@dataclass(frozen=True)
class BaselineEntry:
    """A known synchronization.

    Attributes:
        fingerprint: fingerprint of the finding.
        max_in_step: maximum number in a step; None for any number.
        reason: why it is allowed; may be empty in a baseline.
        where: the call site, for people; it is not compared.
    """

    fingerprint: str
    max_in_step: int | None
    reason: str = ""
    where: str = ""

    def __str__(self) -> str:
        about = f"{self.where} ({self.fingerprint})" if self.where else self.fingerprint
        return f"{about}: {self.reason}" if self.reason else about


@dataclass
class Baseline:
    """The known synchronizations of one file, by fingerprint."""

    entries: dict[str, BaselineEntry] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path, *, reasons: bool = False) -> Baseline:
        """Read a file.

        Args:
            path: the file.
            reasons: whether each line must have a reason.

        Raises:
            ValueError: a line is malformed; the message names it.
            OSError: the file cannot be read.
        """
        baseline = cls()
        for number, line, content, where in read_lines(path):
            match = _LINE.fullmatch(content.strip())
            if match is None:
                raise ValueError(f"cannot read {path}, line {number}: no fingerprint, number and reason: {line!r}")
            fingerprint, most, reason = match.group(1), match.group(2), (match.group(3) or "").strip()
            if reasons and not reason:
                raise ValueError(f"cannot read {path}, line {number}: it must have a reason: {line!r}")
            if fingerprint in baseline.entries:
                raise ValueError(f"cannot read {path}, line {number}: {fingerprint} is listed twice")
            limit = None if most == "*" else int(most)
            baseline.entries[fingerprint] = BaselineEntry(fingerprint, limit, reason, where)
        return baseline

    @classmethod
    def of(cls, reports: Iterable[SyncReport], earlier: Baseline | None = None) -> Baseline:
        """Return the synchronizations of ``reports`` that are not allowed, with the reasons in ``earlier``."""
        baseline, reasons = cls(), earlier.entries if earlier is not None else {}
        for one in reports:
            for fingerprint, group in _groups(one):
                old = baseline.entries.get(fingerprint)
                most = max(one.max_in_step(*group), (old.max_in_step or 0) if old else 0)
                reason = reasons[fingerprint].reason if fingerprint in reasons else ""
                baseline.entries[fingerprint] = BaselineEntry(fingerprint, most, reason, _where(group[0]))
        return baseline

    def write(self, path: str | Path) -> None:
        """Write the file, its lines ordered by call site."""
        entries = sorted(self.entries.values(), key=lambda entry: (entry.where, entry.fingerprint))
        lines = [
            with_place(
                f"{entry.fingerprint} {'*' if entry.max_in_step is None else entry.max_in_step} {entry.reason}",
                entry.where,
            )
            for entry in entries
        ]
        write_lines(path, [*_HEAD, *lines])

    def allow(self, results: SyncReport, name: str) -> list[tuple[str, int, int]]:
        """Allow the known synchronizations in ``results``, up to their maximum in a step; not inside `no_syncs`.

        Args:
            results: the report, changed in place.
            name: name of the file, the reason for entries that have none.

        Returns:
            Call site, number in a step and maximum of the synchronizations that exceed their maximum.
        """
        reasons: dict[int, str] = {}
        more: list[tuple[str, int, int]] = []
        for fingerprint, group in _groups(results):
            findings = [one for one in group if not one.forbidden]
            entry, now = self.entries.get(fingerprint), results.max_in_step(*findings)
            if entry is None or not findings:
                continue
            if entry.max_in_step is not None and now > entry.max_in_step:
                more.append((_where(findings[0]), now, entry.max_in_step))
                continue
            reasons |= dict.fromkeys(map(id, findings), entry.reason or f"known, in {name}")
            results.listed.add(fingerprint)
        results.findings = [
            replace(one, allowed=reasons[id(one)]) if id(one) in reasons else one for one in results.findings
        ]
        results.sort()
        return more

    def nearest(self, entry: BaselineEntry, reports: Iterable[SyncReport]) -> str:
        """Return the call site without an entry that resembles that of ``entry``; empty if there is none."""
        places = {_where(each) for one in reports for each in one.syncs if each.fingerprint not in self.entries}
        return next(iter(difflib.get_close_matches(entry.where, sorted(places), n=1)), "")

    def stale(self, reports: Sequence[SyncReport]) -> list[BaselineEntry]:
        """Return the entries that occur in none of the ``reports``."""
        seen = {finding.fingerprint for one in reports for finding in one.findings if finding.covered}
        return [entry for entry in self.entries.values() if entry.fingerprint not in seen]


def _groups(results: SyncReport) -> Iterable[tuple[str, list[SyncFinding]]]:
    """Return the findings that are not allowed, by fingerprint; equal lines of a function share one."""
    groups: dict[str, list[SyncFinding]] = {}
    for finding in results.syncs:
        groups.setdefault(finding.fingerprint, []).append(finding)
    return groups.items()


def _where(finding: SyncFinding) -> str:
    site = finding.site or finding.via
    if site is None:
        return f"thread {finding.thread or '?'}, {finding.op}"
    place = f"{portable(site.file)} in {site.function}, {finding.op}"
    return " ".join((f"{place}: {site.code}" if site.code else place).split())
