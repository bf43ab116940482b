"""`memory="snapshot"` on a GPU: what torch's allocator recorded, with the regions that were open then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument.read.memory.snapshot import MemorySnapshot

from .training import manifest

pytestmark = pytest.mark.gpu
MIB = 2**20


def train(out: Path, body: Any = lambda number: None, **memory: Any) -> list[dict[str, Any]]:
    """Train on the GPU, and return what the manifest has about memory."""
    model = torch.nn.Linear(512, 512).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    with instrument.profile(out, schedule="2-3", memory=instrument.memory_history(**memory)) as prof:
        for number in range(6):
            with instrument.annotate("forward"):
                loss = model(torch.randn(64, 512, device="cuda")).square().mean()
            with instrument.annotate("mine"):
                body(number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    return [line["memory"] for line in manifest(out)]


def read(out: Path, memory: dict[str, Any]) -> MemorySnapshot:
    return instrument.read_memory(out / memory["file"])


def test_allocations_have_lines_and_regions(tmp_path: Path) -> None:
    """An allocation in a region lies between its begin and its end, and its stack has the line of this file."""
    sizes: list[int] = []

    def body(number: int) -> None:
        if number == 2:
            sizes.append(torch.empty(37 * MIB, dtype=torch.uint8, device="cuda").untyped_storage().nbytes())

    (memory,) = train(tmp_path, body)
    assert ("recorded", None) == (memory["status"], memory["reason"])
    assert not torch._C._cuda_isHistoryEnabled()
    found = read(tmp_path, memory)
    limit = found.known_limit(torch.cuda.current_device())
    assert limit is not None
    assert found.peak().bytes < limit <= torch.cuda.get_device_properties().total_memory
    events = list(zip(found.events.text("action"), found.events.bytes, found.events.time_ns, strict=True))
    ((_, _, time_ns),) = [event for event in events if event[0] == "alloc" and event[1] >= 37 * MIB]
    marks = zip(
        found.annotations.text("name"), found.annotations.text("stage"), found.annotations.time_ns, strict=True
    )
    mine = [(stage, at) for name, stage, at in marks if name == "mine"]
    (begin, end) = (at for _, at in mine[:2])
    assert begin - 1000 <= time_ns <= end + 1000
    row = next(row for row, event in enumerate(events) if event[2] == time_ns)
    frames = found.stacks[found.events.stack[row]]
    assert __file__ in [found.frames.text("file")[frame] for frame in frames]


@pytest.mark.parametrize("stacks", ["python", "all"])
def test_the_history_is_forgotten(tmp_path: Path, stacks: str) -> None:
    """A second run has its own events alone, and those of a window are not in the snapshots of the program."""
    (first,) = train(tmp_path / "a", stacks=stacks)
    (second,) = train(tmp_path / "b", stacks=stacks)
    assert "recorded" == first["status"] == second["status"]
    assert second["entries"] <= 1.5 * first["entries"]
    assert not any(torch.cuda.memory._snapshot()["device_traces"])


def test_out_of_memory(tmp_path: Path) -> None:
    """The snapshot has the allocation that failed, and the program gets torch's error."""

    def body(number: int) -> None:
        if number == 3:
            with pytest.raises(torch.cuda.OutOfMemoryError):
                torch.empty(2**50, dtype=torch.uint8, device="cuda")

    (memory,) = train(tmp_path, body)
    assert 2**50 <= memory["out_of_memory"]["requested_bytes"]
    assert "oom" in read(tmp_path, memory).events.text("action")


def test_a_program_that_records_itself(tmp_path: Path) -> None:
    """Its history goes on."""
    torch.cuda.memory._record_memory_history(max_entries=1000)
    try:
        (memory,) = train(tmp_path)
        assert "not recorded" == memory["status"]
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)


def test_cuda_is_used_first_in_a_window(tmp_path: Path) -> None:
    """The history begins there."""
    from ..support import programs, warm

    code = """
        import instrument, torch
        with instrument.profile("out", memory="snapshot"):
            torch.ones(2**20).cuda()
    """
    script = programs.program(code, tmp_path)
    warm.run(programs.python(script), programs.environment(), cwd=tmp_path, check=True)
    (line,) = manifest(tmp_path / "out")
    assert ("recorded", True) == (line["memory"]["status"], line["memory"]["entries"] > 0)
