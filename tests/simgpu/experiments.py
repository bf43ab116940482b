"""Training loops that are slow for a known reason, and the same loops with a part of them changed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import instrument
from instrument import Trace
from instrument.base.units import duration
from instrument.explain.replay.replay import Replayer, mean_ns
from instrument.explain.replay.requests import Request
from instrument.explain.replay.step_waits import CLOSE
from tests import simgpu

WORST, WORST_OF_PLAN = 0.15, 0.1  # errors of predictions
ROUNDS = 3  # how often each program is recorded
SCHEDULE = {"wait": 2, "warmup": 6, "active": 10}  # the warm-up uses up what workers loaded while it began
MS, US = 1_000_000, 1_000
SHORTEST_US = 200  # of the kernels that are made faster
SIZE = 4096  # of the matrices, so that they fill the GPU; how long they take is set
_ADAM_KERNELS, _FUSED_BYTES = 7, 7 / 19  # of one parameter; of what these kernels read and write


@dataclass(frozen=True)
class Program:
    """A training loop by its parts."""

    name: str
    bound: str  # the class of work that bounds it
    layers: int = 4  # a layer is a matmul and a tanh
    matmul_us: int = 50  # of each matmul: one in the forward pass of a layer, two in its backward pass
    tanh_us: int = 5  # of each tanh, in both passes
    host_ms: float = 0.0  # of the CPU's own work before each layer, in both passes
    launch_us: int = 2  # of the CPU in each launch
    load_ms: float = 0.0  # until a batch is loaded
    workers: int = 0  # the processes that load
    copy_ms: float = 0.0  # until a batch is on the GPU, from pageable memory
    prefetch: bool = False  # whether it is copied a step ahead, from pinned memory, on a stream of its own
    item: bool = False  # whether the loop reads a value at the end of each step
    checks: bool = False  # whether it reads one before each layer, in both passes
    reduce_us: int = 0  # of the all-reduce of each layer's gradient, without other work on the GPU
    overlap: bool = False  # whether nothing waits for them before the end of the next backward pass
    parameters: int = 0  # the small parameters that Adam updates
    update_us: int = 2  # of each kernel that updates one of them, and of others
    fused: bool = False  # whether Adam is fused
    log_ms: float = 0.0  # of the region "log"
    micro_steps: int = 1  # the batches of a step, whose gradients are accumulated
    checkpointing: bool = False  # whether layers are computed again in the backward pass
    side: bool = False  # whether tanh runs on a stream of its own, beside the layers
    graph: bool = False  # whether both passes are replayed as a CUDA graph


PROGRAMS = (
    Program("loader", "input", load_ms=30, matmul_us=800, item=True),
    Program("loader with a worker", "input", load_ms=40, workers=1, matmul_us=500, item=True),
    Program("launches", "overhead", host_ms=2, matmul_us=200),
    Program("many launches", "overhead", layers=8, host_ms=1, matmul_us=150, item=True),
    Program("synchronizations", "synchronization", host_ms=4, matmul_us=2800, reduce_us=8000, checks=True),
    Program("many waits", "synchronization", layers=6, host_ms=3, matmul_us=1900, reduce_us=5700, checks=True),
    Program("copies", "copies", copy_ms=12, matmul_us=300),
    Program("copies beside a log", "copies", copy_ms=20, matmul_us=600, log_ms=3),
    Program("matmuls", "compute", matmul_us=1000),
    Program("matmuls and a value", "compute", matmul_us=800, item=True),
    Program("elementwise", "memory", matmul_us=50, tanh_us=1500, item=True),
    Program("all-reduce", "communication", matmul_us=250, reduce_us=2500, item=True),
    Program("all-reduce in parts", "communication", layers=8, matmul_us=200, reduce_us=900),
    Program("optimizer", "overhead", parameters=40, launch_us=60, host_ms=1, matmul_us=300, item=True),
    Program("optimizer on the GPU", "memory", parameters=40, update_us=80, matmul_us=200, item=True),
    Program("loader and matmuls", "input", load_ms=25, matmul_us=900, item=True),
    Program("matmuls and loader", "compute", load_ms=7, matmul_us=1200, item=True),
    Program("loader and launches", "input", load_ms=35, host_ms=2, matmul_us=400, item=True),
    Program("launches and copies", "overhead", host_ms=2, matmul_us=300, copy_ms=6),
    Program("copies and matmuls", "copies", copy_ms=15, matmul_us=600),
    Program("all-reduce and matmuls", "compute", matmul_us=1000, reduce_us=1000, item=True),
    Program("log and matmuls", "compute", log_ms=6, matmul_us=1000, item=True),
    Program("two streams", "compute", matmul_us=1000, tanh_us=1500, side=True, item=True),
    Program("accumulation", "input", load_ms=5, micro_steps=4, matmul_us=250),
    Program("accumulation of launches", "overhead", micro_steps=3, host_ms=1, matmul_us=150, item=True),
    Program("checkpointing", "compute", checkpointing=True, matmul_us=1000, item=True),
    Program("graph", "compute", graph=True, matmul_us=1000, copy_ms=5),
)  # fmt: skip

CHANGES = (
    "--without dataloader", "--workers 2", "--workers 2x", "--without copies", "--fix exposed-copies",
    "--without sync", "--without region:log", "--speed kernel:nvjet=2x", "--speed kernel:tanh=2x",
    "--overlap communication", "--fuse optimizer", "--launch 0.1x",
)  # fmt: skip
"""The changes, as ``instrument whatif`` takes them."""

SAME = {"--fix long-synchronization": "--without sync"}
"""What a plan calls one of them."""

REMOVALS: dict[str, dict[str, Any]] = {
    "input": {"load_ms": 0.0, "workers": 0},
    "copies": {"copy_ms": 0.0, "prefetch": False},
    "synchronization": {"item": False, "checks": False},
    "compute": {"matmul_us": 0, "tanh_us": 0, "update_us": 0},
    "communication": {"reduce_us": 0},
}
"""What each class of work is in a program, but that of the CPU."""


def changed(program: Program, words: str) -> Program | None:
    """Return a program with one of `CHANGES` or `SAME` really made; None if it has no such part."""
    option, value = SAME.get(words, words).split()
    outside = program.checks, program.parameters, program.log_ms, program.overlap
    one_graph = not any(outside)  # would have all of the CPU's work
    parts: dict[str, Any] = {
        "dataloader": REMOVALS["input"],
        "copies": REMOVALS["copies"],
        "exposed-copies": {"prefetch": bool(program.copy_ms)},
        "sync": REMOVALS["synchronization"],
        "region:log": {"log_ms": 0.0},
        "kernel:nvjet=2x": _halved(program, "matmul_us"),
        "kernel:tanh=2x": _halved(program, "tanh_us"),
        "communication": {"overlap": bool(program.reduce_us) and not program.graph},
        "optimizer": {"fused": bool(program.parameters)},
        "0.1x": {"graph": program.graph or one_graph},
    }.get(value, {})
    if option == "--workers" and program.load_ms and value.endswith("x") == bool(program.workers):
        parts = {"workers": int(value.removesuffix("x")) * max(program.workers, 1)}
    after = replace(program, **parts)
    return after if after != program else None


def _halved(program: Program, name: str) -> dict[str, int]:
    us = getattr(program, name)
    return {name: us // 2} if us >= SHORTEST_US else {}


def without(program: Program) -> dict[str, Program]:
    """Return for each class of work that a program has the program without it."""
    cpu = {"host_ms": 0.0, "log_ms": 0.0, "fused": bool(program.parameters), "graph": not program.checks}
    removals = {name: replace(program, **parts) for name, parts in (REMOVALS | {"overhead": cpu}).items()}
    return {name: removed for name, removed in removals.items() if removed != program}


class Batches(Dataset[torch.Tensor]):
    """Batches that take a time to load."""

    def __init__(self, program: Program) -> None:
        self._seconds, self._count = program.load_ms / 1000, sum(SCHEDULE.values()) * program.micro_steps

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.ones(64, 64)


class Host(torch.autograd.Function):
    """The CPU's work before a layer."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, program: Program) -> torch.Tensor:
        context.program = program
        work_on_cpu(x, program)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        work_on_cpu(gradients[0], context.program)
        return gradients[0], None


