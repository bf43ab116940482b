"""Builds the trace of a loop, step by step, with times in microseconds."""

from __future__ import annotations

import json
from typing import Any

from instrument.read.tables.trace import Device, Trace

from .small_traces import Row, kernel, memcpy, memset, on_cpu, trace_of

H100 = Device(0, name="NVIDIA H100 80GB HBM3", sms=132, threads_per_sm=2048, memory_bytes=80_000_000_000)
GEMM = (
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel"
)
STEP = 1000


class MadeLoop:
    """The trace of three steps of 1,000 us whose GPU is busy, launched a step ahead; methods add to it.

    Args:
        steps: the number of steps.
        busy: whether each step launches a matmul that keeps the GPU busy for the whole step.
    """

    def __init__(self, steps: int = 3, *, busy: bool = True) -> None:
        self.rows: dict[str, list[Row]] = {
            name: [] for name in ("operators", "regions", "runtime", "gpu", "others")
        }
        self.rows |= {"memory": [], "frames": [], "counters": []}
        self.steps, self._correlation = steps, 0
        for step in range(steps):
            self.rows["regions"].append(_us(on_cpu, f"ProfilerStep#{step}", step * STEP, (step + 1) * STEP))
            if busy:
                self.work(GEMM, step * STEP, step * STEP + 1, (step + 1) * STEP, blocks=1320, block_threads=256)

    def work(self, name: str, at: float, start: float, end: float, **columns: Any) -> MadeLoop:
        """Add a kernel that a call at ``at`` launches."""
        self._correlation += 1
        call = columns.pop("call", "cudaLaunchKernel")
        took = columns.pop("took", 0.5)
        make = {"Memcpy": memcpy, "Memset": _memset}.get(name[:6], kernel)
        self.rows["runtime"].append(_us(on_cpu, call, at, at + took, correlation=self._correlation))
        self.rows["gpu"].append(_us(make, name, start, end, correlation=self._correlation, **columns))
        return self

    def operator(
        self, name: str, start: float, end: float, shapes: Any = None, types: Any = None, **columns: Any
    ) -> MadeLoop:
        """Add an operator; ``shapes`` and ``types`` are those of its inputs."""
        said = {"shapes": json.dumps(shapes), "types": json.dumps(types)} if shapes is not None else {}
        self.rows["operators"].append(_us(on_cpu, name, start, end, **said, **columns))
        return self

    def region(self, name: str, start: float, end: float) -> MadeLoop:
        """Add a region."""
        self.rows["regions"].append(_us(on_cpu, name, start, end))
        return self

    def call(self, name: str, start: float, end: float) -> MadeLoop:
        """Add a call of the runtime."""
        self.rows["runtime"].append(_us(on_cpu, name, start, end))
        return self

    def counter(self, name: str, at: float, value: float, device: int = 0) -> MadeLoop:
        """Add a value of a counter."""
        self.rows["counters"].append(_us(on_cpu, name, at, at, value=value, device=device))
        return self

    def memory(self, at: float, allocated: int, reserved: int) -> MadeLoop:
        """Add an allocation after which so many bytes are allocated and reserved."""
        row = _us(on_cpu, "[memory]", at, at, bytes=1, device_type=1, device=0)
        self.rows["memory"].append(row | {"allocated_bytes": allocated, "reserved_bytes": reserved})
        return self

    def trace(self, device: Device = H100) -> Trace:
        """Return the trace."""
        rows = {name: sorted(each, key=lambda row: row["start_ns"]) for name, each in self.rows.items() if each}
        return trace_of([device], **rows)


def nested_loop() -> MadeLoop:
    """Return a loop with matmuls in the regions of a forward and a backward pass."""
    loop = MadeLoop(busy=False)
    for start in (0, 1000, 2000):
        loop.region("forward", start, start + 400).region("block", start + 100, start + 300)
        matmul = ([[512, 512], [512, 512]], ["c10::BFloat16", "c10::BFloat16"])
        loop.operator("aten::linear", start + 110, start + 290).operator(
            "aten::mm", start + 120, start + 280, *matmul
        )
        loop.work(GEMM, start + 130, start + 140, start + 340)
        loop.region("backward", start + 500, start + 900)
        loop.operator("aten::mm", start + 600, start + 650, *matmul).work(
            GEMM, start + 610, start + 620, start + 820
        )
    return loop


def _us(make: Any, name: str, start: float, end: float, **columns: Any) -> Row:
    row: Row = make(name, round(1000 * start), round(1000 * end), **columns)
    return row


def _memset(name: str, start: int, end: int, **columns: Any) -> Row:
    return memset(start, end, **columns) | {"name": name}
