"""Helpers that run a small network and compare its gradients and regions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from ..support.net import Net

A = ["a", ["a.lin"], ["a.act"]]


B = ["b", ["b.lin"], ["b.act"]]


FORWARD = ["Net", A, B]


A_BACKWARD = ["a (backward)", ["a.act (backward)"], ["a.lin (backward)"]]


B_BACKWARD = ["b (backward)", ["b.act (backward)"], ["b.lin (backward)"]]


BACKWARD = ["Net (backward)", B_BACKWARD, A_BACKWARD]


LEAVES = ["Net", "a", "a.lin", "a.act", "b", "b.lin", "b.act"]


def seeded(make: Callable[[], Any] = Net) -> Any:
    torch.manual_seed(0)
    return make()


def batch(grad: bool = False) -> Tensor:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_() if grad else x


def hooks(model: nn.Module) -> int:
    """Return the number of hooks and other additions on the modules."""
    return sum(
        len(module._forward_hooks)
        + len(module._forward_pre_hooks)
        + ("__getstate__" in vars(module))
        + (vars(module).get("_compiled_call_impl") is not None)
        for module in model.modules()
    )


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def flat(tree: list[Any]) -> Iterator[tuple[str, str]]:
    """Yield every region of a tree with the region around it."""

    def walk(node: list[Any], around: str) -> Iterator[tuple[str, str]]:
        yield node[0], around
        for inner in node[1:]:
            yield from walk(inner, node[0])

    for node in tree:
        yield from walk(node, "")


def backward_counts(tree: list[Any]) -> Counter[str]:
    """Count each module's backward regions, each of which must lie inside that of its parent."""
    found: Counter[str] = Counter()
    for name, around in flat(tree):
        if name.endswith(" (backward)"):
            name = name.removesuffix(" (backward)")
            found[name] += 1
            if "." in name:
                assert around == f"{name.rpartition('.')[0]} (backward)", tree
    return found


def assert_same(expected: list[Tensor | None], found: list[Tensor | None]) -> None:
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other))


Run = Callable[[Any], list["Tensor | None"]]
