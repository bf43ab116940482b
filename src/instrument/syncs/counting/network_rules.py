"""What the operators of neural networks launch on CUDA: attention, normalization, losses, embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from .calls import Call, TensorInfo
from .launches import Launch, argument, as_contiguous, registry, tensor

RULES, rule = registry()
_HALF = (torch.float16, torch.bfloat16)


def _transposed(info: TensorInfo) -> TensorInfo:
    """Return a tensor of batch x heads x length x size as batch x length x heads x size, as kernels take it."""
    (b, h, m, k), (sb, sh, sm, sk) = info.shape, info.stride
    return info._replace(shape=(b, m, h, k), stride=(sb, sm, sh, sk))


@rule("_scaled_dot_product_efficient_attention")
def _efficient(call: Call) -> Iterator[Launch]:
    if not argument(call, 5):  # no dropout: fills the state of its random numbers, which nothing reads
        yield Launch("fill")
        yield Launch("fill")
    yield Launch("attention")


@rule("_scaled_dot_product_efficient_attention_backward")
def _efficient_backward(call: Call) -> Iterator[Launch]:
    gradient, query, key = call.tensors[:3]
    yield from as_contiguous(_transposed(gradient))
    if query.dtype not in _HALF:
        yield Launch("elementwise")
        yield Launch("reduction")
        if query.shape[1] > 1 and query.shape[2] > 1:
            yield Launch("copy")
        else:
            yield Launch("memcpy", 4 * query.shape[0] * query.shape[1] * query.shape[2])
    yield Launch("attention")
    if key.shape[1] != query.shape[1]:
        yield Launch("reduction")
        yield Launch("reduction")


@rule("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention")
def _flash(call: Call) -> Iterator[Launch]:
    yield Launch("attention")


@rule("_scaled_dot_product_flash_attention_backward")
def _flash_backward(call: Call) -> Iterator[Launch]:
    gradient, query, key, _, out = call.tensors[:5]
    yield from as_contiguous(_transposed(gradient))
    yield from as_contiguous(_transposed(out))
    yield from (Launch("attention") for _ in range(3))  # sums of the gradient; the loop; the type of dq
    if key.shape[1] != query.shape[1]:
        yield Launch("reduction")
        yield Launch("reduction")


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(call: Call) -> Iterator[Launch]:
    gradient = call.tensors[0]
    if not gradient.elements:
        return
    if "_log_" not in call.name:
        yield Launch("elementwise")
    else:
        yield from as_contiguous(gradient)
    yield Launch("softmax")


@rule("_softmax", "_log_softmax")
def _softmax(call: Call) -> Iterator[Launch]:
    if call.tensors[0].elements:
        yield from as_contiguous(call.tensors[0])
        yield Launch("softmax")


@rule("max_pool2d_with_indices_backward")
def _max_pool_backward(call: Call) -> Iterator[Launch]:
    yield from as_contiguous(call.tensors[0])
    yield from map(Launch, ("fill", "resample"))


@rule("native_group_norm_backward")
def _group_norm_backward(call: Call) -> Iterator[Launch]:
    yield from as_contiguous(call.tensors[0])
    families = ("normalization", "elementwise", "normalization", "elementwise", "normalization")
    yield from map(Launch, families)


def _vectorized(info: TensorInfo, size: int) -> bool:
    return info.dtype in (*_HALF, torch.float32) and size % 4 == 0


@rule("native_layer_norm", "_fused_rms_norm")
def _layer_norm(call: Call) -> Iterator[Launch]:
    info = call.tensors[0]
    if not info.elements:
        return
    yield from as_contiguous(info)
    one = _vectorized(info, prod(argument(call, 1)))
    yield from (Launch("normalization") for _ in range(1 if one else 2))


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(call: Call) -> Iterator[Launch]:
    gradient, info = call.tensors[:2]
    needed = argument(call, len(call.arguments) - 1)
    if not gradient.elements:
        yield from (Launch("fill") for each in needed[1:] if each)
        return
    yield from as_contiguous(gradient)
    yield from as_contiguous(info)
    if needed[0]:
        yield Launch("normalization")
    if any(needed[1:]):
        yield Launch("normalization")


@rule("native_batch_norm", "_native_batch_norm_legit")
def _batch_norm(call: Call) -> Iterator[Launch]:
    info = call.tensors[0]
    if not info.elements:
        return
    training = next(each for each in call.arguments if isinstance(each, bool))
    if not training:
        yield Launch("memcpy", info.shape[1] * 4)
        yield Launch("elementwise")
    else:
        yield Launch("normalization")
        yield Launch("elementwise")  # the running statistics
    yield Launch("normalization")


@rule("native_batch_norm_backward")
def _batch_norm_backward(call: Call) -> Iterator[Launch]:
    yield Launch("normalization")
    if len(call.tensors[1].shape) == 2:
        yield Launch("elementwise")


@rule("cudnn_batch_norm", "cudnn_batch_norm_backward")
def _cudnn_batch_norm(call: Call) -> Iterator[Launch]:
    yield Launch("normalization")


@rule("nll_loss_forward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss2d_backward")
def _nll_loss(call: Call) -> Iterator[Launch]:
    backward = call.name.endswith("backward")
    reduced = argument(call, 4 if backward else 3) != 0
    flat = "2d" not in call.name
    if backward or not reduced or not flat:
        yield Launch("fill")
    if backward and not reduced:
        yield from as_contiguous(call.tensors[0])
    if not backward and reduced and not flat:
        yield from map(Launch, ("fill", "reduction"))
    yield Launch("reduction")


@rule("embedding_dense_backward")
def _embedding_backward(call: Call) -> Iterator[Launch]:
    gradient, indices = call.tensors[:2]
    yield from as_contiguous(gradient)
    if indices.elements <= _FEW_INDICES:
        yield Launch("fill")
        yield Launch("index")
        return
    passes = -(-argument(call, 2).bit_length() // 8)
    families = ("elementwise", "memset", "memset", "sort", "sort", *("memset", "sort") * passes)
    rest = ("fill", "sort", "sort", "index", "sort", "sort", "index", "index", "index", "index")
    yield from map(Launch, families + rest)


_FEW_INDICES = 3072  # are not sorted


@rule("convolution", "_convolution", "convolution_overrideable")
def _convolution(call: Call) -> Iterator[Launch]:
    """One kernel of cuDNN, and one that adds the bias."""
    yield Launch("convolution")
    if tensor(call, 2) is not None:
        yield Launch("elementwise")


@rule("convolution_backward")
def _convolution_backward(call: Call) -> Iterator[Launch]:
    needed = argument(call, 10)
    yield from (Launch("convolution") for each in needed[:2] if each)
    if needed[2]:
        yield Launch("reduction")
