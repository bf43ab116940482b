"""`Names`: the names in a trace, which `StandIns` replaces in a trace that is anonymized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Id = int | str | float | None
"""The id of a process or a thread in a trace."""


class Names:
    """Keeps all names as they are."""

    def event(self, table: str, name: str) -> str:
        """Return the name of an event of a table."""
        return name

    def category(self, name: str | None) -> str | None:
        """Return the category of an event."""
        return name

    def value(self, text: str) -> str:
        """Return a value of the args of an event, as JSON."""
        return text

    def lane(self, number: Id) -> Id:
        """Return the id of a process or thread, which may be text."""
        return number

    def label(self, kind: str, text: str) -> str:
        """Return the name or the labels of a process or thread."""
        return text

    def metadata(self, about: dict[str, Any]) -> Mapping[str, Any]:
        """Return the metadata."""
        return about
