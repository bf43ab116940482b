"""What collectives launch: one kernel of NCCL each."""

from __future__ import annotations

from collections.abc import Iterator

from .calls import Call
from .launches import Launch

_WITHOUT_KERNELS = ("wait_tensor", "monitored_barrier_", "broadcast_", "barrier")


def collective(call: Call) -> Iterator[Launch]:
    """Yield the kernel of a collective, with the bytes of its inputs or results, whichever are more."""
    if call.name.rpartition("::")[2] == "wait_tensor" or not call.tensors:
        return
    results = {each.number: each.bytes for each in call.results if each is not None}
    lists = [argument for argument in call.arguments if isinstance(argument, tuple)]
    sizes = [sum(each.bytes for each in call.tensors if each in _flat(one)) for one in lists]
    single = [each.bytes for each in call.tensors if each in call.arguments]
    yield Launch("collective", max([*sizes, *single, sum(results.values())], default=0))


def _flat(values: tuple[object, ...]) -> list[object]:
    return [each for value in values for each in (_flat(value) if type(value) is tuple else [value])]
