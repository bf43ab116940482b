"""The records of rocprofv3's JSON, with the fields that a trace needs."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct, field

_Int = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Time = Annotated[int, Meta(ge=0, le=1 << 62)]
_Length = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]


class _Part(Struct, gc=False, frozen=True): ...


class Handle(_Part, frozen=True):
    """The handle of an agent, a queue, a stream or a counter."""

    handle: _Int = -1


class CorrelationIds(_Part, frozen=True):
    """The id of the call that caused a record, and the id of the call around that one."""

    internal: _Int = -1
    ancestor: _Int = -1


class Lengths(_Part, frozen=True):
    """The sizes of the three dimensions, in work items."""

    x: _Length = 0
    y: _Length = 0
    z: _Length = 0


class DispatchInfo(_Part, frozen=True):
    """A launch: the kernel, its sizes, its agent and its queue."""

    agent: Handle = field(default=Handle(), name="agent_id")
    queue: Handle = field(default=Handle(), name="queue_id")
    kernel: _Int = field(default=-1, name="kernel_id")
    shared_bytes: _Int = field(default=-1, name="group_segment_size")
    workgroup: Lengths = field(default=Lengths(), name="workgroup_size")
    grid: Lengths = field(default=Lengths(), name="grid_size")


class Record(_Part, frozen=True):
    """A record with a start and an end; `COLUMNS` says where the value of each column is."""

    COLUMNS: ClassVar[dict[str, str]] = {
        "start_ns": "start",
        "end_ns": "end",
        "thread": "thread",
        "correlation": "correlation.internal",
    }

    start: _Time = field(name="start_timestamp")
    end: _Time = field(name="end_timestamp")
    thread: _Int = field(default=-1, name="thread_id")
    correlation: CorrelationIds = field(default=CorrelationIds(), name="correlation_id")

    def __post_init__(self) -> None:
        if self.end < self.start:
            raise ValueError("it ends before it starts")


class Kernel(Record, frozen=True):
    """A kernel."""

    COLUMNS = Record.COLUMNS | {
        "agent": "info.agent.handle",
        "queue": "info.queue.handle",
        "stream": "stream.handle",
        "kernel": "info.kernel",
        "shared_bytes": "info.shared_bytes",
        **{axis: f"info.grid.{axis}" for axis in "xyz"},
        **{axis.upper(): f"info.workgroup.{axis}" for axis in "xyz"},
    }

    info: DispatchInfo = field(default=DispatchInfo(), name="dispatch_info")
    stream: Handle = field(default=Handle(), name="stream_id")


class Call(Record, frozen=True):
    """A call of an API, including rocTX, or an allocation."""

    COLUMNS = Record.COLUMNS | {"ancestor": "correlation.ancestor", "kind": "kind", "operation": "operation"}

    kind: _Int = -1
    operation: _Int = -1


class Copy(Call, frozen=True):
    """A memcpy."""

    COLUMNS = Call.COLUMNS | {
        "source": "source.handle",
        "target": "target.handle",
        "bytes": "bytes",
        "stream": "stream.handle",
    }

    source: Handle = field(default=Handle(), name="src_agent_id")
    target: Handle = field(default=Handle(), name="dst_agent_id")
    bytes: _Int = -1
    stream: Handle = field(default=Handle(), name="stream_id")


class CounterValue(_Part, frozen=True):
    """The value of one instance of a counter."""

    counter: Handle = field(default=Handle(), name="counter_id")
    value: float = 0.0


class Counted(_Part, frozen=True):
    """A kernel with the values of hardware counters, some with several instances."""

    COLUMNS: ClassVar[dict[str, str]] = {
        **{column: f"dispatch.{path}" for column, path in Kernel.COLUMNS.items()},
        "thread": "thread",
        "stream": "stream.handle",
    }

    dispatch: Kernel = field(name="dispatch_data")
    thread: _Int = field(default=-1, name="thread_id")
    stream: Handle = field(default=Handle(), name="stream_id")
    values: list[CounterValue] = field(default_factory=list, name="records")


class Symbol(_Part, frozen=True):
    """The symbol of a kernel; its formatted name is the demangled name without the linker's suffix."""

    id: _Int = field(name="kernel_id")
    formatted: str = field(default="", name="formatted_kernel_name")
    demangled: str = field(default="", name="demangled_kernel_name")
    name: str = field(default="", name="kernel_name")
    registers: _Int = field(default=-1, name="arch_vgpr_count")


class MemoryBank(_Part, frozen=True):
    """A memory bank of a GPU."""

    size_in_bytes: _Int = 0


class Agent(_Part, frozen=True):
    """A processor; `type` 2 is a GPU."""

    id: Handle = Handle()
    type: int = 0
    number: _Int = field(default=-1, name="logical_node_type_id")
    name: str = ""
    product: str = field(default="", name="product_name")
    sms: _Int = field(default=0, name="cu_count")
    waves_per_sm: _Int = field(default=0, name="max_waves_per_cu")
    threads_per_wave: _Int = field(default=0, name="wave_front_size")
    memory: list[MemoryBank] = field(default_factory=list, name="mem_banks")


class Counter(_Part, frozen=True):
    """The name of a hardware counter."""

    id: Handle = Handle()
    name: str = ""


class Label(_Part, frozen=True):
    """The argument of a rocTX call, by the id of the call."""

    key: _Int
    value: str


class Kind(_Part, frozen=True):
    """The name of a kind of record, and the names of its operations."""

    kind: str = ""
    operations: list[str] = field(default_factory=list)
