"""How long a collective takes among the GPUs of one machine."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .gpus import Gpu

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast"]
MOST_RANKS = 8
"""The GPUs of one machine."""


class Collective(NamedTuple):
    """A collective.

    Attributes:
        kind: what it does.
        bytes: the whole tensor: what each rank has in the end of an all-gather, or at the beginning of the others.
        ranks: the GPUs that take part.
    """

    kind: Kind
    bytes: int
    ranks: int


class Link(NamedTuple):
    """What connects a GPU with the others.

    Attributes:
        name: "NVLink".
        bytes_per_s: what a ring of GPUs moves in one direction, as the library of collectives expects it.
        is_per_peer: whether there is a link of this rate to each other GPU, all of which a collective uses.
        protocols: for each way of sending that the library chooses from, the ns that a collective takes at least,
            those of each step from one GPU to the next, and the share of the rate that it reaches.
    """

    name: str
    bytes_per_s: float
    is_per_peer: bool
    protocols: tuple[tuple[float, float, float], ...]


# NCCL, src/graph/topo.h (the rate of a link, as measured by NVIDIA) and src/graph/tuning.cc (baseLat and hwLat of
# rings, and how much of the rate LL and LL128 reach); RCCL has the same files. The links are those of data sheets.
_NVLINK = ((6_600.0, 600.0, 0.5), (14_000.0, 1_900.0, 0.92), (8_400.0, 3_400.0, 1.0))
_PCIE = ((6_600.0, 1_000.0, 0.5), (8_400.0, 5_700.0, 1.0))
_XGMI = ((12_000.0, 800.0, 0.5), (17_000.0, 3_600.0, 1.0))
_HOPPER = Link("NVLink", 18 * 20.6e9, False, _NVLINK)
_AMPERE = Link("NVLink", 12 * 20.0e9, False, _NVLINK)
LINKS = {
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": Link("NVLink", 18 * 40.1e9, False, _NVLINK),
    "a100": _AMPERE,
    "a100-40": _AMPERE,
    "v100": Link("NVLink", 6 * 20.0e9, False, _NVLINK),
    "l4": Link("PCIe", 24e9, False, _PCIE),
    "t4": Link("PCIe", 12e9, False, _PCIE),
    "mi300x": Link("xGMI", 48e9, True, _XGMI),
}
"""The link of each GPU of `GPUS`, by name."""


def collective_ns(collective: Collective, gpu: Gpu) -> float:
    """Return how long a collective takes among GPUs that do nothing else: that of the best protocol for its size.

    In a ring of n GPUs an all-reduce takes 2 (n - 1) steps, in each of which a GPU sends 1/n of the bytes; an
    all-gather or a reduce-scatter takes n - 1 of them, and a broadcast passes all bytes on from GPU to GPU.
    """
    ranks = collective.ranks
    if ranks < 2:
        return 0.0
    link = LINKS[gpu.name]
    rate = link.bytes_per_s * (ranks - 1 if link.is_per_peer else 1)
    steps = {"all-reduce": 2 * (ranks - 1), "broadcast": ranks}.get(collective.kind, ranks - 1)
    sent = collective.bytes * steps / ranks
    return min(base + steps * hop + sent / (rate * share) * 1e9 for base, hop, share in link.protocols)
