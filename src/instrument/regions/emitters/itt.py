"""Regions as ITT tasks: Intel VTune."""

from __future__ import annotations

from typing import Any

from ..region import Region


class IttEmitter:
    """Emits nested tasks, and overlapped tasks for code that is suspended; needs the package ittapi."""

    name = "itt"

    def __init__(self) -> None:
        try:
            import ittapi
        except ImportError:
            raise ImportError("ittapi is missing: pip install ittapi") from None
        self._itt = ittapi
        self._domains: dict[str, Any] = {}

    def _prepare(self, region: Region) -> tuple[Any, Any]:
        domain = self._domains.get(region.domain)
        if domain is None:
            domain = self._domains[region.domain] = self._itt.domain(region.domain)
        prepared = region.prepared["itt"] = (domain, self._itt.string_handle(region.name))
        return prepared

    def push(self, region: Region) -> Any:
        """Begin a task nested in this thread's current task."""
        domain, text = region.prepared.get("itt") or self._prepare(region)
        self._itt.task_begin(domain, text)
        return domain

    def pop(self, domain: Any) -> None:
        """End the task."""
        self._itt.task_end(domain)

    def start(self, region: Region) -> tuple[Any, Any]:
        """Begin a task that others may overlap."""
        domain, text = region.prepared.get("itt") or self._prepare(region)
        task = self._itt.id(domain)
        self._itt.task_begin_overlapped(domain, text, task)
        return domain, task

    def end(self, handle: tuple[Any, Any]) -> None:
        """End the task."""
        self._itt.task_end_overlapped(*handle)

    def mark(self, region: Region) -> None:
        """Show an instant as a task of zero length: ittapi has no markers."""
        self.pop(self.push(region))
