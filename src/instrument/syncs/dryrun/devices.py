"""The pretended GPUs: properties, the current one, generators of random numbers, streams, events and CUDA graphs.

Nothing is ever pending on a stream, and a replay of a graph does nothing.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
import uuid
from typing import Any

import torch

from ...explain.waits.operations import EVENT, STREAM
from ..counting.streams import ALL
from .state import RunState

CUDA = 1  # the number of the device type
_EXTERNAL = 2**20  # stream numbers from here on are addresses of external streams
GIB = 2**30
# Those of an A100: every table of peak figures lists it, and it lacks features that a CPU cannot imitate.
NAME = "NVIDIA A100-SXM4-80GB"
CAPABILITY = (8, 0)
TOTAL_MEMORY = 81154 * 2**20
ARCHITECTURES = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"


class Properties:
    """The result of `torch.cuda.get_device_properties`."""

    name = gcnArchName = NAME  # noqa: N815
    major, minor = CAPABILITY
    total_memory = TOTAL_MEMORY
    multi_processor_count = 108
    warp_size = 32
    max_threads_per_block = 1024
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    shared_memory_per_block = 49152
    shared_memory_per_block_optin = 166912
    shared_memory_per_multiprocessor = 167936
    L2_cache_size = 40 * 2**20
    clock_rate = 1410000
    memory_clock_rate = 1593000
    memory_bus_width = 5120
    is_integrated = is_multi_gpu_board = 0
    pci_domain_id = pci_device_id = 0

    def __init__(self, index: int) -> None:
        self.uuid = uuid.UUID(int=index + 1)
        self.pci_bus_id = index + 1

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 2**20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, L2_cache_size={self.L2_cache_size // 2**20}MB)"
        )


class _ThreadState(threading.local):
    """What one thread has selected.

    Attributes:
        index: the index of the current device.
        streams: the number of the current stream by device, if it is not the default one.
        capturing: whether a graph is being captured.
    """

    index = 0
    capturing = False

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}


class Gpus:
    """The pretended GPUs and their streams; each thread has a current device, and a current stream on each.

    Args:
        log: records synchronizations, and calls that cannot be carried out.
        count: the number of devices.
    """

    def __init__(self, log: RunState, count: int) -> None:
        self.log = log
        self.count = count
        self._process = os.getpid()  # a GPU cannot be used after a fork
        self.thread = _ThreadState()
        self.priorities: dict[int, int] = {}  # of streams, by number
        self._numbers = itertools.count(1)

    @property
    def current(self) -> int:
        """The index of the current device of this thread."""
        return self.thread.index

    def select(self, index: int) -> None:
        """Make a device the current device of this thread."""
        if not 0 <= index < self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.thread.index = index

    def exchange(self, index: int) -> int:
        """Make a device the current one, unless its index is negative; return the previous device, or -1."""
        if index < 0:
            return -1
        before = self.current
        self.select(index)
        return before

    def index(self, device: Any) -> int:
        """Return the index of ``device``, an argument of a function of `torch.cuda`."""
        if device is None or (isinstance(device, int) and device < 0):
            return self.current
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self.current if index is None else index

    def is_gpu(self, device: Any) -> bool:
        """Return whether ``device``, an argument of a function of ``torch``, is a GPU; None counts as one."""
        return device is None or isinstance(device, int) or torch.device(device).type == "cuda"

    def generator(self, device: Any = "cpu") -> Generator | None:
        """Create a generator for ``torch.Generator(device)``; return None for another device."""
        return Generator(self.index(device)) if self.is_gpu(device) else None

    def stream(self, kind: Any, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        """Create a stream for ``torch.cuda.Stream(device, priority)``; ``given`` has internal arguments."""
        index = given.get("device_index", self.index(device))
        number = given.get("stream_id", given.get("stream_ptr"))
        if number is None:
            number = next(self._numbers)
            self.priorities[number] = priority
        return Stream(self, kind, number, index)

    def generic_stream(self, device: Any = None, *given: Any, priority: int = 0, **more: Any) -> Stream | None:
        """Create a stream for ``torch.Stream(...)``; return None for another device."""
        if more or given:
            parts = () if device is None else (device, *given)
            named = {**dict(zip(("stream_id", "device_index", "device_type"), parts, strict=False)), **more}
            return self.stream(torch.cuda.Stream, **named) if named.pop("device_type", CUDA) == CUDA else None
        return self.stream(torch.cuda.Stream, device, priority) if self.is_gpu(device) else None

    def event(
        self, kind: Any, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False,
        external: bool = False,
    ) -> Event:  # fmt: skip
        """Create an event for ``torch.cuda.Event(...)``."""
        return Event(self, kind, enable_timing)

    def generic_event(self, device: Any = None, **options: Any) -> Event | None:
        """Create an event for ``torch.Event(...)``; return None for another device."""
        return self.event(torch.cuda.Event, **options) if self.is_gpu(device) else None

    def current_stream(self, index: int) -> tuple[int, int, int]:
        """Return the number, device and device type of the current stream of a device."""
        return self.thread.streams.get(index, 0), index, CUDA

    def select_stream(self, stream_id: int, device_index: int, device_type: int = CUDA) -> None:
        """Make a stream the current one of its device, and its device the current device."""
        self.select(device_index)
        if self.thread.streams.get(device_index, 0) != stream_id:
            self.log.note_stream("select", stream_id)
        self.thread.streams[device_index] = stream_id

    def of(self, stream: tuple[int, int, int]) -> Stream:
        """Return the stream object for a result of `current_stream`."""
        return Stream(self, torch.cuda.Stream, stream[0], stream[1])

    def replacements(self) -> dict[str, Any]:
        """Return the replacements of functions of ``torch._C`` about devices and streams."""
        alike = {
            lambda: self.count: "_cuda_getDeviceCount _accelerator_deviceCount _accelerator_hooks_device_count",
            lambda: self.current: (
                "_cuda_getDevice _accelerator_getDeviceIndex _accelerator_hooks_get_current_device"
            ),
            self.select: "_cuda_setDevice _accelerator_setDeviceIndex _accelerator_hooks_set_current_device",
            self.exchange: (
                "_cuda_exchangeDevice _accelerator_exchangeDevice _accelerator_hooks_exchange_device "
                "_cuda_maybeExchangeDevice _accelerator_maybeExchangeDevice "
                "_accelerator_hooks_maybe_exchange_device"
            ),
        }
        return {name: function for function, names in alike.items() for name in names.split()} | {
            "_cuda_init": lambda: None,
            "_cuda_isInBadFork": lambda: os.getpid() != self._process,
            "_cuda_hasPrimaryContext": lambda index: True,
            "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
            "_cuda_getArchFlags": lambda: ARCHITECTURES,
            "_cuda_getCompiledVersion": lambda: 12080,
            "_accelerator_getAccelerator": lambda: torch.device("cuda"),
            "_get_accelerator": lambda check=None: torch.device("cuda"),
            "_accelerator_getDeviceCapability": lambda index: self.capability(),
            "_cuda_getCurrentStream": self.current_stream,
            "_cuda_getDefaultStream": lambda index: (0, index, CUDA),
            "_cuda_getCurrentRawStream": lambda index: self.of(self.current_stream(index)).cuda_stream,
            "_cuda_getStreamFromExternal": lambda pointer, index: (pointer, index, CUDA),
            "_cuda_setStream": self.select_stream,
            "_cuda_synchronize": lambda: self.log.record_sync("synchronize", stream=ALL),
            "_cuda_isCurrentStreamCapturing": lambda: self.thread.capturing,
            "_cuda_sleep": lambda cycles: None,
            "_accelerator_getStream": lambda index: self.of(self.current_stream(index)),
            "_accelerator_setStream": lambda stream: self.select_stream(stream.stream_id, stream.device_index),
            "_accelerator_synchronizeDevice": lambda index: self.log.record_sync("synchronize", stream=ALL),
        }

    def capability(self, device: Any = None, /) -> dict[str, Any]:
        """Replace `torch.accelerator.get_device_capability`, whose answers torch caches."""
        names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
        return {"supported_dtypes": {getattr(torch, name) for name in names.split()}}


_PHILOX = 16  # bytes in the state of a real GPU's generator: seed and offset


class Generator(torch._C.Generator):
    """A CPU generator that reports a GPU as its device."""

    # `__new__` is C code, and takes the real device
    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._offset = 0

    def __new__(cls, index: int = 0) -> Generator:
        """Create the generator on the CPU."""
        made: Generator = super().__new__(cls)
        return made

    @property
    def device(self) -> Any:  # type: ignore[override]  # an attribute in torch's stubs, read-only in fact
        """The GPU that the generator pretends to be on."""
        return torch.device("cuda", self._index)

    def set_state(self, new_state: Any) -> Any:
        """Set a state from `get_state`; of a real GPU's state, use only the seed."""
        if new_state.numel() == _PHILOX:
            return self.manual_seed(int.from_bytes(bytes(new_state.numpy()[:8]), "little"))
        super().set_state(new_state)
        return self

    def get_offset(self) -> int:
        """Return what `set_offset` set; it changes nothing."""
        return self._offset

    def set_offset(self, offset: int) -> Any:
        """Store ``offset``, which CPU generators do not have."""
        self._offset = offset
        return self

    def clone_state(self) -> Any:
        """Return another generator in the same state."""
        other = Generator(self._index)
        return other.set_state(self.get_state())

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: Any) -> Any:
        """Take the state of another generator."""
        return self.set_state(state.get_state())

    def __reduce__(self) -> Any:
        return _restored, (type(self), self._index, self.get_state())


