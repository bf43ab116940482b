"""Trains a tiny model under a profile, and reads the manifest and the traces of its windows."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import instrument
from instrument.record.exporters.raw_trace import packed
from instrument.record.planning.schedule import Window

from ..conftest import annotations

STEPS = 10  # steps of `run`
TWICE = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}


class Trained(NamedTuple):
    """The losses and parameters of a training, exact to the bit."""

    losses: list[str]
    parameters: list[bytes]


def do_nothing(number: int = 0) -> None:
    pass


def train(
    numbers: int | Iterable[Any],
    step: Callable[[], object] = do_nothing,
    body: Callable[[int], object] = do_nothing,
) -> Trained:
    """Train on a batch for each of ``numbers``; call ``body(number)`` within each step and ``step()`` after it."""
    generator = torch.Generator().manual_seed(7)
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number in range(numbers) if isinstance(numbers, int) else numbers:
        with instrument.annotate(f"batch {number}"), instrument.annotate("forward"):
            loss = model(torch.randn(5, 4, generator=generator)).square().mean()
        body(number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        step()
    return Trained(losses, [parameter.detach().numpy().tobytes() for parameter in model.parameters()])


def manifest(out: Path) -> list[dict[str, Any]]:
    """Return the lines of the manifest."""
    return [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]


def traces(out: Path) -> list[Path]:
    """Return the path of each trace, in order of window and time."""
    return sorted(out.glob("window-*/*"))


def content(path: Path) -> dict[str, Any]:
    """Return the parsed JSON of a trace."""
    return json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())


def names(path: Path) -> list[str]:
    """Return the names of the user annotations in a trace, in order of their start."""
    return [event["name"] for event in annotations(path)]


def steps(path: Path) -> list[int]:
    """Return the numbers of the steps in a trace."""
    prefix = "ProfilerStep#"
    return [int(name.removeprefix(prefix)) for name in names(path) if name.startswith(prefix)]


def recorded(out: Path) -> list[list[int]]:
    """Return the steps of each trace in the folder."""
    return [steps(path) for path in traces(out)]


def statuses(entries: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return the number and the status of each window."""
    return [(entry["window"], entry["status"]) for entry in entries]


class Recorder:
    """An exporter that records the calls made on it, and then raises from those in ``failing``."""

    name = "recorder"
    hint = ""

    def __init__(self, *failing: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing = failing

    def note(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] in self.failing:
            raise OSError(f"{call[0]} failed on purpose")

    def prepare(self) -> None:
        self.note("prepare")

    def capture(self) -> RecorderCapture:
        self.note("capture")
        return RecorderCapture(self)

    def captured(self) -> list[int]:
        """Return the steps that were recorded, in order."""
        return [call[1] for call in self.calls if call[0] == "step" and call[1] is not None]

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)


class RecorderCapture:
    """The capture of one window by a `Recorder`."""

    raw: Path | None = None

    def __init__(self, recorder: Recorder) -> None:
        self._note = recorder.note

    def start(self) -> None:
        self._note("start")

    def step(self, number: int | None) -> None:
        self._note("step", number)

    def add_metadata(self, key: str, value: str) -> None:
        self._note("add_metadata", key, value)

    def stop(self) -> None:
        self._note("stop")

    def discard(self) -> None:
        self._note("discard")

    def save(self, folder: Path, stem: str) -> list[Path]:
        self._note("save", folder.name, stem)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{stem}.txt"
        path.write_text("recorded")
        return [path]


def planned(windows: Iterable[Window]) -> list[tuple[int, int]]:
    """The first and the last recorded step of each window."""
    return [(window.active, window.stop - 1) for window in windows]


@functools.cache
def expected(count: int) -> Trained:
    """Train for ``count`` steps without a profile; return the result."""
    return train(count)


def run(out: Path, body: Callable[[int], object] = do_nothing, count: int = STEPS, **arguments: Any) -> Any:
    """Train with windows, check that they change no bit of the result, and return the profile."""
    arguments.setdefault("schedule", instrument.schedule(**TWICE))
    with instrument.profile(out, **arguments) as prof:
        trained = train(count, prof.step, body)
    assert expected(count) == trained
    return prof


def reasons(entries: Iterable[dict[str, Any]]) -> list[tuple[str, str | None]]:
    """Return the status and the reason of each window."""
    return [(entry["status"], entry["reason"]) for entry in entries]


def raw_trace(prof: Any) -> Path:
    """Return the last window's trace, as torch wrote it."""
    return max(prof.out.glob("window-*/*.pt.trace.json"))


def obstruct(prof: Any) -> None:
    """Make the compression of the last window's trace fail: put a folder in the place of its output."""
    packed(raw_trace(prof)).mkdir()
