"""`Finding`: what a rule found: place, evidence, cost and fix; `SyncFinding`: a line that synchronizes."""

from __future__ import annotations

import hashlib
import linecache
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .source_paths import portable

Direction = Literal["H2D", "D2H"]
Severity = Literal["high", "medium", "low"]
NOT_COVERED = "not covered"


@dataclass(frozen=True)
class Site:
    """A line of Python code.

    Attributes:
        file: absolute path of the file, or Python's name for it ("<stdin>").
        line: line number from 1; 0 if only the function is known.
        function: qualified name of the function; only its last part if Python knows no more.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.shown}:{self.line}" if self.line else self.shown

    @property
    def shown(self) -> str:
        """The path relative to the current folder if the file is below it, else the absolute path."""
        try:
            inside = os.path.relpath(self.file)
        except (OSError, ValueError):  # the folder is gone, or on another drive
            return self.file
        return self.file if inside.startswith("..") or not self.file.startswith(os.sep) else inside

    @property
    def code(self) -> str:
        """The source line without its indentation; empty if it cannot be read."""
        return linecache.getline(self.file, self.line).strip() if self.line else ""


@dataclass(frozen=True)
class Fix:
    """A suggestion for a finding.

    Attributes:
        text: what to do, in one or two sentences.
        before: example code with the problem; empty if the text says enough.
        after: the same code without the problem.
    """

    text: str
    before: str = ""
    after: str = ""


class Evidence(NamedTuple):
    """A number, or a word, that a finding rests on.

    Attributes:
        name: a short name, unique within the finding.
        value: the value; None if it is unknown.
        unit: "ns", "bytes", "bytes/s", "%", "1" (a ratio), "MHz", "W", "C", "events" or "" for words.
        definition: what the value is, in a sentence.
    """

    name: str
    value: int | float | str | None
    unit: str
    definition: str


class Where(NamedTuple):
    """The place of a finding; empty fields are unknown or do not apply.

    Attributes:
        region: the path of the region, outermost name first.
        module: the ``nn.Module``.
        operator: PyTorch's operator.
        kernel: the short name of the kernel.
        step: the number of the step.
        site: the line of the program.
        rank: the rank of the process in its job.
    """

    region: tuple[str, ...] = ()
    module: str = ""
    operator: str = ""
    kernel: str = ""
    step: int | None = None
    site: Site | None = None
    rank: int | None = None

    def __str__(self) -> str:
        parts = [
            str(self.site) if self.site else "",
            " > ".join(self.region),
            self.module,
            self.operator,
            self.kernel,
            f"step {self.step}" if self.step is not None else "",
            f"rank {self.rank}" if self.rank is not None else "",
        ]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one rule found: where, on what evidence, what removing it can win, and how.

    Attributes:
        rule: the name of the rule.
        severity: "high", "medium" or "low".
        title: the finding in a sentence.
        where: the place.
        evidence: the numbers that it rests on, with their definitions.
        win_ns: the most time per step that removing it can win; None if that is unknown.
        replayed_ns: the time per step that a replay of the steps without it wins; 0 if something else takes as
            long. None if it was not replayed.
        fix: what to do instead; None if there is nothing to suggest.
        confidence: how sure the rule is of the cause: "high", "medium" or "low".
        coverage: the share, from 0 to 1, of the GPU time or of the calls for which the trace has what the rule
            needs; None if the rule needs nothing that can be missing.
        start_ns: when it shows, in ns from the start of the window; None if it has no single time.
        win_bytes: the most memory of the GPU that removing it can free at the peak; None if that is unknown, or it
            is not about memory.
        change: its removal as `instrument whatif` takes it, such as "--workers 4"; empty if no replay can show it.
        hidden_ns: the most time per step that removing it could win once what bounds the step is gone; None if
            that is not more than ``win_ns``.
        also: what removing it shortens besides what its rule is about, as names of classes of the critical path;
            without these, it could not win what the replay says.
    """

    rule: str = ""
    severity: Severity = "low"
    title: str = ""
    where: Where = field(default_factory=Where)
    evidence: tuple[Evidence, ...] = ()
    win_ns: int | None = None
    fix: Fix | None = None
    confidence: Severity = "high"
    coverage: float | None = None
    replayed_ns: int | None = None
    start_ns: int | None = None
    win_bytes: int | None = None
    change: str = ""
    hidden_ns: int | None = None
    also: tuple[str, ...] = ()

    @property
    def likely_win_ns(self) -> int | None:
        """``replayed_ns`` or, if that is unknown, ``win_ns``."""
        return self.win_ns if self.replayed_ns is None else self.replayed_ns

    def __repr__(self) -> str:
        return f"<finding {self.rule}: {self.title}>"


@dataclass(frozen=True, repr=False)
class SyncFinding(Finding):
    """The synchronizations of one operation at one line of the program.

    ``op`` names the operation and ``cause`` says why it synchronizes. Cost is how often it
    happened (``count``, ``steps``) and what that took (``blocked_ns``, ``idle_ns``, ``bytes``).

    Attributes:
        op: the operation, by the name of the outermost public call ("item", "to", "unique") or of what the line
            does ("bool", "getitem", "print"); `NOT_COVERED` for code that could not be checked.
        cause: why it synchronizes, in a few words.
        site: the user's line; None if no Python frame is known.
        via: the line of the library that made most of the calls; None if the user's line made them itself.
        direction: direction of the copy; None if it is not a copy.
        thread: name of the thread of the first call.
        backward: the autograd node that ran during the first call.
        allowed: the reason why it is allowed; None if it is not.
        forbidden: it happened inside `no_syncs`, or code that is not covered would fail on a GPU.
        count: number of calls.
        bytes: bytes of all copies; None if unknown.
        blocked_ns: time that the CPU was blocked in all timed calls; None if none was timed.
        timed: number of timed calls.
        idle_ns: time that the calls left the GPU idle; None if unknown.
        regions: number of calls by region path, outermost name first.
        steps: number of calls by step; the key None counts calls outside steps.
        vias: number of calls by line of a library.
    """

    op: str
    cause: str
    site: Site | None
    via: Site | None
    direction: Direction | None
    thread: str
    backward: str | None
    allowed: str | None
    forbidden: bool = False
    count: int = 0
    bytes: int | None = None
    blocked_ns: int | None = None
    timed: int = 0
    idle_ns: int | None = None
    regions: Counter[tuple[str, ...]] = field(default_factory=Counter)
    steps: Counter[int | None] = field(default_factory=Counter)
    vias: Counter[Site] = field(default_factory=Counter)

    @property
    def covered(self) -> bool:
        """Whether this is a finding about the program, not about code that could not be checked."""
        return self.op != NOT_COVERED

    @property
    def region(self) -> tuple[str, ...]:
        """The path of the region with most of the calls, outermost name first."""
        return self.regions.most_common(1)[0][0] if self.regions else ()

    @property
    def step(self) -> int | None:
        """The first step with a call; None if all calls were outside steps."""
        return min((step for step in self.steps if step is not None), default=None)

    @property
    def fingerprint(self) -> str:
        """A hash of file, function, operation and source line.

        It stays the same if lines are added above, in another folder and on another machine. Equal lines of one
        function share it.
        """
        site = self.site or self.via
        if site:  # Python 3.10 knows functions by their last name only
            parts = (portable(site.file), site.function.rpartition(".")[2], site.code)
        else:
            parts = (self.thread, self.backward or "", "")
        return hashlib.sha256("\0".join((*parts, self.op)).encode()).hexdigest()[:16]
