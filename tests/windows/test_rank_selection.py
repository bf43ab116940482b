"""Ranks are chosen by node, place on the node, position in a mesh, and at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from instrument import choose_ranks, profile
from instrument.record.planning.ranks import chosen_ranks

from ..support import programs, warm


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a rank of a job of 4 nodes with 8 ranks each."""
    for name, value in {"RANK": "9", "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("job")
def test_nodes_and_places() -> None:
    """Conditions are combined; a sample is the same on all ranks."""
    assert set(range(8, 16)) == choose_ranks(node=1)
    assert {0, 8, 16, 24} == choose_ranks(local=0)
    assert {8, 15, 24, 31} == choose_ranks(node=[1, 3], local=[0, 7])
    sample = choose_ranks(node=2, sample=3)
    assert sample == choose_ranks(node=2, sample=3) < set(range(16, 24))
    assert 3 == len(sample)
    assert sample != choose_ranks(node=2, sample=3, seed=1)
    assert {5} == choose_ranks(node=0, local=5, sample=9)


@pytest.mark.usefixtures("job")
def test_ranks_as_text() -> None:
    """The forms of the command line."""
    assert {0, 7} == chosen_ranks("0, 7")
    assert {8, 9} == chosen_ranks("node=1 local=0,1")
    assert 4 == len(chosen_ranks("sample=4 seed=3") or ())


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("", '"ranks" must be ranks such as "0,7"'),
        ("node=x", '"ranks" must be ranks such as "0,7"'),
        ("pp=1", '"ranks" must be ranks such as "0,7"'),
        ("node=4", "no rank of 32 is at node=\\[4\\]"),
        (3, '"ranks" must be several integers'),
        ([-1], '"ranks" must hold integers >= 0'),
    ],
)
def test_what_is_not_accepted(given: Any, text: str, tmp_path: Path) -> None:
    """The message says what is accepted, at the call."""
    with pytest.raises((TypeError, ValueError), match=text):
        profile(tmp_path, ranks=given)


@pytest.mark.parametrize(
    ("arguments", "text"), [({"tp": 0}, '"mesh" must be'), ({"sample": 0}, '"sample" must be')]
)
def test_arguments_that_are_not_accepted(arguments: dict[str, Any], text: str) -> None:
    """Coordinates need a mesh."""
    with pytest.raises((TypeError, ValueError), match=text):
        choose_ranks(**arguments)


MESH = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
import instrument
dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
mesh = init_device_mesh("cpu", (2, 2, 4), mesh_dim_names=("pp", "dp", "tp"))
print(sorted(instrument.choose_ranks(mesh, tp=0)))
print(sorted(instrument.choose_ranks(mesh, tp=[0, 3], pp=1)))
print(sorted(instrument.choose_ranks(mesh, pp=0, dp=1, sample=2)) == sorted(
    instrument.choose_ranks(mesh, pp=0, dp=1, sample=2)))
try:
    instrument.choose_ranks(mesh, ep=0)
except ValueError as error:
    print(error)
"""


@pytest.mark.process
def test_positions_in_a_mesh(tmp_path: Path) -> None:
    """Coordinates are those of DeviceMesh, by the names of its dimensions."""
    script = tmp_path / "mesh.py"
    script.write_text(MESH)
    done = warm.run(programs.python(script, []), programs.environment(), check=True)
    assert [
        "[0, 4, 8, 12]",
        "[8, 11, 12, 15]",
        "True",
        '"ep" must be a dimension of the mesh, one of pp, dp, tp',
    ] == done.stdout.splitlines()
