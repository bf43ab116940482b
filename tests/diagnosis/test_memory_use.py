"""Memory by category: recorded trainings, and blocks that are allocated and freed in any order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instrument.explain.diagnosis.diagnose import diagnose
from instrument.explain.metrics.memory_use import CATEGORIES, memory_use
from instrument.read.jobs.read import read_file
from instrument.read.tables.trace import Trace

from .made_loops import MadeLoop
from .shown import named

HIDDEN, ROWS = 1024, 4096


def recorded(folder: Path, *, keep: bool = False) -> tuple[Trace, int]:
    """Record four steps of a training on the CPU; return the trace and the bytes of the parameters."""
    model = torch.nn.Sequential(torch.nn.Linear(256, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 512))
    optimizer, kept = torch.optim.Adam(model.parameters()), []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as prof:
        for step in range(4):
            with torch.profiler.record_function(f"ProfilerStep#{step}"):
                loss = model(torch.randn(ROWS, 256)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if keep:
                    kept.append(torch.ones(250_000))
    prof.export_chrome_trace(str(folder / "trace.json"))
    return read_file(folder / "trace.json"), 4 * sum(each.numel() for each in model.parameters())


def test_a_recorded_training(tmp_path: Path) -> None:
    """Activations are what the backward pass needs, and the optimizer keeps two moments of each parameter."""
    trace, parameters = recorded(tmp_path)
    use = memory_use(trace, trace.memory)
    assert use is not None
    assert sum(use.by_category.values()) == use.peak_bytes
    assert use.by_category["optimizer"] == 2 * parameters + 4 * 4  # and a counter for each of four parameters
    assert use.by_category["activations"] == 4 * ROWS * (256 + HIDDEN + 512)  # and the batch, which no name holds
    assert use.growth_bytes is not None
    assert all(growth < 1000 for growth in use.growth_bytes.values())


def test_what_a_recorded_training_keeps(tmp_path: Path) -> None:
    """A tensor that each step adds to a list grows what is kept, by its size."""
    trace, _ = recorded(tmp_path, keep=True)
    use = memory_use(trace, trace.memory)
    assert use is not None
    assert use.growth_bytes is not None
    assert use.growth_bytes["kept"] == pytest.approx(1_000_000, abs=1000)
    assert sum(use.growth_bytes.values()) == pytest.approx(1_000_000, abs=1000)


def on_gpu(*events: tuple[float, int, int], total: int = 0) -> MadeLoop:
    """Return a loop with allocations and frees: times in us, addresses and bytes, after ``total`` bytes before."""
    loop = MadeLoop()
    for at, address, size in events:
        total += size
        loop.memory(at, total, total)
        loop.rows["memory"][-1] |= {"bytes": size, "address": address}
    return loop


def test_categories() -> None:
    """Each category, on the device with the highest peak, in the diagnosis and its outputs."""
    mb = 1_000_000
    loop = on_gpu(
        (10, 1, 8 * mb), (20, 2, 2 * mb), (25, 2, -2 * mb), (30, 3, 4 * mb), (110, 4, 16 * mb), (120, 5, mb),
        (130, 5, -mb), (140, 1, -8 * mb), (310, 6, 32 * mb), (320, 7, 64 * mb), (330, 7, -64 * mb), total=128 * mb,
    )  # fmt: skip
    loop.operator("autograd::engine::evaluate_function: AddBackward0", 100, 200)
    loop.region("Optimizer.step#Adam.step", 300, 400)
    loop.rows["memory"].append(loop.rows["memory"][0] | {"device": 1, "allocated_bytes": 5})
    found = diagnose(loop.trace())
    assert found.memory is not None
    assert (found.memory.device, found.memory.peak_bytes) == (0, 244 * mb)
    expected = {
        "before_recording": 128,
        "gradients": 16,
        "temporary": 64,
        "kept": 4,
        "optimizer": 32,
        "activations": 0,
    }
    assert found.memory.by_category == {name: size * mb for name, size in expected.items()}
    text = (
        "Memory at its peak: 244.0 MB allocated: before recording 128.0 MB, temporary 64.0 MB, optimizer 32.0 MB"
    )
    assert text in " ".join(str(found).split())
    assert text in found.to_markdown()
    parts = json.loads(found.to_json())["memory"]["parts"]
    assert {name: part["definition"] for name, part in parts.items()} == CATEGORIES
    assert parts["gradients"]["bytes"] == 16 * mb


def test_growth_names_its_category() -> None:
    """Memory that grows says what grows, and memory that is nearly full what fills it."""
    grows = on_gpu(*((step * 1000 + 500, step + 1, 10_000_000) for step in range(3)))
    values = {each.name: each.value for each in named(diagnose(grows.trace()))["memory-growth"].evidence}
    assert values["growing"] == "kept 10.0 MB"
    full = on_gpu((500, 1, 78 * 10**9))
    values = {each.name: each.value for each in named(diagnose(full.trace()))["memory-nearly-full"].evidence}
    assert values["used"] == "kept 78,000.0 MB"


def test_nothing_recorded() -> None:
    """Without memory events, or without their addresses, there is no use and nothing is said."""
    for loop in (MadeLoop(), MadeLoop().memory(500, 10, 10)):
        found = diagnose(loop.trace())
        assert found.memory is None
        assert "Memory at its peak" not in str(found)
        assert json.loads(found.to_json())["memory"] is None


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-3, 3)), max_size=30))
def test_any_order(events: list[tuple[int, int]]) -> None:
    """Whatever is allocated and freed, the categories add up to the peak, and none is negative."""
    rows: list[Any] = [(place * 90.0, address, size) for place, (address, size) in enumerate(events) if size]
    trace = on_gpu(*rows, total=1000).trace()
    use = memory_use(trace, trace.memory)
    if not rows:
        assert use is None
        return
    assert use is not None
    assert all(size >= 0 for size in use.by_category.values())
    assert sum(use.by_category.values()) >= use.peak_bytes
    if sum(size for _, _, size in rows if size < 0) == 0:
        assert sum(use.by_category.values()) == use.peak_bytes
