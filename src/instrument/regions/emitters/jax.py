"""Regions as JAX's own trace annotations, in programs that use both JAX and torch."""

from __future__ import annotations

import sys
from typing import Any

from ..region import Region


class JaxEmitter:
    """Opens `jax.profiler.TraceAnnotation`; made only if the program itself imported jax."""

    name = "jax"

    def __init__(self) -> None:
        if "jax" not in sys.modules:
            raise ImportError("jax is not imported: import jax before the emitter is used")
        import jax.profiler

        self._annotation = jax.profiler.TraceAnnotation

    def push(self, region: Region) -> Any:
        """Open an annotation."""
        annotation = self._annotation(region.name)
        annotation.__enter__()
        return annotation

    def pop(self, annotation: Any) -> None:
        """Close it."""
        annotation.__exit__(None, None, None)

    start = push
    end = pop

    def mark(self, region: Region) -> None:
        """Show an instant as an annotation of zero length."""
        self.pop(self.push(region))
