"""Streams, events and CUDA graphs of the pretended GPU: nothing is ever pending, and a replay does nothing."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from typing import Any

import torch

from ...explain.waits.operations import EVENT, STREAM
from .devices import Devices
from .state import RunState

CUDA = 1  # the number of the device type
_EXTERNAL = 2**20  # stream numbers from here on are addresses of external streams


class _ThreadState(threading.local):
    """The streams of one thread.

    Attributes:
        chosen: the number of the current stream by device, if it is not the default one.
        capturing: whether a graph is being captured.
    """

    capturing = False

    def __init__(self) -> None:
        self.chosen: dict[int, int] = {}


class Streams:
    """The streams of the run, and the current one of each thread and device."""

    def __init__(self, log: RunState, devices: Devices) -> None:
        self.log = log
        self.devices = devices
        self._numbers = itertools.count(1)
        self.priorities: dict[int, int] = {}
        self.thread = _ThreadState()

    def new(self, kind: Any, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        """Create a stream for ``torch.cuda.Stream(device, priority)``; ``given`` has internal arguments."""
        index = given.get("device_index", self.devices.index(device))
        number = given.get("stream_id", given.get("stream_ptr"))
        if number is None:
            number = next(self._numbers)
            self.priorities[number] = priority
        return Stream(self, kind, number, index)

    def generic(self, device: Any = None, *given: Any, priority: int = 0, **more: Any) -> Stream | None:
        """Create a stream for ``torch.Stream(...)``; return None for another device."""
        if more or given:
            parts = () if device is None else (device, *given)
            named = {**dict(zip(("stream_id", "device_index", "device_type"), parts, strict=False)), **more}
            return self.new(torch.cuda.Stream, **named) if named.pop("device_type", CUDA) == CUDA else None
        return self.new(torch.cuda.Stream, device, priority) if self.devices.is_gpu(device) else None

    def event(
        self, kind: Any, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False,
        external: bool = False,
    ) -> Event:  # fmt: skip
        """Create an event for ``torch.cuda.Event(...)``."""
        return Event(self, kind, enable_timing)

    def generic_event(self, device: Any = None, **options: Any) -> Event | None:
        """Create an event for ``torch.Event(...)``; return None for another device."""
        return self.event(torch.cuda.Event, **options) if self.devices.is_gpu(device) else None

    def current(self, index: int) -> tuple[int, int, int]:
        """Return the number, device and device type of the current stream of a device."""
        return self.thread.chosen.get(index, 0), index, CUDA

    def select(self, stream_id: int, device_index: int, device_type: int = CUDA) -> None:
        """Make a stream the current one of its device, and its device the current device."""
        self.devices.select(device_index)
        self.thread.chosen[device_index] = stream_id

    def of(self, stream: tuple[int, int, int]) -> Stream:
        """Return the stream object for a result of `current`."""
        return Stream(self, torch.cuda.Stream, stream[0], stream[1])

    def synchronize(self) -> None:
        """Synchronize a device."""
        self.log.record_sync("synchronize")

    def replacements(self) -> dict[str, Any]:
        """Return the replacements of functions of ``torch._C`` about streams."""
        return {
            "_cuda_getCurrentStream": self.current,
            "_cuda_getDefaultStream": lambda index: (0, index, CUDA),
            "_cuda_getCurrentRawStream": lambda index: self.of(self.current(index)).cuda_stream,
            "_cuda_getStreamFromExternal": lambda pointer, index: (pointer, index, CUDA),
            "_cuda_setStream": self.select,
            "_cuda_synchronize": self.synchronize,
            "_cuda_isCurrentStreamCapturing": lambda: self.thread.capturing,
            "_cuda_sleep": lambda cycles: None,
            "_accelerator_getStream": lambda index: self.of(self.current(index)),
            "_accelerator_setStream": lambda stream: self.select(stream.stream_id, stream.device_index),
            "_accelerator_synchronizeDevice": lambda index: self.synchronize(),
        }


class Pretended:
    """Passes for an object of the class ``kind`` in checks of its class."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._kind


