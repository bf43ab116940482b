"""What memory is that is older than the history of a snapshot, and what a snapshot without a history can say."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from instrument.read.memory.breakdown import compare_categories, compare_peaks
from instrument.read.memory.categories import CATEGORIES
from instrument.read.memory.read import read_memory
from instrument.start.cli import app

MIB = 1 << 20
WEIGHTS, SIZE = 8, 8 * MIB
TORCH = "/usr/lib/python3.11/site-packages/torch/"
Frames = list[dict[str, Any]]


def frame(file: str, name: str, line: int) -> dict[str, Any]:
    return {"filename": file, "name": name, "line": line}


def at(line: int) -> Frames:
    """Return a stack in the training loop."""
    return [frame("/home/u/train.py", "main", line), frame("/home/u/train.py", "<module>", 90)]


def in_forward(line: int) -> Frames:
    call = frame(f"{TORCH}nn/modules/module.py", "_call_impl", 9)
    return [frame("/home/u/model.py", "forward", line), call, *at(20)]


def in_step(line: int) -> Frames:
    return [frame("/home/u/optim.py", "step", line), frame(f"{TORCH}optim/optimizer.py", "wrapper", 526), *at(22)]


def in_zero_grad() -> Frames:
    return [frame(f"{TORCH}optim/optimizer.py", "zero_grad", 1000), *at(19)]


class Program:
    """A training whose allocator records its history from `record` on.

    Attributes:
        frees: "own" if the history has the stacks of frees; "allocated" if a free has the stack of its allocation,
            as with ``context="alloc"``; "deferred" if another stream uses what is freed, so that the next
            allocation completes the free.
    """

    def __init__(self, frees: str = "own") -> None:
        self.frees = frees
        self._recorded = False
        self._deferred: list[tuple[int, int]] = []
        self._live: dict[int, tuple[int, Frames]] = {}
        self._holes: list[tuple[int, int]] = []
        self._top = 0x7F00_0000_0000
        self._events: list[dict[str, Any]] = []

    def record(self) -> None:
        self._recorded = True

    def alloc(self, frames: Frames, size: int = SIZE) -> int:
        for each in self._deferred:
            self._note("free_completed", *each, frames)
            self._holes.append(each)
        self._deferred = []
        hole = next((each for each in self._holes if each[1] == size), None)
        if hole is None:
            address, self._top = self._top, self._top + size
        else:
            self._holes.remove(hole)
            address = hole[0]
        self._live[address] = size, frames if self._recorded else []
        self._note("alloc", address, size, frames)
        return address

    def free(self, address: int, frames: Frames) -> None:
        size, allocated = self._live.pop(address)
        frames = allocated if self.frees == "allocated" else frames
        self._note("free_requested", address, size, frames)
        if self.frees == "deferred" and self._recorded:
            self._deferred.append((address, size))
            return
        self._note("free_completed", address, size, frames)
        self._holes.append((address, size))

    def _note(self, action: str, address: int, size: int, frames: Frames) -> None:
        if self._recorded:
            event = {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}
            self._events.append(event | {"time_us": 1_700_000_000_000_000 + 10 * len(self._events)})

    def segments(self) -> list[dict[str, Any]]:
        blocks = [(address, size, "active_allocated", frames) for address, (size, frames) in self._live.items()]
        blocks += [(address, size, "inactive", []) for address, size in self._holes]
        blocks += [(address, size, "active_pending_free", []) for address, size in self._deferred]
        total = sum(size for _, size, _, _ in blocks)
        names = ("address", "size", "state", "frames")
        parts = [dict(zip(names, each, strict=True)) | {"requested_size": each[1]} for each in sorted(blocks)]
        used = sum(size for size, _ in self._live.values())
        segment = {"device": 0, "address": 0x7F00_0000_0000, "stream": 0, "segment_type": "large"}
        return [segment | {"total_size": total, "active_size": used, "blocks": parts}]

    def save(self, path: Path) -> Path:
        path.write_bytes(pickle.dumps({"segments": self.segments(), "device_traces": [self._events]}))
        return path


def train(
    program: Program,
    *,
    replaced: bool = False,
    freed: Callable[[int], Frames] | None = None,
    older_gradients: bool = False,
    steps: int = 2,
) -> None:
    """Train 8 weights of 8 MiB with Adam, whose m and v are as large each; activations have the size of a weight.

    Args:
        program: the program; its history begins after a warm-up.
        replaced: whether a step makes new m and v, and drops the older ones.
        freed: the stack that frees a gradient, by its number, before the forward pass ends; the loop does so after
            the step if None.
        older_gradients: whether gradients of the step before are in use when the history begins.
        steps: how many steps are recorded.
    """
    weights = [program.alloc(at(1)) for _ in range(WEIGHTS)]
    m = [program.alloc(in_step(1)) for _ in weights]
    v = [program.alloc(in_step(2)) for _ in weights]
    gradients = [program.alloc([]) for _ in weights] if older_gradients else []
    program.record()
    for _ in range(steps):
        activations = [program.alloc(in_forward(12)) for _ in weights]
        if freed is not None:
            for number, each in enumerate(gradients):
                program.free(each, freed(number))
            gradients = []
        for activation in activations:
            gradients.append(program.alloc([]))  # frames of autograd's thread are not those of Python
            program.free(activation, [])
        for row in range(WEIGHTS):
            temporary = program.alloc(in_step(12))
            if replaced:
                new = program.alloc(in_step(13)), program.alloc(in_step(14))
                program.free(m[row], in_step(15))
                program.free(v[row], in_step(16))
                m[row], v[row] = new
            program.free(temporary, in_step(17))
        if freed is None:
            for each in gradients:
                program.free(each, at(24))
            gradients = []


def parts(path: Path, point: int | None = None) -> dict[str, float]:
    """Return the categories at the peak or at a point of the timeline, in weights."""
    found = read_memory(path)
    if point is not None:
        sizes = found.timeline().bytes[:, point].tolist()
        return {name: size / SIZE for name, size in zip(CATEGORIES, sizes, strict=True) if size}
    return {name: sum(both) / SIZE for name, both in found.break_down().by_category().items() if any(both)}


STEP = {"parameters": 8, "gradients": 8, "optimizer_state": 16, "temporaries": 1}


@pytest.mark.parametrize("frees", ["own", "deferred"])
def test_state_that_a_step_replaces(tmp_path: Path, frees: str) -> None:
    """Older memory that a step of the optimizer frees is its state, also if activations have its size."""
    program = Program(frees)
    train(program, replaced=True)
    assert STEP | {"optimizer_state": 18} == parts(program.save(tmp_path / "a.pickle"))


def test_state_that_changes_in_place(tmp_path: Path) -> None:
    """The same program is read the same where nothing older is freed; its first peak is in the backward pass."""
    program = Program()
    train(program)
    expected = {"parameters": 8, "gradients": 1, "optimizer_state": 16, "activations": 8}
    assert expected == parts(program.save(tmp_path / "a.pickle"))


def test_state_without_stacks_of_frees(tmp_path: Path) -> None:
    """Where frees have the stacks of allocations, older memory that a step frees and replaces is state, too."""
    program = Program("allocated")
    train(program, replaced=True)
    assert STEP | {"optimizer_state": 18} == parts(program.save(tmp_path / "a.pickle"))


def test_state_that_a_step_drops(tmp_path: Path) -> None:
    """State that a step frees without a new one of its size is state."""
    program = Program()
    weights = [program.alloc(at(1)) for _ in range(WEIGHTS)]
    state = [program.alloc(in_step(1)) for _ in weights]
    program.record()
    activations = [program.alloc(in_forward(12)) for _ in weights]
    for activation in activations:
        program.alloc([])
        program.free(activation, [])
    for each in state:
        program.alloc(in_step(12), SIZE // 4)  # 8 bits for 32
        program.free(each, in_step(13))
    assert {"parameters": 8, "optimizer_state": 8} == parts(program.save(tmp_path / "a.pickle"), 0)


@pytest.mark.parametrize("freed", [lambda _: in_zero_grad(), lambda _: at(21)], ids=["zero_grad", "by hand"])
def test_older_gradients(tmp_path: Path, freed: Callable[[int], Frames]) -> None:
    """Older gradients are known by what frees them and later ones, also where activations have their size."""
    program = Program()
    train(program, freed=freed, older_gradients=True)
    expected = {"parameters": 8, "optimizer_state": 16, "gradients": 8, "activations": 8}
    assert expected == parts(program.save(tmp_path / "a.pickle"), WEIGHTS)  # after the first forward pass


@pytest.mark.parametrize(("line", "trained"), [(20, True), (21, False)], ids=["its line", "forward passes alone"])
def test_results_of_the_call_before(tmp_path: Path, line: int, trained: bool) -> None:
    """What the end of a forward pass frees is the result of the call before, whatever its size; a batch is not."""
    program = Program()
    for _ in range(WEIGHTS):
        program.alloc(at(1))
    batch = program.alloc(at(18), MIB)
    results = [program.alloc(in_forward(12), 3 * MIB) for _ in range(4)]
    program.record()
    for _ in range(2):
        following = program.alloc(at(18), MIB)
        program.free(batch, at(18))
        batch = following
    activations = [program.alloc(in_forward(12)) for _ in range(WEIGHTS)]
    for each in results:
        program.free(each, at(line))
    for each in activations[: WEIGHTS * trained]:
        program.free(each, [])
        program.free(program.alloc([], MIB), [])
    found = parts(program.save(tmp_path / "a.pickle"))
    assert {"parameters": 8, "activations": 8 + 4 * 3 / 8, "other": 1 / 8} == found


def test_a_comparison_has_no_weak_categories(tmp_path: Path) -> None:
    """Memory whose use only its size suggests is one part of a comparison, and no gain or loss of a category."""
    before, after = Program(), Program()
    for _ in range(WEIGHTS):
        before.alloc(at(1))
    train(before)
    train(after)
    paths = [program.save(tmp_path / name) for program, name in ((before, "a.pickle"), (after, "b.pickle"))]
    first, second = (read_memory(path).break_down() for path in paths)
    changes = {(part.category, part.name): part.change_bytes for part in compare_peaks(first, second)}
    assert second.peak.bytes - first.peak.bytes == sum(changes.values())
    assert {"older_memory": -8 * SIZE} == {category: change for (category, _), change in changes.items() if change}
    printed = CliRunner().invoke(app, ["memory", *map(str, paths)])
    assert 0 == printed.exit_code
    (row,) = [line for line in printed.output.splitlines() if line.startswith("older memory")]
    assert "-67.1 MB" in row
    assert "parameters" not in printed.output


def test_no_change_of_a_use_that_one_snapshot_shows(tmp_path: Path) -> None:
    """Older state that only one of two snapshots tells from parameters is no change."""
    before, after = Program(), Program()
    train(before)
    train(after, replaced=True)
    paths = [program.save(tmp_path / name) for program, name in ((before, "a.pickle"), (after, "b.pickle"))]
    first, second = (read_memory(path).break_down() for path in paths)
    changes = {part.category: part.change_bytes for part in compare_categories(first, second)}
    assert 0 == changes["older_memory"]
    assert 2 * SIZE == changes["optimizer_state"]  # new m and v, beside the old ones


def without_history(path: Path) -> Path:
    """Write what torch.cuda.memory._snapshot() returns if no history was recorded."""
    program = Program()
    for _ in range(3 * WEIGHTS):
        program.alloc(at(1))
    return program.save(path)


def test_no_history(tmp_path: Path) -> None:
    """Without a history there is no peak, and the use of memory is unknown."""
    path = without_history(tmp_path / "a.pickle")
    printed = CliRunner().invoke(app, ["memory", str(path)])
    assert 0 == printed.exit_code
    words = " ".join(printed.output.split())
    assert "201 MB in use when the snapshot was taken" in words
    assert "no history was recorded" in words
    assert "torch.cuda.memory._record_memory_history" in words
    assert "at the peak" not in words
    assert "parameters" not in words
    diagnosis = " ".join(CliRunner().invoke(app, ["diagnose", str(path)]).output.split())
    assert "at its peak" not in diagnosis
    assert "parameters" not in diagnosis
    assert "201 MB of GPU 0 in use when the snapshot was taken" in diagnosis
    (data,) = json.loads(CliRunner().invoke(app, ["memory", "--json", str(path)]).output)["snapshots"]
    assert data["peak_bytes"] is None
    assert ["other"] == [use["category"] for use in data["uses"]]


def test_a_list_of_segments(tmp_path: Path) -> None:
    """What torch.cuda.memory_snapshot() returns is read as a snapshot without a history."""
    program = Program()
    for _ in range(3 * WEIGHTS):
        program.alloc(at(1))
    path = tmp_path / "list.pickle"
    path.write_bytes(pickle.dumps(program.segments()))
    assert 3 * WEIGHTS * SIZE == read_memory(path).state().used_bytes
    assert "no history was recorded" in " ".join(CliRunner().invoke(app, ["memory", str(path)]).output.split())
