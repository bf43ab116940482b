"""`choose_ranks`: which ranks of a job record: by node, place, position in a mesh, or at random."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Any

from ...base.job import number_in, world_size
from ...base.units import integer

ACCEPTED = 'ranks such as "0,7", or "node=0", "local=0" or "sample=4", also several with blanks between them'
_TEXT = re.compile(r"(node|local|sample|seed)=(\d{1,9}(?:,\d{1,9})*)")


def choose_ranks(
    mesh: Any = None,
    *,
    node: int | Iterable[int] | None = None,
    local: int | Iterable[int] | None = None,
    sample: int | None = None,
    seed: int = 0,
    **position: int | Iterable[int],
) -> frozenset[int]:
    """Return the ranks for the argument ``ranks`` of `profile`; with several conditions, those that meet all.

    Args:
        mesh: a `torch.distributed.device_mesh.DeviceMesh` with names of its dimensions.
        node: the nodes, counted from 0, as torchrun numbers them (``RANK // LOCAL_WORLD_SIZE``).
        local: the ranks on each node, counted from 0; ``local=0`` is one rank a node.
        sample: how many of them, at random.
        seed: the seed of the sample, the same on all ranks.
        position: coordinates in the mesh, by the name of the dimension: ``choose_ranks(mesh, tp=0, pp=0)``.

    Raises:
        TypeError, ValueError: an argument is not accepted, or no rank meets the conditions.

    Example:
        >>> profile("runs/bert", ranks=choose_ranks(mesh, tp=0, pp=[0, 3]))
    """
    chosen = set(range(world_size()))
    if mesh is not None or position:
        chosen &= _in_mesh(mesh, position)
    for name, numbers in (("node", node), ("local", local)):
        if numbers is not None:
            wanted, size = _numbers(name, numbers), _local_world_size()
            chosen &= {rank for rank in chosen if (rank // size if name == "node" else rank % size) in wanted}
    if not chosen:
        given = {"node": node, "local": local, **position}.items()
        place = ", ".join(f"{name}={value}" for name, value in given if value is not None)
        raise ValueError(f"no rank of {world_size()} is at {place}")
    if sample is None:
        return frozenset(chosen)
    count = min(integer("sample", sample, least=1), len(chosen))
    return frozenset(random.Random(seed).sample(sorted(chosen), count))


def chosen_ranks(ranks: Iterable[int] | str | None) -> frozenset[int] | None:
    """Return the argument ``ranks`` of a user as a set.

    Raises:
        TypeError, ValueError: it is not accepted.
    """
    if ranks is None:
        return None
    if isinstance(ranks, str):
        return _parsed(ranks)
    if not isinstance(ranks, Iterable):
        raise TypeError(f'"ranks" must be several integers, such as [0]: {ranks!r}')
    chosen = frozenset(ranks)
    if not (chosen and all(isinstance(rank, int) and rank >= 0 for rank in chosen)):
        raise ValueError(f'"ranks" must hold integers >= 0: {ranks!r}')
    return chosen


def check_text(text: str) -> None:
    """Check the form of ranks as text.

    Raises:
        ValueError: it is not accepted.
    """
    numbers = all(part.strip().isdecimal() for part in text.split(","))
    if not numbers and not (text.split() and all(map(_TEXT.fullmatch, text.split()))):
        raise ValueError(f'"ranks" must be {ACCEPTED}: {text!r}')


def _parsed(text: str) -> frozenset[int]:
    check_text(text)
    if "=" not in text:
        return frozenset(int(part) for part in text.split(","))
    given: dict[str, Any] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        numbers = [int(part) for part in value.split(",")]
        given[name] = numbers if name in ("node", "local") else numbers[0]
    return choose_ranks(**given)


def _in_mesh(mesh: Any, position: dict[str, int | Iterable[int]]) -> set[int]:
    names = getattr(mesh, "mesh_dim_names", None)
    if not names or not hasattr(mesh, "mesh"):
        raise TypeError(f'"mesh" must be a DeviceMesh whose dimensions have names: {mesh!r}')
    ranks = mesh.mesh
    for name, numbers in position.items():
        if name not in names:
            raise ValueError(f'"{name}" must be a dimension of the mesh, one of {", ".join(names)}')
        axis = names.index(name)
        wanted = sorted(number for number in _numbers(name, numbers) if number < ranks.shape[axis])
        ranks = ranks.index_select(axis, ranks.new_tensor(wanted))
    return set(ranks.flatten().tolist())


def _numbers(name: str, given: int | Iterable[int]) -> set[int]:
    numbers: set[Any] = set(given) if isinstance(given, Iterable) else {given}
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
        raise ValueError(f'"{name}" must be an integer >= 0, or several: {given!r}')
    return {int(number) for number in numbers}


def _local_world_size() -> int:
    """Return how many ranks a node has, as torchrun and most launchers say it; all ranks without that."""
    size = number_in("LOCAL_WORLD_SIZE")
    return max(world_size() if size is None else size, 1)
