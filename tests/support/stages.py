"""Writes the traces of the two stages of a pipeline on GPUs, with times that are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STEP = 1000
"""The length of a step in us."""


class MadeStage:
    """The trace of one rank of two, each on one GPU; times are us from the start of a step."""

    def __init__(self, rank: int, clock: int = 0, *, named: bool = True) -> None:
        self.rank, self.clock, self.events, self._ids, self._named = rank, clock, [], 0, named

    def compute(self, step: int, start: int, end: int, operator: str = "aten::mm") -> None:
        """Add a kernel that computes; without a name of an operator, only its launch is recorded."""
        self._kernel(step, "gemm", start, end, {}, operator, {}, stream=7)

    def transfer(self, step: int, name: str, peer: int, start: int, end: int, *, shapes: bool = True) -> None:
        """Add a send or a receive; ``name`` is "send" or "recv"."""
        given = {"Concrete Inputs": ["", "", str(peer), "0"]} if shapes else {}
        call = "c10d::send" if name == "send" else "c10d::recv_"
        inner = {"Src Rank" if name == "recv" else "Dst Rank": peer, "Process Group Name": "0"}
        if shapes:
            self._event("cpu_op", "record_param_comms", step, start - 7, 4, inner)
        about = {"Collective name": name, "Process Group Name": "0"} if self._named else {}
        self._kernel(step, "ncclDevKernel_SendRecv(args)", start, end, about, call, given, stream=20)

    def write(self, folder: Path, steps: range) -> Path:
        """Write the trace into a folder."""
        for step in steps:
            self._event("user_annotation", f"ProfilerStep#{step}", step, 0, STEP, {})
        content = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": 2},
            "traceEvents": self.events,
        }
        path = folder / f"rank{self.rank}.json"
        path.write_text(json.dumps(content))
        return path

    def _kernel(
        self, step: int, name: str, start: int, end: int, about: Any, call: str, given: Any, *, stream: int
    ) -> None:
        self._ids += 1
        ids = {"correlation": self._ids, "External id": self._ids}
        if call:
            self._event("cpu_op", call, step, start - 8, 6, given | {"External id": self._ids})
        self._event("cuda_runtime", "cudaLaunchKernel", step, start - 5, 1, ids)
        place = {"device": 0, "stream": stream, "pid": 0, "tid": stream}
        self._event("kernel", name, step, start, end - start, place | ids | about)

    def _event(self, category: str, name: str, step: int, start: int, took: int, args: Any) -> None:
        at = self.clock + STEP * step + start
        lane = {key: args.pop(key, 7) for key in ("pid", "tid")}
        self.events.append({"ph": "X", "cat": category, "name": name, "ts": at, "dur": took, "args": args} | lane)


def two_stages(folder: Path, clock: int = 5000, *, named: bool = True, **options: bool) -> Path:
    """Write two steps of one microbatch; each transfer takes 20 us, and the clock of rank 1 is ``clock`` us late.

    In a step, rank 1 waits 90 us for the tensor to be sent, and rank 0 380 us for the gradient.
    Without ``named``, the kernels do not say what they are, as those of calls that torch has coalesced.
    """
    one, other = MadeStage(0, named=named), MadeStage(1, clock, named=named)
    for step in range(2):
        one.compute(step, 10, 100)
        one.transfer(step, "send", 1, 100, 120, **options)
        one.transfer(step, "recv", 1, 130, 530, **options)
        one.compute(step, 530, 950)
        other.transfer(step, "recv", 0, 10, 120, **options)
        other.compute(step, 120, 510)
        other.transfer(step, "send", 0, 510, 530, **options)
    one.write(folder, range(2))
    other.write(folder, range(2))
    return folder
