"""Trains beside another torch profiler, in a process for each combination, and prints the outcomes."""

from __future__ import annotations

import faulthandler
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
COUNT = 9
PLACES = ("before", "region", "function", "backward", "optimizer", "after")
Act = Callable[[int, str], None]


class Double(torch.autograd.Function):
    """An operator written in Python: torch's range of it is open while `act` runs."""

    act: Callable[[], None]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Double.act()
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def train(act: Act, step: Callable[[], None] = lambda: None) -> list[str]:
    """Train; ``act(step, place)`` is called wherever another profiler may begin or end."""
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    across = record_function("across")
    for number in range(COUNT):
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


class Theirs:
    """Another profiler, which begins and ends at chosen places."""

    def __init__(self, begin: tuple[int, str], end: tuple[int, str], kind: str) -> None:
        self.begin, self.end, self.kind = begin, end, kind
        self.profiler: Any = None

    def act(self, number: int, place: str) -> None:
        if (number, place) == self.begin:
            self.profiler = self.made()
            self.profiler.__enter__()
            torch.ones(3).cos()
        if (number, place) == self.end:
            self.profiler.__exit__(None, None, None)

    def made(self) -> Any:
        if self.kind == "autograd":
            return torch.autograd.profiler.profile(use_kineto=True)
        if self.kind == "legacy":
            return torch.autograd.profiler_legacy.profile()
        if self.kind == "itt":
            return torch.autograd.profiler.emit_itt()
        return profile(activities=CPU)

    def seen(self) -> list[str]:
        """The operators that it recorded; emit_itt records nothing itself."""
        if self.kind == "itt":
            return []
        events = self.profiler.function_events if self.kind in ("autograd", "legacy") else self.profiler.events()
        return [event.name for event in events if event.name.startswith("aten::")]


class Scheduled(Theirs):
    """One with a schedule, which prepares in mid-loop, stepped inside the optimizer's step as Lightning's is."""

    def __init__(self, waits: int, place: str) -> None:
        super().__init__((0, "before"), (COUNT - 1, "after"), "scheduled")
        self.waits, self.place, self.ready = waits, place, 0

    def made(self) -> Any:
        schedule = torch.profiler.schedule(wait=self.waits, warmup=1, active=1, repeat=2)
        return profile(activities=CPU, schedule=schedule, on_trace_ready=self.traced)

    def traced(self, _: Any) -> None:
        self.ready += 1

    def act(self, number: int, place: str) -> None:
        super().act(number, place)
        if place == self.place:
            self.profiler.step()

    def seen(self) -> list[str]:
        return [f"{self.ready} traces"]


class Elsewhere(Theirs):
    """One on another thread, which ends when told to."""

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
        self.profiler = self.made()
        with self.profiler:
            begun.set()
            torch.ones(3).square()
            self.go.wait(30)


class Raw(Theirs):
    """Somebody disables whatever is on, as Lightning's profiler does before it begins."""

    def act(self, number: int, place: str) -> None:
        if (number, place) == self.begin and torch.autograd._profiler_enabled():
            torch.autograd._disable_profiler()
        super().act(number, place)


def combinations() -> Iterator[tuple[str, Theirs]]:
    """What another profiler may do; the windows are of the steps 1-3 (warm-up 0) and 7-8 (warm-up 6)."""
    for place in PLACES:
        yield f"profile in {place}", Theirs((2, place), (2, place), "profile")
    for place, kind in itertools.product(("region", "function", "backward"), ("autograd", "legacy", "itt")):
        yield f"{kind} in {place}", Theirs((2, place), (2, place), kind)
    for place in ("region", "function", "optimizer"):
        yield f"from {place} to the next step", Theirs((2, place), (3, place), "profile")
        yield f"from {place} on", Theirs((2, place), (5, "after"), "profile")
    for place in ("region", "optimizer"):
        yield f"raw in {place}", Raw((2, place), (2, place), "profile")
    for place in ("region", "backward"):
        yield f"elsewhere in {place}", Elsewhere((2, place), (2, place), "profile")
        yield f"elsewhere from {place} on", Elsewhere((2, place), (5, "before"), "profile")
    yield "in warm-up", Theirs((0, "region"), (4, "after"), "profile")
    yield "elsewhere in warm-up", Elsewhere((0, "region"), (4, "after"), "profile")
    yield "before", Theirs((0, "before"), (1, "optimizer"), "profile")
    for waits, place in itertools.product((1, 2), ("optimizer", "after")):
        yield f"scheduled, {waits} waits, {place}", Scheduled(waits, place)


def one(theirs: Theirs, out: Path) -> dict[str, Any]:
    """What comes of training beside ``theirs``."""
    with instrument.profile(out, schedule=instrument.schedule("1-3,7-8", warmup=1)) as prof:
        losses = train(theirs.act, prof.step)
    return {
        "losses": losses,
        "seen": theirs.seen(),
        "windows": [[window["status"], window["reason"], window["steps"]] for window in prof.windows],
        "files": [path.stat().st_size > 1000 for path in sorted(out.glob("window-*/*.gz"))],
        "left on": torch.autograd._profiler_enabled(),
    }


def forked(call: Callable[[], Any]) -> dict[str, Any]:
    """What ``call`` returns in a process of its own, with how that ended."""
    reader, writer = os.pipe()
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
    with profile(activities=CPU):  # what torch imports for its first profiler is imported once
        torch.ones(1)
    results = {"plain": forked(lambda: {"losses": train(lambda number, place: None)})}
    for number, (name, theirs) in enumerate(combinations()):
        results[name] = forked(lambda theirs=theirs, number=number: one(theirs, out / str(number)))
        alone = forked(lambda theirs=theirs: {"seen": train(theirs.act) and theirs.seen()})
        results[name]["alone"] = alone["seen"]
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
