"""Trains beside another torch profiler, in one process for each combination, and prints the outcomes."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import instrument

warnings.simplefilter("ignore")
CPU = [ProfilerActivity.CPU]
STEPS = 9
PLACES = ("before", "region", "function", "backward", "optimizer", "after")
Action = Callable[[int, str], None]


class Double(torch.autograd.Function):
    """An autograd function written in Python; torch's range of it is open while `act` runs."""

    act: Callable[[], None]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Double.act()
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def train(act: Action, step: Callable[[], None] = lambda: None) -> list[str]:
    """Train, and call ``act(step, place)`` at each place where another profiler may start or stop."""
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    across = record_function("across")
    for number in range(STEPS):
        if number == 2:
            across.__enter__()
        act(number, "before")
        x = torch.randn(3, 4, generator=generator)

        def closure(number: int = number, x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            with instrument.annotate("forward"), record_function("theirs"):
                act(number, "region")
                Double.act = lambda: act(number, "function")
                y = Double.apply(model(x))
            y.register_hook(lambda _: act(number, "backward"))
            loss = y.square().mean()
            loss.backward()
            act(number, "optimizer")
            return loss

        losses.append(optimizer.step(closure).item().hex())
        act(number, "after")
        if number == 7:
            across.__exit__(None, None, None)
        step()
    return losses


class OtherProfiler:
    """Another profiler, which starts and stops at chosen places."""

    def __init__(self, begin: tuple[int, str], end: tuple[int, str], kind: str) -> None:
        self.begin, self.end, self.kind = begin, end, kind
        self.profiler: Any = None

    def act(self, number: int, place: str) -> None:
        if (number, place) == self.begin:
            self.profiler = self.make_profiler()
            self.profiler.__enter__()
            torch.ones(3).cos()
        if (number, place) == self.end:
            self.profiler.__exit__(None, None, None)

    def make_profiler(self) -> Any:
        if self.kind == "autograd":
            return torch.autograd.profiler.profile(use_kineto=True)
        if self.kind == "legacy":
            return torch.autograd.profiler_legacy.profile()
        if self.kind == "itt":
            return torch.autograd.profiler.emit_itt()
        return profile(activities=CPU)

    def seen(self) -> list[str]:
        """Return the operators that the profiler recorded; emit_itt records none itself."""
        if self.kind == "itt":
            return []
        events = self.profiler.function_events if self.kind in ("autograd", "legacy") else self.profiler.events()
        return [event.name for event in events if event.name.startswith("aten::")]


class ScheduledProfiler(OtherProfiler):
    """A profiler with a schedule that prepares in the loop, stepped in the optimizer's step as Lightning's is."""

    def __init__(self, waits: int, place: str) -> None:
        super().__init__((0, "before"), (STEPS - 1, "after"), "scheduled")
        self.waits, self.place, self.ready = waits, place, 0

    def make_profiler(self) -> Any:
        schedule = torch.profiler.schedule(wait=self.waits, warmup=1, active=1, repeat=2)
        return profile(activities=CPU, schedule=schedule, on_trace_ready=self.count_trace)

    def count_trace(self, _: Any) -> None:
        self.ready += 1

    def act(self, number: int, place: str) -> None:
        super().act(number, place)
        if place == self.place:
            self.profiler.step()

    def seen(self) -> list[str]:
        return [f"{self.ready} traces"]


class OtherThreadProfiler(OtherProfiler):
    """A profiler on another thread, which stops on request."""

    def act(self, number: int, place: str) -> None:
        if (number, place) == self.begin:
            self.go, begun = threading.Event(), threading.Event()
            self.thread = threading.Thread(target=self.run, args=(begun,))
            self.thread.start()
            begun.wait(30)
        if (number, place) == self.end:
            self.go.set()
            self.thread.join(30)

    def run(self, begun: threading.Event) -> None:
        self.profiler = self.make_profiler()
        with self.profiler:
            begun.set()
            torch.ones(3).square()
            self.go.wait(30)


class DisablingProfiler(OtherProfiler):
    """A profiler that first disables any active one, as Lightning's does."""

    def act(self, number: int, place: str) -> None:
        if (number, place) == self.begin and torch.autograd._profiler_enabled():
            torch.autograd._disable_profiler()
        super().act(number, place)


def combinations() -> Iterator[tuple[str, OtherProfiler]]:
    """Yield each way another profiler may run beside the windows: steps 1-3 (warm-up 0) and 7-8 (warm-up 6)."""
    for place in PLACES:
        yield f"profile in {place}", OtherProfiler((2, place), (2, place), "profile")
    for place, kind in itertools.product(("region", "function", "backward"), ("autograd", "legacy", "itt")):
        yield f"{kind} in {place}", OtherProfiler((2, place), (2, place), kind)
    for place in ("region", "function", "optimizer"):
        yield f"from {place} to the next step", OtherProfiler((2, place), (3, place), "profile")
        yield f"from {place} on", OtherProfiler((2, place), (5, "after"), "profile")
    for place in ("region", "optimizer"):
        yield f"raw in {place}", DisablingProfiler((2, place), (2, place), "profile")
    for place in ("region", "backward"):
        yield f"elsewhere in {place}", OtherThreadProfiler((2, place), (2, place), "profile")
        yield f"elsewhere from {place} on", OtherThreadProfiler((2, place), (5, "before"), "profile")
    yield "in warm-up", OtherProfiler((0, "region"), (4, "after"), "profile")
    yield "elsewhere in warm-up", OtherThreadProfiler((0, "region"), (4, "after"), "profile")
    yield "before", OtherProfiler((0, "before"), (1, "optimizer"), "profile")
    for waits, place in itertools.product((1, 2), ("optimizer", "after")):
        yield f"scheduled, {waits} waits, {place}", ScheduledProfiler(waits, place)


def run_beside(other: OtherProfiler, out: Path) -> dict[str, Any]:
    """Train beside ``other`` and return the outcome."""
    with instrument.profile(out, schedule=instrument.schedule("1-3,7-8", warmup=1)) as prof:
        losses = train(other.act, prof.step)
    return {
        "losses": losses,
        "seen": other.seen(),
        "windows": [[window["status"], window["reason"], window["steps"]] for window in prof.windows],
        "files": [path.stat().st_size > 1000 for path in sorted(out.glob("window-*/*.gz"))],
        "left on": torch.autograd._profiler_enabled(),
    }


def run_in_fork(call: Callable[[], Any]) -> dict[str, Any]:
    """Run ``call`` in a fork; return its result together with the exit code."""
    reader, writer = os.pipe()
    gc.freeze()  # a collection in the fork would copy the memory of all objects
    child = os.fork()
    if child == 0:
        os.close(reader)
        code = 3
        try:
            with os.fdopen(writer, "w") as file:
                json.dump(call(), file)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"code": code, **(json.loads(text) if text else {})}


def main(out: Path) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    with profile(activities=CPU):  # imports once what torch's first profiler needs
        torch.ones(1)
    results = {"plain": run_in_fork(lambda: {"losses": train(lambda number, place: None)})}
    for number, (name, other) in enumerate(combinations()):
        results[name] = run_in_fork(lambda other=other, number=number: run_beside(other, out / str(number)))
        alone = run_in_fork(lambda other=other: {"seen": train(other.act) and other.seen()})
        results[name]["alone"] = alone["seen"]
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
