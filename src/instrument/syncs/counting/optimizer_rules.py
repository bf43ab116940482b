"""What operators over lists of tensors launch on CUDA, as those of optimizers: ``multi_tensor_apply`` of torch.

A launch takes at most so many tensors and so many chunks of 65,536 elements.
"""

from __future__ import annotations

from collections.abc import Iterator

from .calls import Call, TensorInfo
from .launches import Launch, copy, is_dense, tensors_at

_CHUNK = 65536  # elements
_TENSORS = (770, 448, 336, 252, 210)  # of a launch, by the number of lists
_BLOCKS = 2560  # chunks of a launch
_SCALARS = 672  # tensors of a launch with one list and a number for each
_WITH_RESULT = ("_foreach_norm", "_foreach_max")


def launches_over_lists(call: Call) -> Iterator[Launch]:
    """Yield what an operator ``_foreach_...``, ``_fused_...`` or ``_amp_foreach_...`` launches."""
    name = call.name.rpartition("::")[2]
    lists = [tensors_at(call, place) for place in range(len(call.arguments))]
    lists = [each for each in lists if each]
    if name == "_foreach_copy_":
        yield from _copies(*lists[:2])
        return
    if not lists or not any(each.elements and each.memory == "gpu" for each in lists[0]):
        return
    if name in _WITH_RESULT:
        yield Launch("fill")
        yield from _launches(lists[0], _TENSORS[0])
        yield Launch("optimizer")
        return
    fused = name.startswith("_fused_")
    if not fused and not _alike(lists):
        yield from (Launch("elementwise") for each in lists[0] if each.elements)
        return
    depth = len(lists) - (1 if fused else 0)  # the numbers of steps are beside
    if not fused and not name.endswith("_"):
        depth += 1  # the results
    most = _TENSORS[min(depth, len(_TENSORS)) - 1]
    if depth == 1 and any(
        isinstance(each, tuple) and each and isinstance(each[0], float) for each in call.arguments
    ):
        most = _SCALARS
    yield from _launches(lists[0], most)


def _copies(targets: list[TensorInfo], sources: list[TensorInfo]) -> Iterator[Launch]:
    """Yield the copies of a list, which are one if both are on the GPU, alike, and each of one type."""
    types, memories = {each.dtype for each in sources}, {each.memory for each in targets + sources}
    converted = [each._replace(dtype=sources[0].dtype) for each in targets]
    one_type = len(types) == len({each.dtype for each in targets}) == 1
    if one_type and memories == {"gpu"} and _alike([converted, sources]):
        yield from _launches(targets, _TENSORS[1])
        return
    for target, source in zip(targets, sources, strict=True):
        yield from copy(target, source)


def _alike(lists: list[list[TensorInfo]]) -> bool:
    """Return whether the tensors at each place have the same sizes, strides and types."""
    return all(len(each) == len(lists[0]) for each in lists) and all(
        is_dense(row[0]) and all((one.shape, one.stride, one.dtype) == row[0][:3] for one in row)
        for row in zip(*lists, strict=True)
    )


def _launches(tensors: list[TensorInfo], most: int) -> Iterator[Launch]:
    held = blocks = 0
    for info in tensors:
        chunks = -(-info.elements // _CHUNK)
        held += chunks > 0
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if blocks == _BLOCKS or (held == most and last):
                yield Launch("optimizer")
                blocks, held = 0, 0 if last else 1
    if blocks:
        yield Launch("optimizer")
