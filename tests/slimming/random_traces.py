"""Makes random traces of torch.profiler: loops with steps, operators, launches, kernels, stacks and memory."""

from __future__ import annotations

import random
from typing import Any

Event = dict[str, Any]

PID, MAIN, BACKWARD = 4711, 4711, 4800
GEMM = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x64x8_stage3"
DEVICE = {
    "id": 0, "name": "NVIDIA A100-SXM4-40GB", "numSms": 108, "maxThreadsPerMultiprocessor": 2048,
    "totalGlobalMem": 42_000_000_000,
}  # fmt: skip


class RandomTrace:
    """A random trace.

    Args:
        seed: the seed.
        steps: the number of steps; None draws it.
        whole_us: whether all times are whole microseconds, as in old traces: many events then begin together.
    """

    def __init__(self, seed: int, *, whole_us: bool = False, steps: int | None = None) -> None:
        self.random, self._digits = random.Random(seed), 0 if whole_us else 3
        self.events: list[Event] = []
        self._at, self._gpu, self._number = 1000.0, {7: 0.0, 20: 0.0}, 100
        self._allocated, self._blocks = 10_000_000, list[tuple[int, int]]()
        for name, tid in (("main", MAIN), ("pt_autograd_0", BACKWARD)):
            self._add("M", name="thread_name", pid=PID, tid=tid, args={"name": name})
        steps = self.random.randrange(0, 6) if steps is None else steps
        for step in range(steps):
            self._range(f"ProfilerStep#{step + 3}", "user_annotation", self._step)
        if not steps:
            self._step()

    @property
    def content(self) -> Event:
        """The trace as JSON."""
        events = self.events[:]
        self.random.shuffle(events)
        return {"deviceProperties": [DEVICE], "with_stack": 1, "traceEvents": events}

    def _pass(self, most: float) -> None:
        self._at += max(round(self.random.uniform(0.001, most), self._digits), 10**-self._digits)

    def _add(self, phase: str, **fields: Any) -> None:
        self.events.append({"ph": phase, "ts": round(self._at, 3), **fields})

    def _range(self, name: str, category: str, inside: Any, args: Event | None = None, tid: int = MAIN) -> None:
        begin = self._at
        inside()
        if self.random.random() < 0.9 or self._at == begin:
            self._pass(3)
        event = {"ph": "X", "cat": category, "name": name, "pid": PID, "tid": tid}
        times = {"ts": round(begin, 3), "dur": round(self._at - begin, 3)}
        self.events.append(event | times | {"args": args or {}})

    def _step(self) -> None:
        for layer in range(self.random.randrange(1, 4)):
            part = self.random.choice((self._module, self._operator, self._region, self._wait, self._backward))
            if self.random.random() < 0.3:
                self._range(
                    "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation", self._idle
                )
            self._range(f"train.py({12 + layer}): step", "python_function", part)
            self._memory()

    def _idle(self) -> None:
        self._pass(2000)

    def _region(self) -> None:
        self._range(f"layer_{self.random.randrange(3)}", "user_annotation", self._operator)

    def _module(self) -> None:
        self._range(f"nn.Module: Linear_{self.random.randrange(3)}", "python_function", self._operator)

    def _operator(self) -> None:
        size = self.random.choice((64, 128, 130))
        args = {
            "Input Dims": [[size, size], [size, 64]],
            "Input type": ["float", "float"],
            "External id": self.random.randrange(1, 99),
            "Ev Idx": len(self.events),
        }
        if self.random.random() < 0.3:
            args["Sequence number"] = self.random.randrange(50)
        name = self.random.choice(
            ("aten::mm", "aten::linear", "aten::add", "aten::copy_", "aten::item", "mine::op")
        )
        more = self.random.choice((self._launch, self._operator, self._query, self._wait, lambda: None))
        self._range(name, "cpu_op", lambda: (self._launch(), more()), args)

    def _backward(self) -> None:
        args = {"Sequence number": self.random.randrange(50)}
        node = "autograd::engine::evaluate_function: AddmmBackward0"
        self._range(node, "cpu_op", lambda: self._launch(BACKWARD), args, BACKWARD)

    def _query(self) -> None:
        name = self.random.choice(("cudaFuncSetAttribute", "cudaDeviceGetAttribute", "cudaMalloc"))
        self._range(name, "cuda_runtime", lambda: None, {"correlation": self._next()})

    def _wait(self) -> None:
        name = self.random.choice(("cudaStreamSynchronize", "cudaDeviceSynchronize"))

        def wait() -> None:
            self._at = max(self._at, *self._gpu.values())

        self._range("torch/cuda/__init__.py(975): synchronize", "python_function", lambda: (
            self._range(name, "cuda_runtime", wait, {"correlation": self._next()})
        ))  # fmt: skip

    def _launch(self, tid: int = MAIN) -> None:
        self._pass(4)
        number, stream = self._next(), self.random.choice((7, 7, 7, 20))
        copy = self.random.random() < 0.2
        call = "cudaMemcpyAsync" if copy else "cudaLaunchKernel"
        self._range(call, "cuda_runtime", lambda: None, {"correlation": number, "cbid": 211}, tid)
        if self.random.random() < 0.05:
            return  # lost
        begin = max(self._gpu[stream], self._at + round(self.random.uniform(1, 5), self._digits))
        took = max(round(self.random.uniform(1, 60), self._digits), 1)
        self._gpu[stream] = begin + took
        place = {"pid": 0, "tid": stream, "ts": round(begin, 3), "dur": took}
        args: Event = {"device": 0, "context": 1, "stream": stream, "correlation": number}
        if copy:
            name = self.random.choice(("Memcpy HtoD (Pageable -> Device)", "Memcpy DtoD (Device -> Device)"))
            self.events.append(
                {"ph": "X", "cat": "gpu_memcpy", "name": name, "args": args | {"bytes": 4096}} | place
            )
            return
        name = self.random.choice(
            (GEMM, "void at::native::vectorized_elementwise_kernel<4>", "ncclDevKernel_AllReduce")
        )
        size = {"grid": [self.random.randrange(1, 300), 2, 1], "block": [128, 1, 1], "registers per thread": 40}
        if self.random.random() < 0.5:
            size |= {"blocks per SM": 1.25, "est. achieved occupancy %": 31}
        self.events.append({"ph": "X", "cat": "kernel", "name": name, "args": args | size} | place)

    def _memory(self) -> None:
        for _ in range(self.random.randrange(4)):
            self._pass(2)
            if self._blocks and self.random.random() < 0.5:
                address, size = self._blocks.pop(self.random.randrange(len(self._blocks)))
                size = -size
            else:
                address, size = 1 << 20 | self.random.randrange(9) << 9, 512 * self.random.randrange(1, 1000)
                if any(known == address for known, _ in self._blocks):
                    continue
                self._blocks.append((address, size))
            self._allocated += size
            args = {"Bytes": size, "Addr": address, "Device Id": 0, "Device Type": 1}
            totals = {"Total Allocated": self._allocated, "Total Reserved": 20_000_000}
            self._add("i", cat="cpu_instant_event", s="t", name="[memory]", pid=PID, tid=MAIN, args=args | totals)

    def _next(self) -> int:
        self._number += 1
        return self._number
