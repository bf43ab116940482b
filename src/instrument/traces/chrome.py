"""Reads from a Chrome trace of torch.profiler what a summary needs: ranges, launches and GPU work.

Events are decoded one at a time and only as far as needed: little more than the text itself is in memory.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

import msgspec
from msgspec import Raw, Struct

from ..errors import TraceError

Thread = tuple[bytes, bytes]
"""Process and thread as the file writes them, numbers or strings."""
Moment = tuple[Thread, int]
Range = tuple[int, int, str]
"""Start, end and name."""

# Today's categories and, in lower case, those of 2021, when a step was an operator like any other.
_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "runtime"})
_OPERATORS = frozenset({"cpu_op", "operator"})
_REGIONS = frozenset({"user_annotation"})
_READ = _GPU | _LAUNCHES | _OPERATORS | _REGIONS
_STEP = "ProfilerStep#"


@dataclass
class Recorded:
    """What a trace holds that a summary needs."""

    steps: list[tuple[Thread, Range]] = field(default_factory=list)
    regions: dict[Thread, list[Range]] = field(default_factory=lambda: defaultdict(list))
    operators: dict[Thread, list[Range]] = field(default_factory=lambda: defaultdict(list))
    launches: dict[bytes, Moment] = field(default_factory=dict)  # by correlation
    linked: dict[bytes, Moment] = field(default_factory=dict)  # operators, by external id
    gpu: list[tuple[int, bytes, bytes]] = field(default_factory=list)  # duration, correlation, external id
    span: tuple[int, int] | None = None

    def main_thread(self) -> Thread | None:
        """The thread of the steps; without any, the one that spent the most time in regions."""
        time_ns: Counter[Thread] = Counter()
        others = ((thread, item) for thread, ranges in self.regions.items() for item in ranges)
        for thread, (start, end, _) in self.steps or others:
            time_ns[thread] += end - start
        return max(time_ns, key=time_ns.__getitem__, default=None)

    def step_ns(self) -> int:
        """The durations of the steps, added up; without any, from the first event to the last."""
        first, last = self.span or (0, 0)
        return sum(end - start for _, (start, end, _) in self.steps) if self.steps else last - first

    def gpu_work(self) -> Iterator[tuple[int, Moment | None]]:
        """The duration of each piece of GPU work, and where and when it was launched if that is known."""
        for duration_ns, correlation, external in self.gpu:
            yield duration_ns, self.launches.get(correlation) or self.linked.get(external)


class _File(Struct):
    events: list[Raw] = msgspec.field(name="traceEvents")


class _Event(Struct, gc=False):
    """The raw fields may hold a number or a string, and ``args`` anything at all."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: Raw = Raw()
    dur: Raw = Raw()
    pid: Raw = Raw()
    tid: Raw = Raw()
    args: Raw = Raw()

    def range(self) -> Range:
        start_ns = _ns(self.ts)
        return start_ns, start_ns + _ns(self.dur), self.name

    def links(self) -> tuple[bytes, bytes]:
        """The correlation and the external id; an empty one is missing."""
        try:
            args = _decode_args(self.args)
        except msgspec.DecodeError:
            return b"", b""
        return bytes(args.correlation), bytes(args.external) or bytes(args.external_2021)


class _Args(Struct, gc=False):
    correlation: Raw = Raw()
    external: Raw = msgspec.field(default=Raw(), name="External id")
    external_2021: Raw = msgspec.field(default=Raw(), name="external id")


_decode_file = msgspec.json.Decoder(_File | list[Raw]).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_args = msgspec.json.Decoder(_Args).decode


def read(path: Path) -> Recorded:
    """Read a trace, gzip or plain.

    Raises:
        TraceError: If the file is not such a trace, or is damaged.
        OSError: If it cannot be opened.
    """
    data = path.read_bytes()
    if not data:
        raise TraceError(path, "it is empty")
    try:
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        content = _decode_file(data)
        del data  # the events keep the text alive as long as they need it
        return _collect(content.events if isinstance(content, _File) else content)
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError, ValueError) as error:
        raise TraceError(path, str(error) or type(error).__name__) from error


def _collect(events: list[Raw]) -> Recorded:
    recorded = Recorded()
    starts, ends = [], []
    for event in _events(events, _READ):
        kind, thread, item = event.cat.lower(), (bytes(event.pid), bytes(event.tid)), event.range()
        start_ns, end_ns, name = item
        starts.append(start_ns)
        ends.append(end_ns)
        if kind in _GPU:
            recorded.gpu.append((end_ns - start_ns, *event.links()))
        elif kind in _LAUNCHES:
            recorded.launches.setdefault(event.links()[0], (thread, start_ns))
        elif name.startswith(_STEP):
            recorded.steps.append((thread, item))
        else:
            ranges = recorded.regions if kind in _REGIONS else recorded.operators
            ranges[thread].append(item)
    recorded.launches.pop(b"", None)
    _drop_unbegun_step(recorded)
    recorded.span = (min(starts), max(ends)) if starts else None
    _link(recorded, events)
    return recorded


def _drop_unbegun_step(recorded: Recorded) -> None:
    """Drop the last step if nothing ran in it: a loop that ends tells the profiler that one more begins."""
    work = [start for ranges in (recorded.operators or recorded.regions).values() for start, _, _ in ranges]
    if recorded.steps:
        last = max(recorded.steps, key=lambda step: step[1])
        if max(work, default=0) < last[1][0]:
            recorded.steps.remove(last)


def _link(recorded: Recorded, events: list[Raw]) -> None:
    """Find the operators of GPU work without a launch, in a second pass that few traces need."""
    # Where both ids are equal the external id is a copy, as of 2022, and names no operator.
    wanted = {
        external
        for _, correlation, external in recorded.gpu
        if external and external != correlation and correlation not in recorded.launches
    }
    for event in _events(events, _OPERATORS) if wanted else ():
        external = event.links()[1]
        if external in wanted:
            recorded.linked[external] = (bytes(event.pid), bytes(event.tid)), _ns(event.ts)


def _events(events: Iterable[Raw], categories: Collection[str]) -> Iterator[_Event]:
    """The complete events of these categories."""
    for raw in events:
        event = _decode_event(raw)
        if event.ph == "X" and event.cat.lower() in categories:
            yield event


def _ns(us: Raw) -> int:
    """Microseconds with decimals as nanoseconds; through float, those since 1970 would be 125 ns off."""
    text = bytes(us).decode()
    try:
        return round(Decimal(text or 0) * 1000)
    except ArithmeticError:
        raise ValueError(f"{text} is no time in microseconds") from None