class DefaultGenerator(Generator):
    """The default generator of a device: the CPU's, from which every operator here draws."""

    get_state = staticmethod(torch.default_generator.get_state)
    seed = staticmethod(torch.default_generator.seed)
    initial_seed = staticmethod(torch.default_generator.initial_seed)

    def set_state(self, new_state: Any) -> Any:
        """Set the state of the CPU's generator."""
        if new_state.numel() == _PHILOX:
            return super().set_state(new_state)
        torch.default_generator.set_state(new_state)
        return self

    def manual_seed(self, seed: int) -> Any:
        """Seed the CPU's generator."""
        torch.default_generator.manual_seed(seed)
        return self


def _restored(kind: type[Generator], index: int, state: Any) -> Any:
    made = kind(index)
    return made if kind is DefaultGenerator else made.set_state(state)


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

    def __init__(self, gpus: Gpus, kind: Any, stream_id: int, device_index: int) -> None:
        self._gpus = gpus
        super().__init__(kind)
        self.stream_id = stream_id
        self.device_index = device_index
        self.device = torch.device("cuda", device_index)
        pool = 0x560000000000 + 0x100 * stream_id if stream_id else 0
        self.cuda_stream = self.native_handle = stream_id if stream_id >= _EXTERNAL else pool
        self.priority = gpus.priorities.get(stream_id, 0)
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
        """Note that what follows waits for the event; no work is pending."""
        self._gpus.log.note_stream("wait", self.stream_id, id(event))

    def wait_stream(self, stream: Any) -> None:
        """Note that what follows waits for the work of another stream; no work is pending."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        """Record an event, a new one if none is given; return it."""
        event = self._gpus.event(torch.cuda.Event) if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Return whether a graph is being captured."""
        return self._gpus.thread.capturing

    def synchronize(self) -> None:
        """Synchronize this stream."""
        self._gpus.log.record_sync("synchronize", STREAM, stream=self.stream_id)

    def __enter__(self) -> Stream:
        self._outside.append((self._gpus.current_stream(self.device_index), self._gpus.current))
        self._gpus.select_stream(self.stream_id, self.device_index)
        return self

    def __exit__(self, *_: object) -> None:
        stream, device = self._outside.pop()
        self._gpus.select_stream(*stream)
        self._gpus.select(device)

    def __eq__(self, other: object) -> bool:
        mine = (self.stream_id, self.device_index)
        return isinstance(other, Stream) and mine == (other.stream_id, other.device_index)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device_index))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class Event(Pretended):
    """A pretended `torch.cuda.Event`."""

    def __init__(self, gpus: Gpus, kind: Any, timing: bool) -> None:
        self._gpus = gpus
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
        self.device = torch.device("cuda", self._gpus.current) if stream is None else stream.device
        self.cuda_event = self.event_id = id(self)
        self._gpus.log.note_stream("record", None if stream is None else stream.stream_id, id(self))

    def wait(self, stream: Any = None) -> None:
        """Note that what follows waits for this event; no work is pending."""
        self._gpus.log.note_stream("wait", None if stream is None else stream.stream_id, id(self))

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def synchronize(self) -> None:
        """Wait for the work before this event."""
        self._gpus.log.record_sync("synchronize", EVENT, event=id(self))

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds between two events, at least a microsecond."""
        if not (self._timing and end_event._timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded is None or end_event._recorded is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return max(float(end_event._recorded - self._recorded), 1e3) / 1e6

    def ipc_handle(self) -> bytes:
        """Record that an event cannot be shared; return a placeholder."""
        self._gpus.log.record_not_covered("an event cannot be shared with another process")
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

    def __init__(self, gpus: Gpus, kind: Any, pool: Any = None) -> None:
        self._gpus = gpus
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
        self._gpus.thread.capturing = True

    def capture_end(self) -> None:
        """End the capture, which does not synchronize."""
        self._gpus.thread.capturing = False

    def instantiate(self, *_: Any) -> None:
        """Do nothing."""

    reset = register_generator_state = enable_debug_mode = instantiate

    def replay(self) -> None:
        """Record that a replay is not covered."""
        self._gpus.log.record_not_covered(REPLAY)

    def pool(self) -> Any:
        """Return the handle of the pool of memory."""
        return self._pool

    def debug_dump(self, debug_path: str) -> None:
        """Record that a dump is not covered."""
        self._gpus.log.record_not_covered("a CUDA graph cannot be dumped: nothing was captured")

    def raw_cuda_graph(self) -> int:
        """Return a made-up address."""
        return id(self)

    raw_cuda_graph_exec = raw_cuda_graph

    def get_graph_data(self) -> dict[str, Any]:
        """Record that the nodes of a graph are not covered; return an empty graph."""
        self._gpus.log.record_not_covered("a CUDA graph has no nodes: nothing was captured")
        return {"exec_graph_id": 0, "nodes": []}


def make_graphed_callables(log: RunState) -> Any:
    """Return the replacement of `torch.cuda.make_graphed_callables`, which synchronizes before each capture."""

    def make(callables: Any, sample_args: Any, *options: Any, **more: Any) -> Any:
        log.record_sync("make_graphed_callables")
        log.record_not_covered(GRAPHED)
        return callables

    return make
