"""Annotated code under `torch.jit.script`: it compiles as with `record_function`, and its regions are recorded."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import instrument
from instrument import annotate


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    @annotate("decorated")
    def helper(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("inside", color="red", payload=3):
            return torch.relu(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with instrument.annotate("outer"):
            for _ in range(2):
                with instrument.annotate(message="layer"):
                    x = self.layer(x)
        instrument.mark("done")
        return self.helper(x)


def _free(x: torch.Tensor) -> torch.Tensor:
    with instrument.annotate("free"):
        return x * 2


def _names(call: nn.Module, x: torch.Tensor) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        call(x)
    wanted = {"decorated", "inside", "outer", "layer", "done", "free"}
    found = [event for event in recorded.events() if event.name in wanted]
    return [event.name for event in sorted(found, key=lambda event: event.time_range.start)]


@pytest.mark.parametrize("recording", [False, True])
def test_scripted_module(recording: bool) -> None:
    """Scripted, saved and loaded, a module gives the same result and shows its with blocks in torch.profiler."""
    block, x = _Block(), torch.ones(1, 2)
    if recording:
        with profile(activities=[ProfilerActivity.CPU]):
            scripted = torch.jit.script(block)
    else:
        scripted = torch.jit.script(block)
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    for made in (scripted, torch.jit.load(file)):
        assert torch.equal(made(x), block(x))
        assert _names(made, x) == ["outer", "layer", "layer", "done", "inside"]
    assert _names(block, x) == ["outer", "layer", "layer", "done", "decorated", "inside"]


def test_scripted_function() -> None:
    """A function with an annotated block can be scripted, and is unchanged where it is not."""
    x = torch.ones(2)
    assert torch.equal(torch.jit.script(_free)(x), _free(x))
    assert _names(torch.jit.script(_free), x) == ["free"]
