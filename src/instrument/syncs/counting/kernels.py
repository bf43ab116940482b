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

from .calls import Call, Memory, TensorInfo
from .kernel_rules import RULES
from .launches import Launch, is_empty

_TABLE = "kernel_table.json"


class Launches(NamedTuple):
    """What a call launches.

    Attributes:
        works: the kernels, memcpys and memsets, in order.
        known: whether the operator is known; else it counts as one kernel of the family "other".
    """

    works: tuple[Launch, ...]
    known: bool


@lru_cache(1)
def _table() -> dict[str, list[str]]:
    text = resources.files(__package__).joinpath(_TABLE).read_text(encoding="utf-8")
    table: dict[str, list[str]] = json.loads(text)["operators"]
    return table


def launches_of(call: Call) -> Launches:
    """Return what a call launches on CUDA."""
    if not call.results and not call.tensors:
        return Launches((), True)  # it only makes a view
    name = call.name.removeprefix("aten::").removesuffix("_symint")
    rule = RULES.get(name)
    if rule is not None:
        return Launches(tuple(rule(call)), True)
    if is_empty(call):
        return Launches((), True)
    families = _table().get(name)
    if families is None and torch.Tag.pointwise in call.operator.tags:
        families = ["elementwise"]
    if families is None:
        return Launches((Launch("other"),), False)
    return Launches(tuple(map(Launch, families)), True)
