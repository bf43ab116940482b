"""CUDA graphs without a GPU: torch's classes on a device that records calls that would invalidate a capture."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.profiler import profile


def nothing() -> None:
    pass


class Device:
    """The simulated device; a capture belongs to the thread and stream that began it, and a replay runs nothing.

    Attributes:
        capturing: the threads that are capturing.
        streams: the stream that each of them captures.
        violations: the calls during a capture that would have invalidated it.
        replays: the number of replays.
        fail: whether the next capture ends with an error, like an invalidated one.
    """

    def __init__(self) -> None:
        self.capturing: list[int] = []
        self.streams: dict[int, object] = {}
        self._current = threading.local()
        self.violations: list[str] = []
        self.replays = 0
        self.fail = False

    @property
    def current(self) -> object:
        """The current stream of this thread."""
        return getattr(self._current, "stream", self)

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        """Make ``stream`` the current one."""
        before, self._current.stream = self.current, stream
        try:
            yield
        finally:
            self._current.stream = before

    def forbids(self, name: str) -> None:
        if self.capturing:
            self.violations.append(name)


def emulate(patch: pytest.MonkeyPatch) -> Device:
    """Put the simulated device under `torch.cuda` until ``patch`` is undone."""
    if torch.backends.cuda.is_built():
        pytest.skip("this build of torch has CUDA graphs of its own")
    device = Device()

    base: Any = torch.cuda.CUDAGraph.__mro__[
        1
    ]  # in a CPU build: a class without methods that cannot be instantiated

    def capture_begin(graph: Any, pool: Any = None, capture_error_mode: str = "global") -> None:
        device.capturing.append(threading.get_ident())
        device.streams[threading.get_ident()] = device.current

    def capture_end(graph: Any) -> None:
        device.capturing.remove(threading.get_ident())
        if device.fail:
            device.fail = False
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(graph: Any) -> None:
        device.forbids("replay")
        device.replays += 1

    patch.setattr(base, "__new__", lambda kind, *_: object.__new__(kind))
    patch.setattr(base, "__init__", lambda *_: None)
    for function in (capture_begin, capture_end, replay):
        patch.setattr(base, function.__name__, function, raising=False)
    patch.setattr(base, "reset", lambda _: None, raising=False)

    def forbidding(owner: Any, name: str, original: Any) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            device.forbids(name)
            return original(*args, **kwargs)

        patch.setattr(owner, name, call, raising=False)

    patch.setattr(torch.cuda.graph, "default_capture_stream", object())
    patch.setattr(torch.cuda, "stream", device.stream)
    patch.setattr(torch.cuda, "current_stream", lambda: device.current)
    patch.setattr(torch.cuda, "Stream", object)
    patch.setattr(torch.cuda.graphs, "graph_pool_handle", lambda: (0, 0))
    patch.setattr(torch.cuda, "is_initialized", lambda: True)

    def capturing() -> bool:
        here = threading.get_ident()
        return here in device.capturing and device.streams[here] is device.current

    patch.setattr(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", capturing)
    patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    forbidding(torch.cuda, "empty_cache", lambda: None)
    forbidding(torch.cuda, "synchronize", lambda device=None: None)
    for name in ("prepare_trace", "start_trace", "stop_trace"):
        forbidding(profile, name, getattr(profile, name))
    return device


class Training:
    """Training as in torch's notes on CUDA graphs: warm-up, capture of a whole step, replays.

    Args:
        warmups: the steps before the capture.
        updates: the steps in the capture.
    """

    def __init__(self, warmups: int = 3, *, updates: int = 1) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.graph = torch.cuda.CUDAGraph()
        self._warmups = warmups
        self._updates = updates

    def half(self) -> None:
        """Run forward and backward."""
        self.optimizer.zero_grad(set_to_none=True)
        self.model(torch.ones(1, 2)).sum().backward()

    def step(self) -> None:
        """Forward, backward and update."""
        self.half()
        self.optimizer.step()

    def capture(self, inside: Callable[[], object] = nothing) -> None:
        """Capture the steps, and call ``inside()`` after each of them."""
        with torch.cuda.graph(self.graph):
            for _ in range(self._updates):
                self.step()
                inside()

    def run(
        self, replays: int = 100, step: Callable[[], object] = nothing, inside: Callable[[], object] = nothing
    ) -> None:
        """Train; ``step()`` is called after each step that runs."""
        for _ in range(self._warmups):
            self.step()
            step()
        self.capture(inside)
        for _ in range(replays):
            self.graph.replay()
            step()


class Replays(torch.autograd.Function):
    """Copies a tensor, and replays a graph in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, graph: torch.cuda.CUDAGraph) -> torch.Tensor:
        ctx.graph = graph
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.graph.replay()
        return gradients[0], None
