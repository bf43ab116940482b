"""The overhead of annotated modules outside and inside windows, against Lightning's hooks: ``make bench``."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from lightning.pytorch.profilers.pytorch import RegisterRecordFunction
from measure import ROUNDS, show, verdict
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import instrument
from instrument.record.regions import dispatch

BLOCKS = 40
CHECKPOINTED = 400
STEPS = 10  # timed in a round


class Block(nn.Module):
    """Five modules with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Do little work, so that the cost of hooks is visible."""
        return x + self.down(self.act(self.up(self.norm(x))))


model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
MODULES = len(list(model.modules()))
x = torch.randn(4, 8, requires_grad=True)


def step() -> float:
    """Return the time of a forward and a backward in ns."""
    model.zero_grad()
    begin = time.perf_counter_ns()
    model(x).sum().backward()
    return time.perf_counter_ns() - begin


def hooks() -> int:
    """Return the number of hooks on all modules."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def in_turn(
    candidates: dict[str, Callable[[], AbstractContextManager[object]]],
    around: Callable[[], AbstractContextManager[object]],
) -> dict[str, float]:
    """Return the median time of a step under each candidate in turn, each round inside ``around()``."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(max(5, ROUNDS // 4)):  # each of many steps, and a profile of them takes long to stop
        for name, candidate in candidates.items():
            with candidate(), around():
                step()
                times[name] += [step() for _ in range(STEPS)]
    return {name: statistics.median(values) for name, values in times.items()}


def off_window() -> None:
    """Measure between windows, when modules have no hooks and run the same code."""
    handle = instrument.annotate_modules(model)
    with profile(activities=[ProfilerActivity.CPU]):
        during = hooks()
        step()
    after = hooks()
    handle.remove()
    times = in_turn({"plain": nullcontext, "annotated": lambda: instrument.annotate_modules(model)}, nullcontext)
    show(f"A step of {MODULES} modules off-window", times, "plain")
    print(f"  hooks in a window: {during}, after it: {after}")
    verdict("hooks after a window", after, 0, "")
    verdict("step off-window to plain", times["annotated"] / times["plain"], 1.02)


def in_window() -> None:
    """Measure under torch.profiler, forward and backward, against hooks that show only the forward."""
    candidates = {
        "plain": nullcontext,
        "Lightning's hooks, forward": lambda: RegisterRecordFunction(model),
        "annotate_modules, forward": lambda: instrument.annotate_modules(model, backward=False),
        "annotate_modules": lambda: instrument.annotate_modules(model),
    }
    times = in_turn(candidates, lambda: profile(activities=[ProfilerActivity.CPU]))
    show(f"A step of {MODULES} modules in a window", times, "plain")
    each = {name: (value - times["plain"]) / MODULES for name, value in times.items()}
    for name in list(each)[1:]:
        print(f"  {name:42} {each[name]:12,.0f} ns a module")
    theirs, ours = each["Lightning's hooks, forward"], each["annotate_modules"]
    verdict("forward and backward to Lightning's forward", ours / theirs, 1.5)


@contextmanager
def listening() -> Iterator[None]:
    """An emitter that receives every region and does nothing."""
    emitter = dispatch.NullEmitter()
    dispatch.active.add(emitter)
    try:
        yield
    finally:
        dispatch.active.remove(emitter)


def recomputed() -> None:
    """Measure the backward of checkpointed blocks on the forward's thread and on another one, as on a GPU."""
    blocks = nn.ModuleList(Block() for _ in range(CHECKPOINTED))
    candidates: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "off": nullcontext,
        "listening": listening,
        "recorded": lambda: profile(activities=[ProfilerActivity.CPU]),
    }

    def backward(call: Callable[[Callable[[], object]], object]) -> float:
        output = x
        for block in blocks:
            output = checkpoint(block, output, use_reentrant=False)
        loss = output.sum()
        begin = time.perf_counter_ns()
        call(loss.backward)
        return time.perf_counter_ns() - begin

    with instrument.annotate_modules(blocks), ThreadPoolExecutor(1) as thread:
        threads: dict[str, Callable[[Callable[[], object]], object]] = {
            "on the thread of the forward": lambda run: run(),
            "on another thread": lambda run: thread.submit(run).result(),
        }
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(max(5, ROUNDS // 4)):
            for name, candidate in candidates.items():
                for where, call in threads.items():
                    with candidate():
                        backward(call)
                        times.setdefault((where, name), []).append(backward(call))
    for where in threads:
        medians = {name: statistics.median(times[where, name]) for name in candidates}
        show(f"A backward of {CHECKPOINTED} checkpointed blocks {where}", medians, "off")
    here, there = (
        statistics.median(
            one / other for one, other in zip(times[where, "listening"], times[where, "off"], strict=True)
        )
        for where in threads
    )
    verdict("what listening costs on another thread to what it costs on one", there / here, 1.25)


if __name__ == "__main__":
    print(f"\ntorch {torch.__version__}, Python {sys.version.split()[0]}, medians of rounds of {STEPS} steps")
    for part in (off_window, in_window, recomputed):
        part()
