"""One launch, and the parts that rules of operators share: copies, fills, and what a layout in memory needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from .calls import Argument, Call, Memory, TensorInfo


class Launch(NamedTuple):
    """A kernel, a memcpy or a memset.

    Attributes:
        family: one of `FAMILIES`.
        bytes: the bytes of a memcpy; 0 for kernels.
        source: where a memcpy reads.
        target: where it writes.
    """

    family: str
    bytes: int = 0
    source: Memory = "gpu"
    target: Memory = "gpu"


Rule = Callable[[Call], Iterator[Launch]]


def registry() -> tuple[dict[str, Rule], Callable[..., Callable[[Rule], Rule]]]:
    """Return an empty table of rules, and a decorator that makes a function the rule of the operators it names."""
    rules: dict[str, Rule] = {}

    def rule(*names: str) -> Callable[[Rule], Rule]:
        def register(function: Rule) -> Rule:
            rules.update(dict.fromkeys(names, function))
            return function

        return register

    return rules, rule


def result_of(call: Call) -> TensorInfo:
    """Return the first result that is a tensor."""
    return next(each for each in call.results if each is not None)


def is_empty(call: Call) -> bool:
    """Return whether no result has an element, or nothing that it writes has."""
    results = [each for each in call.results if each is not None] or call.tensors[:1]
    return not any(each.elements for each in results)


def argument(call: Call, place: int) -> Argument:
    """Return an argument; None if there is none at this place."""
    return call.arguments[place] if place < len(call.arguments) else None


def tensor(call: Call, place: int) -> TensorInfo | None:
    """Return the tensor at a place of the arguments; None if there is none."""
    value = argument(call, place)
    return value if isinstance(value, TensorInfo) else None


def tensors_at(call: Call, place: int) -> list[TensorInfo]:
    """Return the tensors in the list at a place of the arguments."""
    value = argument(call, place)
    return [each for each in value if isinstance(each, TensorInfo)] if isinstance(value, tuple) else []


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(info: TensorInfo) -> bool:
    """Return whether the elements are in order without gaps."""
    wanted = contiguous_stride(info.shape)
    return not info.elements or all(
        size == 1 or step == expected for size, step, expected in zip(info.shape, info.stride, wanted, strict=True)
    )


def is_dense(info: TensorInfo) -> bool:
    """Return whether the elements fill a stretch of memory, in any order of the dimensions."""
    step = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(info.stride, info.shape, strict=True) if size != 1
    ):
        if stride != step:
            return False
        step *= size
    return True


def same_layout(one: TensorInfo, other: TensorInfo) -> bool:
    """Return whether both have their elements in the same dense order."""
    same = all(
        size == 1 or first == second
        for size, first, second in zip(one.shape, one.stride, other.stride, strict=False)
    )
    return one.shape == other.shape and same and is_dense(one) and is_dense(other)


def copy(target: TensorInfo, source: TensorInfo) -> Iterator[Launch]:
    """Yield what ``target.copy_(source)`` launches (``copy_kernel_cuda`` in ``Copy.cu`` of torch)."""
    if not target.elements:
        return
    if target.memory == source.memory == "gpu":
        if target.dtype == source.dtype and same_layout(target, source):
            if target.number != source.number:
                yield Launch("memcpy", target.elements * target.dtype.itemsize)
        else:
            yield Launch("copy")
        return
    if "gpu" not in (target.memory, source.memory):
        return
    plain = target.dtype == source.dtype and same_layout(target, source)
    up = target.memory == "gpu"
    if not plain and not up and not is_contiguous(source):
        yield Launch("copy")  # into one piece
    itemsize = target.dtype.itemsize if up else source.dtype.itemsize
    yield Launch("memcpy", target.elements * itemsize, source.memory, target.memory)
    if not plain and up and not is_contiguous(target):
        yield Launch("copy")


def as_contiguous(info: TensorInfo) -> Iterator[Launch]:
    """Yield what ``info.contiguous()`` launches."""
    if not is_contiguous(info) and info.elements:
        yield Launch("copy")
