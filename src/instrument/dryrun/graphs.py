"""CUDA graphs of the pretended GPU: captured work runs once, during the capture; a replay does nothing."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from .state import SyncLog
from .streams import Streams

REPLAY = "a replay of a CUDA graph does not repeat the captured work"
GRAPHED = "make_graphed_callables captures nothing: the callables run as they are"
_handles = itertools.count(1)


def pool_handle() -> tuple[int, int]:
    """Return a handle of a new pool of memory."""
    return 0, next(_handles)


class Graph:
    """Passes for a `torch.cuda.CUDAGraph` or `torch.accelerator.Graph` in checks of its class."""

    def __init__(self, streams: Streams, kind: Any, pool: Any = None) -> None:
        self._streams = streams
        self._kind = kind
        self._pool = pool or pool_handle()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._kind

    def __enter__(self) -> Graph:  # only of `torch.accelerator.Graph`
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.capture_begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.capture_end()

    def capture_begin(self, pool: Any = None, *_: Any, **options: Any) -> None:
        """Begin to capture a graph on this thread."""
        self._pool = pool or self._pool
        self._streams.capturing = True

    def capture_end(self) -> None:
        """End the capture, which does not synchronize."""
        self._streams.capturing = False

    def instantiate(self) -> None:
        """Do nothing."""

    def replay(self) -> None:
        """Record that a replay is not covered."""
        self._streams.log.record_not_covered(REPLAY)

    def reset(self) -> None:
        """Do nothing."""

    def pool(self) -> Any:
        """Return the handle of the pool of memory."""
        return self._pool

    def register_generator_state(self, generator: Any) -> None:
        """Do nothing."""

    def enable_debug_mode(self) -> None:
        """Do nothing."""

    def debug_dump(self, debug_path: str) -> None:
        """Record that a dump is not covered."""
        self._streams.log.record_not_covered("a CUDA graph cannot be dumped: nothing was captured")

    def raw_cuda_graph(self) -> int:
        """Return a made-up address."""
        return id(self)

    raw_cuda_graph_exec = raw_cuda_graph

    def get_graph_data(self) -> dict[str, Any]:
        """Record that the nodes of a graph are not covered; return an empty graph."""
        self._streams.log.record_not_covered("a CUDA graph has no nodes: nothing was captured")
        return {"exec_graph_id": 0, "nodes": []}


def make_graphed_callables(log: SyncLog) -> Any:
    """Return the replacement of `torch.cuda.make_graphed_callables`, which synchronizes before each capture."""

    def make(callables: Any, sample_args: Any, *options: Any, **more: Any) -> Any:
        log.record_sync("make_graphed_callables")
        log.record_not_covered(GRAPHED)
        return callables

    return make
