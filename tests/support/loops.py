"""A training loop on a simulated CPU and GPU, recorded in torch.profiler's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from instrument.read.kineto.kineto import read_kineto
from instrument.read.tables.trace import Trace

BASE_US = 1_712_195_495_000_000
LATENCY_US = 5  # from a launch to the start of its kernel on an idle GPU


class Loop:
    """Simulates calls and keeps the time in us; one stream, so work runs in order.

    Attributes:
        cpu: the time on the CPU.
        gpu: the time at which the GPU finishes all queued work.
        starved: how long the GPU has waited for launches since its first work.
        held: the starts and ends of launches that waited for room in the queue.
        device: the number of the GPU that work is launched on.

    Args:
        process: the process number.
        device: the number of the GPU.
        queue: the number of unfinished launches that the GPU can hold.
    """

    def __init__(self, process: int = 1, device: int = 0, queue: int = 1 << 30) -> None:
        self.cpu = self.gpu = self.starved = 0
        self.held: list[tuple[int, int]] = []
        self._queue, self._ends = queue, list[int]()
        self.events: list[dict[str, Any]] = []
        self._process, self.device = process, device
        self._launches = 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Mark a step."""
        start = self.cpu
        yield
        self.add("user_annotation", f"ProfilerStep#{number}", start, self.cpu)

    def work(self, us: int) -> None:
        """Keep the CPU busy."""
        self.cpu += us

    def launch(
        self, us: int, *, call: str = "cudaLaunchKernel", cost: int = 10, thread: int = 1, kernels: int = 1
    ) -> None:
        """Launch work of this duration in as many ``kernels``; with 0 the trace lacks the work."""
        self._launches += 1
        ids = {"correlation": self._process * 1_000_000 + self._launches}
        begun = self.cpu
        if len(self._ends) >= self._queue and self._ends[-self._queue] > begun:
            self.cpu = self._ends[-self._queue]
            self.held.append((begun + cost, self.cpu + cost))
        self.add("cuda_runtime", call, begun, self.cpu + cost, thread, **ids)
        start = max(self.cpu + LATENCY_US, self.gpu)
        if self.gpu and self.cpu >= self.gpu:
            self.starved += start - self.gpu
        self.gpu = start + us
        self._ends.append(self.gpu)
        self.cpu += cost
        for number in range(kernels):
            begin, end = (start + us * part // kernels for part in (number, number + 1))
            event = self.event("kernel", "volta_sgemm_128x64_tn", begin, end) | {"pid": self.device, "tid": 7}
            self.events.append(event | {"args": ids | {"device": self.device, "stream": 7}})

    def synchronize(self, call: str = "cudaDeviceSynchronize", thread: int = 1) -> None:
        """Wait for the GPU."""
        start, self.cpu = self.cpu, max(self.cpu, self.gpu) + 1
        self.add("cuda_runtime", call, start, self.cpu, thread)

    def trace(self, folder: Path, *others: Loop) -> Trace:
        """Return the trace of a recording that ends now; torch's profiler synchronizes first."""
        self.synchronize()
        events = [event for loop in (self, *others) for event in loop.events]
        path = folder / "trace.json"
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
        return read_kineto(path)

    def add(self, category: str, name: str, start: int, end: int, thread: int = 1, **args: Any) -> None:
        """Add an event of a thread, with its times."""
        event = self.event(category, name, start, end) | {"pid": self._process, "tid": thread}
        self.events.append(event | {"args": args})

    @staticmethod
    def event(category: str, name: str, start: int, end: int) -> dict[str, Any]:
        """Return an event without its place."""
        return {"ph": "X", "cat": category, "name": name, "ts": BASE_US + start, "dur": end - start}
