"""What came of one look at the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "note", "problem", "absent"]
"""A problem is something installed that is broken or loses ranges; a note is worth to be known; "absent" is what
is not installed."""


@dataclass(frozen=True)
class Check:
    """What one look found.

    Attributes:
        status: how it is.
        sentence: what was found, for a person.
        cure: a command or a setting, where there is one.
        facts: the same for a machine: versions, and ``proved`` where it was tried out.
    """

    status: Status
    sentence: str
    cure: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
