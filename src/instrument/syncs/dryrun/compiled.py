"""What torch.compile did, by its own counters."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from ..counting.counts import Compiled


class CompilerCounters:
    """The counters of torch.compile at the time when this object is made."""

    def __init__(self) -> None:
        self._before = _now()

    def until_now(self) -> Compiled:
        """Return what was compiled since then."""
        since = {name: number - self._before[name] for name, number in _now().items()}
        return Compiled(since["graphs"], since["breaks"], since["again"])


def _now() -> Counter[str]:
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return Counter(
        graphs=counters["stats"]["unique_graphs"] if "stats" in counters else 0,
        breaks=sum(counters["graph_break"].values()) if "graph_break" in counters else 0,
        again=sum(counters["recompiles"].values()) if "recompiles" in counters else 0,
    )
