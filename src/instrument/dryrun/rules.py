"""Which operators make the CPU wait on a GPU, and what their CUDA kernels do that the CPU's do not.

Read from the CUDA kernels of PyTorch (aten/src/ATen/native/cuda): each waits where it reads a value, a count or
an error code back, or copies from memory that is not pinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..syncs.operations import COUNT, KERNELS, VALUE
from .checks import CHECKS, Check
from .state import State

# The results that are on the GPU, where not all are
OUTPUTS = {"_pack_padded_sequence": (0,)}

# Operators that take tensors of the CPU beside those of a GPU
_APART = (
    "set_",
    "_pack_padded_sequence",
    "_pad_packed_sequence",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "_to_copy",
)

# Functions whose kernels for the CPU read values that those for CUDA leave alone
CPU_CHECKS = ("quantile", "nanquantile")


@dataclass(frozen=True)
class Rule:
    """What is known of one operator.

    Attributes:
        check: notes its waits; None where it has none.
        outputs: which of its results are on the GPU; None for all.
        creates: it takes no tensors.
        name: without namespace and overload.
        together: all its tensors have to be on one device.
        writes: all that it returns is written in place, and stays where it is.
    """

    check: Check | None
    outputs: tuple[int, ...] | None
    name: str
    creates: bool
    together: bool
    writes: bool


def rule_of(func: Any) -> Rule:
    """Return the rule of an operator; look it up once, it costs 20 us."""
    namespace, _, name = func._schema.name.partition("::")
    tags = set(func.tags)
    dependent = bool(tags & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
    check = CHECKS.get(name) if namespace == "aten" else None
    if check is None and (name in KERNELS or dependent):
        cause = KERNELS.get(name, VALUE if torch.Tag.data_dependent_output in tags else COUNT)

        def check(state: State, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
            state.wait(name, cause)

    takes = any("Tensor" in str(argument.type) for argument in func._schema.arguments if not argument.is_out)
    written = [result.alias_info is not None and result.alias_info.is_write for result in func._schema.returns]
    return Rule(
        check, OUTPUTS.get(name), name, creates=not takes, together=namespace == "aten" and name not in _APART,
        writes=bool(written) and all(written) and name.endswith("_"),
    )  # fmt: skip
