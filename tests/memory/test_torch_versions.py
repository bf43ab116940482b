"""Snapshots of each version of torch since 2.1, and of torch_npu, are read alike."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import instrument

from ..support.shared_traces import shared
from .test_pickled_data import plain, read
from .torch_snapshots import ADDED, BEGAN_US, MIB, cpp_pickle, snapshot_of

# pickle.dump of Python before 3.14, and since; torch::cuda::_memory_snapshot_pickled
WRITTEN: dict[str, Callable[[Any], bytes]] = {
    "protocol 4": partial(pickle.dumps, protocol=4),
    "protocol 5": partial(pickle.dumps, protocol=5),
    "C++": cpp_pickle,
}


def since(version: str, key: str) -> bool:
    """Return whether ``version`` has a key."""
    names = list(ADDED)
    return any(key in ADDED[name] for name in names[: names.index(version) + 1])


@pytest.mark.parametrize("writer", WRITTEN)
@pytest.mark.parametrize("version", ADDED)
def test_versions(tmp_path: Path, version: str, writer: str) -> None:
    """The peak, its lines and its categories are the same; regions and times are there where the file has them."""
    path = tmp_path / "a.pickle"
    path.write_bytes(WRITTEN[writer](snapshot_of(version)))
    snapshot = instrument.read_memory(path)
    found = snapshot.break_down(0)
    assert [0, 2] == snapshot.devices
    assert (14 * MIB, MIB) == (found.peak.bytes, snapshot.peak(2).bytes)
    assert {
        ("me/train.py:40", "optimizer_state"): (4 * MIB, 1),
        ("me/data.py:3", "other"): (2 * MIB, 1),
    } == {(str(place), category): number for (place, category), number in found.by_line().items()}
    sizes = {name: sum(both) // MIB for name, both in found.by_category().items() if any(both)}
    assert {"parameters": 4, "gradients": 4, "optimizer_state": 4, "other": 2} == sizes
    state = snapshot.state(0)
    assert (20 * MIB, 6 * MIB) == (state.reserved_bytes, state.unused_bytes)
    assert [(80 << 30, 77)] == [(each.bytes, each.device_free_bytes) for each in snapshot.failures(0)]
    regions = {"Optimizer.step#Adam.step": (4 * MIB, 1)} if since(version, "external_annotations") else {}
    regions |= {"batch": (2 * MIB, 1)} if since(version, "user_metadata") else {}
    assert regions == found.by_region()
    assert snapshot.events.time_ns[0] == (BEGAN_US * 1000 if since(version, "time_us") else -1)


@pytest.mark.parametrize("writer", WRITTEN)
@pytest.mark.parametrize("version", ADDED)
def test_the_data_are_those_of_pickle(version: str, writer: str) -> None:
    """What is read is what torch's own tools read by `pickle.load`."""
    data = snapshot_of(version)
    written = WRITTEN[writer](data)
    assert data == pickle.loads(written)
    assert plain(data) == plain(read(written))


@pytest.mark.parametrize("name", ["npu_expandable", "python_stacks_ctx128"])
def test_real_snapshots_from_cpp(tmp_path: Path, name: str) -> None:
    """A real snapshot, written as C++ writes it, has the same events and the same peak by line and category."""
    real = instrument.read_memory(shared(f"memory/{name}.pickle"))
    path = tmp_path / "a.pickle"
    path.write_bytes(cpp_pickle(pickle.loads(real.path.read_bytes())))
    found = instrument.read_memory(path)
    assert real.events.text("action") == found.events.text("action")
    assert real.break_down().uses == found.break_down().uses
