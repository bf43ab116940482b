"""The kernels, memcpys and memsets that a call launches on CUDA, by family.

Most operators launch the same kernels whatever their arguments: `kernel_table.json` lists them, as recorded by
``scripts/kernel_table.py``. Element-wise operators launch one. The others have a rule, by name, in `RULES`.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

import torch

from . import kernel_rules, network_rules, reduction_rules, sorting_rules
from .calls import Call
from .collective_rules import collective
from .launches import Launch, Rule, is_contiguous, is_empty
from .optimizer_rules import launches_over_lists

_TABLE = "kernel_table.json"
RULES: dict[str, Rule] = {
    **kernel_rules.RULES, **network_rules.RULES, **reduction_rules.RULES,
    **sorting_rules.RULES,
}  # fmt: skip


class Launches(NamedTuple):
    """What a call launches.

    Attributes:
        works: the kernels, memcpys and memsets, in order.
        known: whether the operator is known; else it counts as one kernel of the family "other".
    """

    works: tuple[Launch, ...]
    known: bool


@lru_cache(1)
def _table() -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return the families by operator, and the places of the copy of a first argument that is not contiguous."""
    table = json.loads(resources.files(__package__).joinpath(_TABLE).read_text(encoding="utf-8"))
    return table["operators"], table["copies"]


def launches_of(call: Call) -> Launches:
    """Return what a call launches on CUDA."""
    if not call.results and not call.tensors:
        return Launches((), True)  # it only makes a view
    name = call.name.removeprefix("aten::").removesuffix("_symint")
    if call.operator.namespace in ("c10d", "_c10d_functional"):
        return Launches(tuple(collective(call)), True)
    if name.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach_")):
        return Launches(tuple(launches_over_lists(call)), True)
    rule = RULES.get(name)
    if rule is not None:
        return Launches(tuple(rule(call)), True)
    if is_empty(call):
        return Launches((), True)
    table, copies = _table()
    families = table.get(name)
    if families is None and torch.Tag.pointwise in call.operator.tags:
        families = ["elementwise"]
    if families is None:
        return Launches((Launch("other"),), False)
    works = [Launch(family) for family in families]
    if name in copies and not is_contiguous(call.tensors[0]):
        works.insert(copies[name], Launch("copy"))
    return Launches(tuple(works), True)
