"""Copies of parameters that autocast makes are told from activations, with the frames of C++ and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import instrument

from ..support.shared_traces import shared
from .snapshots import block, event, segment, write
from .test_breakdown import FORWARD

CAST = [{"name": "at::autocast::cached_cast(c10::ScalarType)", "filename": "??", "line": 0}, *FORWARD]
PARAMETERS = [segment([{**block(100 * number, 64), "frames": []} for number in range(1, 5)])]


def sizes(path: Path, events: list[dict[str, Any]]) -> dict[str, int]:
    snapshot = instrument.read_memory(write(path / "a.pickle", [events], PARAMETERS))
    return {name: sum(both) for name, both in snapshot.break_down().by_category().items() if any(both)}


def kept(count: int, size: int, stack: list[dict[str, Any]], start: int = 1000) -> list[dict[str, Any]]:
    return [event("alloc", start + number, size, frames=stack) for number in range(count)]


def test_frames_that_cast(tmp_path: Path) -> None:
    """With them, casts have the size of half a parameter; those of other tensors are activations."""
    events = [*kept(1, 32, CAST), *kept(2, 50, CAST, 2000), *kept(1, 32, FORWARD, 3000)]
    assert {"parameters": 256, "casts": 32, "activations": 132} == sizes(tmp_path, events)


def test_without_frames(tmp_path: Path) -> None:
    """Without them, they must be half of the parameters, and no more often than these."""
    assert {"parameters": 256, "casts": 96, "activations": 7} == sizes(
        tmp_path, [*kept(3, 32, FORWARD), *kept(1, 7, FORWARD, 2000)]
    )
    assert {"parameters": 256, "activations": 32} == sizes(tmp_path, kept(1, 32, FORWARD))
    assert {"parameters": 256, "activations": 160} == sizes(tmp_path, kept(5, 32, FORWARD))


def test_activations_of_the_size_of_casts(tmp_path: Path) -> None:
    """Activations of half the size of the largest weights are none, as the other weights would be cast as well."""
    older = [segment([{**block(1000 * at, size), "frames": []} for at, size in enumerate((64, 64, 256, 256), 1)])]

    def categories(events: list[dict[str, Any]]) -> dict[str, int]:
        snapshot = instrument.read_memory(write(tmp_path / "a.pickle", [events], older))
        return {name: sum(both) for name, both in snapshot.break_down().by_category().items() if any(both)}

    large = kept(2, 128, FORWARD, 9000)
    assert {"parameters": 640, "activations": 256} == categories(large)
    assert {"parameters": 640, "casts": 320} == categories([*kept(2, 32, FORWARD, 8000), *large])
    assert {"parameters": 640, "casts": 288} == categories([*kept(1, 32, FORWARD, 8000), *large])


@pytest.mark.parametrize("name", ["ctx128_forward", "ctx128_forward_mixed"])
def test_a_real_program(name: str) -> None:
    """Autocast keeps a copy of half the size of each weight of a matmul; without it, there is none."""
    found = instrument.read_memory(shared(f"memory/{name}.pickle")).break_down()
    weights = 128 * 13_107_200 + 96 * 52_428_800 + 51_200_000 + 65 * 5120
    assert (weights if "mixed" in name else 0) == sum(found.by_category()["casts"])
