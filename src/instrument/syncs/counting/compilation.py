"""`Compiled`: what torch.compile did in a run: graphs, graph breaks and recompilations, with their places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ...base.findings import Site, SyncFinding

EventKind = Literal["graph", "graph break", "recompilation"]


@dataclass(frozen=True)
class CompilerEvent:
    """A graph, a graph break or a recompilation.

    Attributes:
        kind: which of these.
        step: the number of the step; 0 or None before the first one.
        region: the names of the regions around the call of the compiled function, outermost first.
        site: the user's line: of a break, else of the compiled function. None if it is not known.
        via: the innermost line of a library below the user's line; None if there is none.
        reason: why, in the words of torch; empty for graphs.
    """

    kind: EventKind
    step: int | None
    region: tuple[str, ...]
    site: Site | None
    via: Site | None
    reason: str = ""

    def before_steps(self) -> CompilerEvent:
        """Return the same before the first step."""
        return replace(self, step=0)

    def __str__(self) -> str:
        place = self.site or self.via
        where = f"{place}: {place.code}".removesuffix(": ") if place else "no place known"
        return f"{where} ({self.reason})" if self.reason else where


@dataclass(frozen=True)
class Compiled:
    """What torch.compile did.

    A graph break counts each time that torch meets it, also in the compilation for other shapes.

    Attributes:
        events: each graph, graph break and recompilation, in order.
    """

    events: tuple[CompilerEvent, ...] = ()

    @property
    def graphs(self) -> int:
        """The number of compiled graphs."""
        return len(self.of_kind("graph"))

    @property
    def graph_breaks(self) -> int:
        """The number of graph breaks."""
        return len(self.of_kind("graph break"))

    @property
    def recompilations(self) -> int:
        """The number of compilations of a function after its first one."""
        return len(self.of_kind("recompilation"))

    def of_kind(self, kind: EventKind) -> list[CompilerEvent]:
        """Return the events of one kind."""
        return [event for event in self.events if event.kind == kind]

    def in_step(self, number: int) -> Compiled:
        """Return what it did in a step; the first step includes what comes before."""
        return Compiled(tuple(event for event in self.events if (event.step or 1) == number))

    def marked(self, finding: SyncFinding) -> SyncFinding:
        """Return a finding, with a note in its cause if the line also breaks a graph."""
        if finding.site is None or not finding.covered:
            return finding
        line = finding.site.file, finding.site.line
        broken = {(event.site.file, event.site.line) for event in self.of_kind("graph break") if event.site}
        return (
            replace(finding, cause=f"{finding.cause}; breaks a graph of torch.compile")
            if line in broken
            else finding
        )

    def as_dict(self) -> dict[str, Any]:
        """Return a dict of JSON values."""
        events = [asdict(event) for event in self.events]
        numbers = {"graphs": self.graphs, "graph_breaks": self.graph_breaks}
        return {**numbers, "recompilations": self.recompilations, "events": events}

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the text of each line for people; nothing if nothing was compiled."""
        if not self.events:
            return
        numbers = {"graph": self.graphs, "graph break": self.graph_breaks, "recompilation": self.recompilations}
        yield "compiled", ", ".join(f"{number} {name}{'s' * (number != 1)}" for name, number in numbers.items())
        for kind in ("graph break", "recompilation"):
            found = Counter(str(event) for event in self.events if event.kind == kind)
            for text, times in found.most_common():
                yield f"  {kind}", f"{text}{f', {times} times' * (times > 1)}"
