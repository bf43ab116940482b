"""What collectives launch: one kernel of NCCL each."""

from __future__ import annotations

from collections.abc import Iterator

from .calls import Call, tensors_in
from .launches import Launch


def collective(call: Call) -> Iterator[Launch]:
    """Yield the kernel of a collective, with the bytes of its inputs or results, whichever are more."""
    if call.name.rpartition("::")[2] == "wait_tensor" or not call.tensors:
        return
    results = {each.number: each.bytes for each in call.results if each is not None}
    sizes = [sum(each.bytes for each in tensors_in(argument)) for argument in call.arguments]
    yield Launch("collective", max([*sizes, sum(results.values())]))
