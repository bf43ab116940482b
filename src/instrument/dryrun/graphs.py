"""CUDA graphs of the pretended GPU: captured code runs once, and a replay does nothing."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ..syncs.operations import cause_of
from .state import Observer
from .streams import Streams

REPLAY = "a replay of a CUDA graph does not repeat what was captured"
GRAPHED = "make_graphed_callables captures nothing: the callables run as they are"
_handles = itertools.count(1)


def pool_handle() -> tuple[int, int]:
    """Return the handle of a new memory pool."""
    return 0, next(_handles)


class Graph:
    """A graph whose class is `torch.cuda.CUDAGraph` or `torch.accelerator.Graph`."""

    def __init__(self, streams: Streams, kind: Any, pool: Any = None) -> None:
        self._streams = streams
        self._kind = kind
        self._pool = pool or pool_handle()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._kind

    def __enter__(self) -> Graph:  # of `torch.accelerator.Graph` alone
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.capture_begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.capture_end()

    def capture_begin(self, pool: Any = None, *_: Any, **options: Any) -> None:
        """Begin a capture on this thread."""
        self._pool = pool or self._pool
        self._streams.capturing = True

    def capture_end(self) -> None:
        """End the capture."""
        self._streams.capturing = False

    def instantiate(self) -> None:
        """Do nothing."""

    def replay(self) -> None:
        """Note that nothing is replayed."""
        self._streams.observer.note_uncovered(REPLAY)

    def reset(self) -> None:
        """Do nothing."""

    def pool(self) -> Any:
        """Return the handle of the memory pool."""
        return self._pool

    def register_generator_state(self, generator: Any) -> None:
        """Do nothing."""

    def enable_debug_mode(self) -> None:
        """Do nothing."""

    def debug_dump(self, debug_path: str) -> None:
        """Note that nothing is written."""
        self._streams.observer.note_uncovered("a CUDA graph cannot be dumped: nothing was captured")

    def raw_cuda_graph(self) -> int:
        """Return an address without a graph."""
        return id(self)

    raw_cuda_graph_exec = raw_cuda_graph

    def get_graph_data(self) -> dict[str, Any]:
        """Return the data of a graph without nodes, and note that."""
        self._streams.observer.note_uncovered("a CUDA graph has no nodes: nothing was captured")
        return {"exec_graph_id": 0, "nodes": []}


def make_graphed_callables(observer: Observer) -> Any:
    """Return a replacement of `torch.cuda.make_graphed_callables`, which synchronizes before each capture."""

    def make(callables: Any, sample_args: Any, *options: Any, **more: Any) -> Any:
        observer.note_sync("make_graphed_callables", cause_of("make_graphed_callables"))
        observer.note_uncovered(GRAPHED)
        return callables

    return make