class Stream(Pretended):
    """A pretended `torch.cuda.Stream`."""

    device_type = CUDA

    def __init__(self, streams: Streams, kind: Any, stream_id: int, device_index: int) -> None:
        self._streams = streams
        super().__init__(kind)
        self.stream_id = stream_id
        self.device_index = device_index
        self.device = torch.device("cuda", device_index)
        pool = 0x560000000000 + 0x100 * stream_id if stream_id else 0
        self.cuda_stream = self.native_handle = stream_id if stream_id >= _EXTERNAL else pool
        self.priority = streams.priorities.get(stream_id, 0)
        self._outside: list[tuple[tuple[int, int, int], int]] = []  # current outside each `with` block

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        """Return the lowest and the highest priority."""
        return 0, -5

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    def wait_event(self, event: Any) -> None:
        """Do nothing: no work is pending."""

    wait_stream = wait_event

    def record_event(self, event: Any = None) -> Any:
        """Record an event, a new one if none is given; return it."""
        event = self._streams.event(torch.cuda.Event) if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Return whether a graph is being captured."""
        return self._streams.thread.capturing

    def synchronize(self) -> None:
        """Synchronize this stream."""
        self._streams.log.record_sync("synchronize", STREAM)

    def __enter__(self) -> Stream:
        self._outside.append((self._streams.current(self.device_index), self._streams.devices.current))
        self._streams.select(self.stream_id, self.device_index)
        return self

    def __exit__(self, *_: object) -> None:
        stream, device = self._outside.pop()
        self._streams.select(*stream)
        self._streams.devices.select(device)

    def __eq__(self, other: object) -> bool:
        mine = (self.stream_id, self.device_index)
        return isinstance(other, Stream) and mine == (other.stream_id, other.device_index)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device_index))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class Event(Pretended):
    """A pretended `torch.cuda.Event`."""

    def __init__(self, streams: Streams, kind: Any, timing: bool) -> None:
        self._streams = streams
        super().__init__(kind)
        self._timing = timing
        self._recorded: int | None = None
        self.device: Any = None
        self.cuda_event = self.event_id = 0

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_event)

    def record(self, stream: Any = None) -> None:
        """Record the CPU's time."""
        self._recorded = time.perf_counter_ns()
        self.device = torch.device("cuda", self._streams.devices.current) if stream is None else stream.device
        self.cuda_event = self.event_id = id(self)

    def wait(self, stream: Any = None) -> None:
        """Do nothing: no work is pending."""

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def synchronize(self) -> None:
        """Wait for the work before this event."""
        self._streams.log.record_sync("synchronize", EVENT)

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds between two events, at least a microsecond."""
        if not (self._timing and end_event._timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded is None or end_event._recorded is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return max(float(end_event._recorded - self._recorded), 1e3) / 1e6

    def ipc_handle(self) -> bytes:
        """Record that an event cannot be shared; return a placeholder."""
        self._streams.log.record_not_covered("an event cannot be shared with another process")
        return bytes(64)

    def __repr__(self) -> str:
        return (
            f"<torch.cuda.Event {self.cuda_event:#x}>" if self.cuda_event else "<torch.cuda.Event uninitialized>"
        )


REPLAY = "a replay of a CUDA graph does not repeat the captured work"
GRAPHED = "make_graphed_callables captures nothing: the callables run as they are"
_handles = itertools.count(1)


def pool_handle() -> tuple[int, int]:
    """Return a handle of a new pool of memory."""
    return 0, next(_handles)


class Graph(Pretended):
    """A pretended `torch.cuda.CUDAGraph` or `torch.accelerator.Graph`."""

    def __init__(self, streams: Streams, kind: Any, pool: Any = None) -> None:
        self._streams = streams
        super().__init__(kind)
        self._pool = pool or pool_handle()

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
        self._streams.thread.capturing = True

    def capture_end(self) -> None:
        """End the capture, which does not synchronize."""
        self._streams.thread.capturing = False

    def instantiate(self, *_: Any) -> None:
        """Do nothing."""

    reset = register_generator_state = enable_debug_mode = instantiate

    def replay(self) -> None:
        """Record that a replay is not covered."""
        self._streams.log.record_not_covered(REPLAY)

    def pool(self) -> Any:
        """Return the handle of the pool of memory."""
        return self._pool

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


def make_graphed_callables(log: RunState) -> Any:
    """Return the replacement of `torch.cuda.make_graphed_callables`, which synchronizes before each capture."""

    def make(callables: Any, sample_args: Any, *options: Any, **more: Any) -> Any:
        log.record_sync("make_graphed_callables")
        log.record_not_covered(GRAPHED)
        return callables

    return make
