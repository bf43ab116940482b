"""The memory of a dry run against recorded snapshots of a transformer with 3.4 billion parameters on an H100."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from instrument.syncs.counting.cuda_memory import H100
from tests.support.step_memory import memory_of_step

from . import small_transformer

# By program: the peak of its snapshot in bytes
PEAKS = {"forward": 19487442944, "forward_mixed": 24008252416, "full_step": 54937606148}


@pytest.mark.parametrize("program", PEAKS)
def test_the_peak_of_a_snapshot(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is within 5 %; each layer adds the same, so that three and four of them tell what 32 take."""

    def peak(layers: int) -> int:
        monkeypatch.setattr(small_transformer, "LAYERS", layers)
        step: Callable[[], Any] = getattr(small_transformer, program)
        return memory_of_step(step, fake=True, gpu=H100).peak_bytes

    three, four = peak(3), peak(4)
    assert three + 29 * (four - three) == pytest.approx(PEAKS[program], rel=0.05)