def work_on_cpu(x: torch.Tensor, program: Program) -> None:
    if program.checks:
        x[0, 0].item()
    if program.host_ms:
        time.sleep(program.host_ms / 1000)


class Loop:
    """What a program does in a step."""

    def __init__(self, program: Program) -> None:
        self.program, self.side, self.copying = program, torch.cuda.Stream(), torch.cuda.Stream()
        self.x, *self.weights = (
            torch.ones(SIZE, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(1 + program.layers)
        )
        self.gradient = torch.ones_like(self.x)
        self.inputs, self.next_inputs = torch.empty(2, 64, 64, device="cuda")
        self.pinned = torch.ones(64, 64).pin_memory()
        self.reduced: list[Any] = []
        if program.reduce_us:
            for weight in self.weights:
                weight.register_post_accumulate_grad_hook(self.reduce)
        small = [torch.ones(64, device="cuda", requires_grad=True) for _ in range(program.parameters)]
        for each in small:
            each.grad = torch.ones_like(each)
        self.optimizer = torch.optim.Adam(small, foreach=False, fused=program.fused) if small else None
        self.run = self.graph().replay if program.graph else self.passes

    def graph(self) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.passes()  # allocates and initializes what cannot be captured
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.passes()
        return graph

    def passes(self) -> None:
        """Run the forward and the backward pass."""
        if self.program.micro_steps == 1:
            for each in (self.x, *self.weights):
                each.grad = None
        x, layer = self.x, self.layer
        if self.program.checkpointing:
            layer = partial(checkpoint, self.layer, use_reentrant=False, preserve_rng_state=False)
        for weight in self.weights:
            x = layer(x, weight)
        self.output = x.detach()
        x.backward(self.gradient)
        while len(self.reduced) > self.program.layers:  # all but those of this step
            self.reduced.pop(0).wait()
        if self.program.side:
            torch.cuda.current_stream().wait_stream(self.side)

    def layer(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = Host.apply(x, self.program) @ weight  # type: ignore[no-untyped-call]  # torch declares no types for it
        if not self.program.side:
            return x.tanh()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side), torch.no_grad():
            x.detach().tanh()
        return x

    def reduce(self, weight: torch.Tensor) -> None:
        """All-reduce a gradient; one rank alone would only copy, if nothing were multiplied."""
        assert weight.grad is not None
        half = _distributed_c10d._make_nccl_premul_sum(0.5)
        work = dist.all_reduce(weight.grad[0], op=half, async_op=self.program.overlap)
        self.reduced += [work] if work else []

    def step(self, batch: torch.Tensor) -> None:
        if self.program.prefetch:
            torch.cuda.current_stream().wait_stream(self.copying)
            self.copying.wait_stream(torch.cuda.current_stream())  # the steps so far, which use both
            self.inputs, self.next_inputs = self.next_inputs, self.inputs
            with torch.cuda.stream(self.copying):
                self.next_inputs.copy_(self.pinned, non_blocking=True)
        elif self.program.copy_ms:
            self.inputs.copy_(batch)
        self.run()
        if self.optimizer:
            self.optimizer.step()
        if self.program.item:
            self.output[0, 0].item()
        if self.program.log_ms:
            with instrument.annotate("log"):
                time.sleep(self.program.log_ms / 1000)


def record(program: Program, path: Path) -> Trace:
    """Return the trace of recorded steps of a program, which is written to a path."""
    durations = {
        "nvjet": program.matmul_us,
        "tanh": program.tanh_us,
        "nccl": program.reduce_us,
        "FusedAdam": int(program.parameters * _ADAM_KERNELS * program.update_us * _FUSED_BYTES),
    }
    settings: dict[str, Any] = {
        "kernel_ns": program.update_us * US,
        "block_ps": 0,
        "launch_ns": program.launch_us * US,
        "durations": {name: us * US for name, us in durations.items()},
        "copy_ns": int(program.copy_ms * MS) or 1_500,
        "staged_bytes": 0,
    }
    workers = program.workers
    batches = DataLoader(Batches(program), batch_size=None, num_workers=workers, pin_memory=workers > 0)
    with simgpu.configured(**settings), communicating(program):
        loop = Loop(program)
        with undisturbed(), torch.profiler.profile(schedule=torch.profiler.schedule(**SCHEDULE)) as profiler:
            for number, batch in enumerate(batches, 1):
                loop.step(batch)
                if number % program.micro_steps == 0:
                    profiler.step()
        profiler.export_chrome_trace(str(path))
    return instrument.read_trace(path)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Give the threads of this process the CPUs before all other programs, if the system allows that."""

    def schedule(policy: int, priority: int) -> None:
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))

    try:
        with suppress(PermissionError):
            schedule(os.SCHED_RR, 1)  # threads and processes that start now inherit it
        yield
    finally:
        schedule(os.SCHED_OTHER, 0)


@contextmanager
def communicating(program: Program) -> Iterator[None]:
    """Have a process group of one rank, if a program communicates."""
    if not program.reduce_us:
        yield
        return
    dist.init_process_group("nccl", store=_distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Row(NamedTuple):
    """A change of a program: the mean of its steps as predicted and as measured, in ns.

    `predicted_ns` is None if the prediction abstains; `before_ns` is measured, without the change.
    """

    change: str
    predicted_ns: int | None
    measured_ns: int
    before_ns: int

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of what was measured; 0 if it abstains."""
        return 0.0 if self.predicted_ns is None else self.predicted_ns / self.measured_ns - 1


@dataclass(frozen=True)
class Experiment:
    """What is predicted for a program, and what its changes are.

    Attributes:
        program: the program.
        bound: the bound that the diagnosis names.
        rows: each change that applies.
        plan: the first two rows of the plan, or fewer if the change of a row is not in `CHANGES`.
        gains: for each class of work, by how much a step is shorter without it, as a share of the step.
    """

    program: Program
    bound: str | None
    rows: list[Row]
    plan: list[Row]
    gains: dict[str, float]

    def faults(self) -> list[str]:
        """Return what does not hold: predictions within 15 %, the plan within 10 %, the bound."""
        off = [f"{row.change}: {row.error:+.1%}" for row in self.rows if abs(row.error) > WORST]
        off += [
            f"plan, {row.change}: {row.error:+.1%}"
            for row in self.plan
            if abs(row.error) > WORST_OF_PLAN or row.measured_ns > 1.02 * row.before_ns
        ]
        found, most = "compute" if self.bound == "memory" else self.bound, max(self.gains.values())
        if self.bound != self.program.bound or self.gains.get(str(found), 0) < most - CLOSE:
            off.append(f"bound by {self.bound}, expected {self.program.bound}: {self.gains}")
        return off


class Recording(NamedTuple):
    """The mean of the steps of a program in ns, and the trace of it."""

    step_ns: int
    path: Path


def fastest(programs: Iterable[Program], folder: Path) -> dict[Program, Recording]:
    """Record programs in turn, several times, and return the fastest recording of each.

    The CPU takes longer for the same work from one recording to the next, by what else runs on the machine.
    """
    found: dict[Program, Recording] = {}
    for program in [*dict.fromkeys(programs)] * ROUNDS:
        path = folder / f"{time.monotonic_ns()}.json"
        one = Recording(mean_ns(Replayer(record(program, path)).recorded_ns), path)
        found[program] = min(one, found.get(program, one))
    return found


@cache
def experiment(program: Program) -> Experiment:
    """Record a program and all that is changed in it."""
    after = {change: other for change in CHANGES if (other := changed(program, change))}
    removed = without(program)
    with TemporaryDirectory() as folder:
        found = fastest((program, *after.values(), *removed.values()), Path(folder))
        before_ns, path = found[program]
        diagnosis = instrument.diagnose(path)
        guesses = {change: diagnosis.what_if(**asdict(Request.from_words(change))).step_ns for change in after}
        made, planned = [program], diagnosis.plan().rows[:2]
        for row in planned:
            if not (other := changed(made[-1], row.change)):
                break
            made.append(other)
        found |= fastest([other for other in made if other not in found], Path(folder))
    rows = [Row(change, guess, found[after[change]].step_ns, before_ns) for change, guess in guesses.items()]
    plan = [
        Row(row.change, row.step_ns, found[two].step_ns, found[one].step_ns)
        for row, one, two in zip(planned, made, made[1:], strict=False)
    ]
    gains = {name: 1 - found[other].step_ns / before_ns for name, other in removed.items()}
    return Experiment(program, diagnosis.bound, rows, plan, gains)


def table() -> Iterator[str]:
    """Yield the lines of a table of all experiments, in Markdown."""
    experiments = [experiment(program) for program in PROGRAMS]
    yield "| program | bound | step | change | predicted | measured | error |"
    yield "|---|---|---|---|---|---|---|"
    for each in experiments:
        head = f"{each.program.name} | {each.bound} | {duration(each.rows[0].before_ns)}"
        for row in each.rows:
            predicted = "abstains" if row.predicted_ns is None else duration(row.predicted_ns)
            yield f"| {head} | `{row.change}` | {predicted} | {duration(row.measured_ns)} | {row.error:+.1%} |"
            head = " | | "
    errors = [abs(row.error) for each in experiments for row in each.rows if row.predicted_ns is not None]
    planned = [abs(row.error) for each in experiments for row in each.plan]
    yield ""
    yield f"{len(errors)} predictions: median error {median(errors):.1%}, worst {max(errors):.1%}."
    yield f"{len(planned)} first and second rows of plans: worst {max(planned):.1%}."


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in table():
        print(line)
