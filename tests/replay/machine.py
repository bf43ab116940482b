"""Simulates a program on a CPU and a GPU with known delays, and records it as a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from instrument.read.tables.trace import Trace
from tests.diagnosis.small_traces import Row, kernel, memcpy, memset, on_cpu, trace_of

KERNEL, COPY, FILL = "compute", "Memcpy DtoD (Device -> Device)", "Memset (Device)"


class Costs(NamedTuple):
    """The delays of a machine in ns.

    Attributes:
        launch: from the start of a launch to the start of its work on an idle stream.
        stream: from the end of work to the start of the work after it on its stream.
        event: from the end of work to the start of work on another stream that waited for it.
        returned: from the end of work to the return of a call that waited for it.
        call: how long a call of the runtime takes.
    """

    launch: int = 5_000
    stream: int = 1_000
    event: int = 2_000
    returned: int = 3_000
    call: int = 2_000


class Loader:
    """A DataLoader with workers: each loads every so many batches, and two of them ahead.

    Args:
        workers: how many there are.
        load_ns: how long one takes for a batch.
        since: when they start.
    """

    def __init__(self, workers: int, load_ns: int, since: int = 0) -> None:
        self._workers, self._load_ns = workers, load_ns
        self._ready: list[int] = []
        self._asked = [since] * 2 * workers

    def take(self, now: int, call: int) -> int:
        """Return when a call returns with the next batch, which asks for another one."""
        asked, before = self._asked.pop(0), self._ready[-self._workers] if len(self._ready) >= self._workers else 0
        self._ready.append(max(asked, before) + self._load_ns)
        self._asked.append(max(now, self._ready[-1]) + call)
        return self._asked[-1]


class Machine:
    """Runs a program, and keeps the time of two threads and the streams of a GPU.

    Attributes:
        ends: when each step ended: on the CPU, and on the GPU with all work launched so far.
        start: when the first step started: on the CPU, or on the GPU if that has work of before.
        busy: the sum of the durations of the work on each stream.
    """

    def __init__(self, costs: Costs | None = None, *, faster: Callable[[str], float] = lambda name: 1) -> None:
        self.costs, self._faster = costs or Costs(), faster
        self._now, self._thread = [0, 0], 0
        self._stream: dict[int, int] = {}
        self._event: dict[int, int] = {}
        self._correlation = 0
        self.rows: dict[str, list[Row]] = {name: [] for name in ("operators", "regions", "runtime", "gpu")}
        self.ends: list[int] = []
        self.start: int | None = None
        self.busy: dict[int, int] = {}

    @property
    def now(self) -> int:
        """The time of the running thread."""
        return self._now[self._thread]

    def begin(self) -> None:
        """Begin the recording: what the CPU did so far is not in the trace."""
        for name in ("operators", "regions", "runtime"):
            self.rows[name].clear()
        self.rows["gpu"] = [row for row in self.rows["gpu"] if row["start_ns"] + row["duration_ns"] > self.now]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark a step."""
        since = self.now
        self.start = max(since, *self._stream.values(), 0) if self.start is None else self.start
        yield
        self._add("regions", f"ProfilerStep#{len(self.ends)}", since)
        self.ends.append(max(self.now, *self._stream.values(), *self.ends, 0))

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Open a region."""
        since = self.now
        yield
        self._add("regions", name, since)

    def python(self, ns: int) -> None:
        """Keep the CPU busy without an operator."""
        self._now[self._thread] += ns

    def work(self, ns: int, name: str = "aten::add") -> None:
        """Keep the CPU busy with an operator."""
        since = self.now
        self.python(ns)
        self._add("operators", name, since)

    def launch(self, ns: int, stream: int = 7, name: str = KERNEL) -> None:
        """Launch work of this duration."""
        call = "cudaMemcpyAsync" if name[:6] == "Memcpy" else "cudaMemsetAsync" if name[:6] == "Memset" else ""
        self._call(call or "cudaLaunchKernel", self.costs.call, self._start(ns, stream, name))

    def wait_event(self, stream: int, awaited: int) -> None:
        """Let the next work of a stream wait for all work of another stream."""
        self._event[stream] = self._stream.get(awaited, 0)
        self._call("cudaStreamWaitEvent", 500)

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for a stream, or for the whole GPU."""
        ends = [end for number, end in self._stream.items() if stream in (None, number)]
        name = "cudaDeviceSynchronize" if stream is None else "cudaStreamSynchronize"
        self._call(name, self._until(max(ends, default=0)))

    def copy(self, ns: int, stream: int = 7) -> None:
        """Copy from pageable memory, which waits for the copy."""
        correlation = self._start(ns, stream, "Memcpy HtoD (Pageable -> Device)")
        self._call("cudaMemcpyAsync", self._until(self._stream[stream]), correlation)

    def next_batch(self, loader: Loader) -> None:
        """Wait for the next batch."""
        until = loader.take(self.now, self.costs.call)
        self.work(until - self.now, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")

    @contextmanager
    def backward(self, fork: int = 5_000, join: int = 8_000) -> Iterator[None]:
        """Work on the other thread while this one waits."""
        self._now[1], self._thread = self._now[0] + fork, 1
        yield
        self._now[0], self._thread = self._now[1] + join, 0

    @property
    def lengths(self) -> list[int]:
        """The lengths of the steps."""
        assert self.start is not None
        return [end - since for since, end in zip([self.start, *self.ends], self.ends, strict=False)]

    def trace(self) -> Trace:
        """Return the trace."""
        rows = {
            name: sorted(each, key=lambda row: (row["start_ns"], -row["duration_ns"]))
            for name, each in self.rows.items()
            if each
        }
        return trace_of(**rows)

    def _start(self, ns: int, stream: int, name: str) -> int:
        """Put work into a stream, and return its number."""
        ns = round(ns / self._faster(name))
        starts = [self.now + self.costs.launch]
        if stream in self._stream:
            starts.append(self._stream[stream] + self.costs.stream)
        if self._event.get(stream):
            starts.append(self._event.pop(stream) + self.costs.event)
        start = max(starts)
        self._stream[stream] = start + ns
        self.busy[stream] = self.busy.get(stream, 0) + ns
        self._correlation += 1
        make: Any = {"Memcpy": memcpy, "Memset": lambda _, *rest, **more: memset(*rest, **more)}.get(
            name[:6], kernel
        )
        self.rows["gpu"].append(make(name, start, start + ns, stream=stream, correlation=self._correlation))
        return self._correlation

    def _until(self, end: int) -> int:
        """Return how long a call takes that waits for an end."""
        return max(self.costs.returned, end + self.costs.returned - self.now)

    def _call(self, name: str, ns: int, correlation: int | None = None) -> None:
        since = self.now
        self._now[self._thread] += ns
        self._add("runtime", name, since, **({} if correlation is None else {"correlation": correlation}))

    def _add(self, table: str, name: str, since: int, **columns: Any) -> None:
        self.rows[table].append(on_cpu(name, since, self.now, thread=self._thread, **columns))
