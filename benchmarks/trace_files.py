"""The traces for benchmarks of readers: a real or a synthetic one, and longer ones tiled from it."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
REAL = REPOSITORY / os.environ.get("INSTRUMENT_TRACES", "build/traces") / "tl_h100_owlv2.json.gz"
Json = dict[str, Any]

ID_KEYS = ("correlation", "External id", "id", "Python id", "Python parent id", "Ev Idx", "Sequence number")
SHIFTED = re.compile(rf'("(?:ts|{"|".join(ID_KEYS)})": |ProfilerStep#)(\d+)')

UNITS, UNIT_US = 4700, 250  # of the trace that is made up: a unit ends in one piece of work on the GPU
FRAMES, OPERATORS, MEMORY = 13, 5, 3  # events of a unit; frames and operators nest
EVENTS = FRAMES + OPERATORS + MEMORY
BEGIN_US = 1_419_116_104_507
RANK_TILES = 3  # 110 MB, as of a few steps of a large model
FIRST_CORRELATION = 463_298  # HTA fails where all are below 32,768
CPU: Json = {"pid": 21587, "tid": 21587}
GPU: Json = {"pid": 0, "tid": 7}
PLACE: Json = {"device": 0, "context": 1, "stream": 7}


@dataclass(frozen=True)
class TraceFile:
    """A file and the number of events in it."""

    path: Path
    events: int

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.path.stat().st_size

    def __str__(self) -> str:
        return f"{self.size / 1e6:,.0f} MB, {self.events:,} events"


@dataclass(frozen=True)
class TraceFiles:
    """The files that the benchmark reads.

    Attributes:
        origin: where the first comes from, in words.
        first: one file as a profiler's user has it.
        tiled: how often its events are repeated, and the file.
        ranks: a folder of files of the same job.
        rank: one of them.
    """

    origin: str
    first: TraceFile
    tiled: dict[int, TraceFile]
    ranks: Path
    rank: TraceFile


def build(folder: Path, tiles: tuple[int, ...], ranks: int) -> TraceFiles:
    """Write the files into a folder."""
    path = folder / "first.json"
    if REAL.exists():
        origin = f"{REAL.name}, unpacked"
        with gzip.open(REAL) as packed, path.open("wb") as file:
            shutil.copyfileobj(packed, file)
    else:
        origin = f"made up, as {REAL.name} is not in {REAL.parent} (make traces)"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(invented()), indent=2))
    writer = Tiles(path)
    tiled = {count: writer.write(folder / f"tiled{count}.json", count) for count in tiles}
    (folder / "ranks").mkdir()
    for rank in range(ranks):
        about = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks}}
        one = writer.write(folder / "ranks" / f"rank{rank}.json", RANK_TILES, about)
    return TraceFiles(origin, TraceFile(path, writer.events), tiled, folder / "ranks", one)


class Tiles:
    """Writes the events of a trace repeatedly, with shifted times and distinct ids and steps.

    Attributes:
        events: how many the trace has.
    """

    def __init__(self, path: Path) -> None:
        self._about = json.loads(path.read_bytes())
        events = self._about.pop("traceEvents")
        self.events = len(events)
        self._once = [event for event in events if event["ph"] == "M"]
        repeated = [event for event in events if event["ph"] != "M"]
        # Text, key, number; text, key, number; ... text
        self._parts = SHIFTED.split(",\n".join(map(json.dumps, repeated)))
        self._numbers = np.array(list(map(int, self._parts[2::3])))
        keys = np.array(self._parts[1::3])
        is_time, is_step = keys == '"ts": ', keys == "ProfilerStep#"
        span = max(event["ts"] + event.get("dur", 0) for event in repeated) - min(
            event["ts"] for event in repeated
        )
        self._strides = np.full(len(keys), self._numbers[~is_time & ~is_step].max() + 1)
        self._strides[is_time] = math.ceil(span) + 1
        self._strides[is_step] = np.ptp(self._numbers[is_step]) + 1

    def write(self, path: Path, tiles: int, about: Json | None = None) -> TraceFile:
        """Write the events ``tiles`` times, and the metadata once, with ``about`` added."""
        head = json.dumps(self._about | (about or {}))[:-1]
        with path.open("w") as file:
            file.write(f'{head}, "traceEvents": [\n')
            file.write(",\n".join(map(json.dumps, self._once)))
            for tile in range(tiles):
                self._parts[2::3] = list(map(str, (self._numbers + tile * self._strides).tolist()))
                file.write(",\n")
                file.write("".join(self._parts))
            file.write("\n]}\n")
        return TraceFile(path, len(self._once) + tiles * (self.events - len(self._once)))


def invented() -> Json:
    """Return a trace similar to the real one: an inference with stacks, shapes and memory."""
    device = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85018279936, "computeMajor": 9}
    device |= {"computeMinor": 0, "maxThreadsPerMultiprocessor": 2048, "warpSize": 32, "numSms": 132}
    names = [
        {"name": "process_name", "ph": "M", "ts": BEGIN_US, **CPU, "args": {"name": "python3"}},
        {"name": "thread_name", "ph": "M", "ts": BEGIN_US, **CPU, "args": {"name": "thread 21587 (python3)"}},
        {"name": "thread_name", "ph": "M", "ts": BEGIN_US, **GPU, "args": {"name": "stream 7"}},
    ]
    events = [*_step(), *(event for unit in range(UNITS) for event in _unit(unit)), *names]
    return {
        "schemaVersion": 1,
        "deviceProperties": [device],
        "with_stack": 1,
        "record_shapes": 1,
        "traceEvents": events,
        "traceName": "made up",
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1751410836000000000,
    }


def _complete(category: str, name: str, start: float, duration: float, place: Json, args: Json) -> Json:
    return {"ph": "X", "cat": category, "name": name, **place, "ts": start, "dur": duration, "args": args}


def _step() -> Iterator[Json]:
    name, whole, ids = "ProfilerStep#6", UNITS * UNIT_US, {"External id": UNITS * OPERATORS + 1}
    yield _complete("user_annotation", name, BEGIN_US, whole, CPU, ids)
    yield _complete("gpu_user_annotation", name, BEGIN_US + 60, whole, GPU, ids)


def _unit(unit: int) -> Iterator[Json]:
    """Frames with operators, an allocation, a launch, and the launched work."""
    start = BEGIN_US + unit * UNIT_US + 0.125
    for depth in range(FRAMES):
        number = unit * FRAMES + depth + 1
        args = {"Python parent id": number - 1 if depth else None, "Python id": number}
        args |= {"Ev Idx": unit * EVENTS + depth}
        name = f"torch/nn/modules/layer_{unit % 70}.py({100 + depth}): _call_impl"
        if depth == 6 and unit % 2:
            name, args["Python module id"] = f"nn.Module: Linear_{unit % 220}", unit % 220
        yield _complete("python_function", name, start + depth, 240 - 2 * depth, CPU, args)
    for depth in range(OPERATORS):
        name = f"aten::{('linear', 'addmm', 'matmul', 'copy_', 'empty_strided')[depth]}_{unit % 16}"
        args = _shapes(unit) | {
            "External id": unit * OPERATORS + depth + 1,
            "Ev Idx": unit * EVENTS + FRAMES + depth,
        }
        yield _complete("cpu_op", name, start + 20 + 2 * depth, 150 - 4 * depth, CPU, args)
    for number in range(MEMORY):
        size = 4096 * (1 + unit % 50) * (-1) ** unit
        args = {"Total Reserved": 3600809984, "Total Allocated": 1836933120 + size, "Bytes": size}
        args |= {"Addr": 137249672921088 + 512 * unit, "Device Id": 0, "Device Type": 1}
        args |= {"Ev Idx": unit * EVENTS + FRAMES + OPERATORS + number}
        about = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]"}
        yield about | CPU | {"ts": start + 35 + number, "args": args}
    yield from _launch(unit, start + 40, {"External id": unit * OPERATORS + OPERATORS})


def _shapes(unit: int) -> Json:
    rows = 64 * (1 + unit % 30)
    return {
        "Record function id": 0,
        "Concrete Inputs": ["", "", "", "1"],
        "Input type": ["c10::BFloat16", "c10::BFloat16", "c10::BFloat16", "Scalar"],
        "Input Strides": [[1], [1024, 1], [1, 1024], []],
        "Input Dims": [[1024], [rows, 1024], [1024, 1024], []],
    }


def _launch(unit: int, start: float, operator: Json) -> Iterator[Json]:
    flow = {"cat": "ac2g", "name": "ac2g"}
    asked, launched = FIRST_CORRELATION + 2 * unit, FIRST_CORRELATION + 2 * unit + 1
    for name, at, number in (("cudaStreamIsCapturing", start, asked), ("cudaLaunchKernel", start + 3, launched)):
        yield _complete("cuda_runtime", name, at, 2.5, CPU, operator | {"cbid": 211, "correlation": number})
        yield {"ph": "f", "id": number, **CPU, "ts": at, **flow, "bp": "e"}
    yield {"ph": "s", "id": launched, **CPU, "ts": start + 3, **flow}
    category, name = "kernel", _kernel_name(unit % 54)
    args = operator | PLACE | {"correlation": launched}
    if unit % 6 == 0:
        category, name = "gpu_memset", "Memset (Device)"
        args |= {"bytes": 4096 * unit, "memory bandwidth (GB/s)": 2838.167597765363}
    else:
        args |= {"queued": 0, "registers per thread": 32, "shared memory": 0, "blocks per SM": 7.757576}
        args |= {"warps per SM": 31.030304, "grid": [32 * (1 + unit % 40), 1, 1], "block": [128, 1, 1]}
        args |= {"est. achieved occupancy %": 48}
    yield _complete(category, name, start + 20, 60 + unit * 37 % 120 + 0.25, GPU, args)
    yield {"ph": "f", "id": launched, **GPU, "ts": start + 20, **flow, "bp": "e"}


def _kernel_name(number: int) -> str:
    functor = f"at::native::CUDAFunctor_{number}<c10::BFloat16>, std::array<char*, 3ul>, "
    return f"void at::native::vectorized_elementwise_kernel<{functor * (1 + number % 8)}4>(int, {functor})"
