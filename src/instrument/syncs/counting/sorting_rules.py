"""What sorts, scans, searches and gathers by a mask launch on CUDA; radix sorts go over the bits of the keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .calls import Call, TensorInfo
from .launches import Launch, argument, as_contiguous, copy, is_contiguous, registry, result_of, tensor, tensors_at

RULES, rule = registry()
_ONE_BLOCK = 4096  # elements of a row that one block sorts
_ONE_TILE = 3840  # keys that one block of a radix sort takes
_FEW = 1024  # elements of a row from which `topk` takes several blocks, if there are few rows


def radix_sort(keys: int, bits: int) -> Iterator[Launch]:
    """Yield the sort of so many keys by so many bits (``cub::DeviceRadixSort``, eight bits a pass)."""
    if keys <= _ONE_TILE // 2:
        yield Launch("sort")
        return
    yield from map(Launch, ("memset", "memset", "sort", "sort"))
    for _ in range(-(-bits // 8)):
        yield from map(Launch, ("memset", "sort"))


@rule("sort")
def _sort(call: Call) -> Iterator[Launch]:
    info = call.tensors[0]
    if not info.elements:
        return
    dim = next((each for each in call.arguments if isinstance(each, int) and not isinstance(each, bool)), -1)
    length = info.shape[dim] if info.shape else 1
    values = result_of(call)._replace(number=-1)
    yield from copy(values, info)
    if length <= _ONE_BLOCK:
        yield Launch("elementwise")  # the indices
        yield Launch("memcpy", info.elements * 8) if len(info.shape) < 2 else Launch("copy")
        yield from copy(values, info)
        if length > 1:
            yield Launch("sort")
        return
    yield Launch("other")
    if length == info.elements:
        yield from radix_sort(length, info.dtype.itemsize * 8)
    else:
        yield from (Launch("sort") for _ in range(6))


@rule("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
def _scan(call: Call) -> Iterator[Launch]:
    info, result = call.tensors[0], result_of(call)
    if not info.elements:
        return
    if not info.shape:
        yield Launch("memcpy", info.bytes)
        return
    if info.dtype != result.dtype or not is_contiguous(info):
        yield Launch("copy")
    yield Launch("sort")
    if len(info.shape) == 1 and call.name.endswith(("cumsum", "cumprod")):
        yield Launch("sort")


@rule("topk")
def _topk(call: Call) -> Iterator[Launch]:
    info = call.tensors[0]
    length = info.shape[argument(call, 2)] if info.shape else 1
    rows = info.elements // max(length, 1)
    yield from as_contiguous(info)
    if length >= _FEW and (rows > 20 or length >= 20 * _FEW):
        yield from map(Launch, ("other", "memset", "memset", *["other"] * 13, *["sort"] * 4))
    yield from map(Launch, ("index", "sort"))


def _nonzero(info: TensorInfo) -> Iterator[Launch]:
    yield from as_contiguous(info)
    if not info.elements:
        return
    yield from (Launch("reduction") for _ in range(2 if info.elements > _ONE_BLOCK else 1))
    yield Launch("memcpy", 4, "gpu", "pinned")
    yield from map(Launch, ("sort", "sort"))


@rule("nonzero", "masked_select")
def _nonzero_of(call: Call) -> Iterator[Launch]:
    yield from _nonzero(call.tensors[-1])
    if call.name.endswith("masked_select"):
        yield Launch("index")


@rule("index", "_unsafe_index")
def _index(call: Call) -> Iterator[Launch]:
    for index in tensors_at(call, 1):
        if index.memory != "gpu":
            yield Launch("memcpy", index.elements * index.dtype.itemsize, index.memory, "gpu")
        elif index.dtype in (torch.bool, torch.uint8):
            yield from _nonzero(index)
    if result_of(call).elements:
        yield Launch("index")


@rule("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _index_put(call: Call) -> Iterator[Launch]:
    target, result = call.tensors[0], result_of(call)
    if not result.elements:
        return
    if not call.name.endswith("_"):
        yield from copy(result._replace(number=-1), target)
    indices, values = tensors_at(call, 1), tensor(call, 2)
    for index in indices:
        if index.memory != "gpu":
            yield Launch("memcpy", index.elements * index.dtype.itemsize, index.memory, "gpu")
        elif index.dtype in (torch.bool, torch.uint8):
            yield from _nonzero(index)
    if values is not None and values.memory != "gpu" and values.elements == 1:
        yield Launch("memcpy", values.dtype.itemsize, values.memory, "gpu")
    if not argument(call, 3):
        yield Launch("index")
        return
    unsafe = argument(call, 4) is True
    for _ in indices:  # wraps negative ones, after a check of the smallest and the largest
        yield from () if unsafe else map(Launch, ("reduction", "elementwise", "other", "elementwise", "other"))
        yield Launch("elementwise")
    yield from (Launch("elementwise") for _ in indices)
    if values is not None and not is_contiguous(values):
        yield Launch("copy")
    if len(indices) > 1:
        yield from (Launch("elementwise") for _ in indices[1:])
    yield from map(Launch, ("elementwise", "elementwise"))
    count = max(index.elements for index in indices)
    yield from radix_sort(count, max(target.elements // max(target.shape[-1], 1), 1).bit_length())
    yield Launch("index")


@rule("randperm")
def _randperm(call: Call) -> Iterator[Launch]:
    length = result_of(call).elements
    yield from map(Launch, ("fill", "elementwise", "random"))
    yield from radix_sort(length, min(64, 6 + 2 * length.bit_length()))
    yield Launch("random")


@rule("_unique2", "unique_consecutive", "_unique", "unique_dim")
def _unique(call: Call) -> Iterator[Launch]:
    yield from map(Launch, ("sort", "sort", "sort"))
    yield Launch("memcpy", 4, "gpu", "cpu")
