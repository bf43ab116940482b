"""What operators ask of a GPU: families, layouts and bytes."""

from __future__ import annotations

import pytest
import torch

from instrument.forecast.operations import UNKNOWN_FAMILY, Operation, Tensor, alignment, operation_of


def tensor(*shape: int, type: str = "fp32", stride: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(shape, stride if stride is not None else torch.empty(shape, device="meta").stride(), type)


def operation(name: str, inputs: list[Tensor], result: Tensor) -> Operation:
    found = operation_of(name, inputs, [result])
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("transposed", "bias", "family"),
    [(True, (8,), "linear"), (False, (8,), "matmul"), (True, (4, 8), "matmul")],
)
def test_a_linear_layer_is_told_by_the_layout_of_its_weight(
    transposed: bool, bias: tuple[int, ...], family: str
) -> None:
    """Only a transposed weight with a bias of one row goes to cuBLASLt."""
    weight = tensor(16, 8, stride=(1, 16) if transposed else (8, 1))
    found = operation("aten::addmm", [tensor(*bias), tensor(4, 16), weight], tensor(4, 8))
    assert (found.family, found.sizes, found.flops) == (family, (1, 4, 8, 16), 2 * 4 * 8 * 16)
    assert found.bytes == 4 * (4 * 16 + 16 * 8 + 4 * 8)


def test_a_batch_of_matmuls() -> None:
    """The sizes are batch, rows, columns and the length of the sums."""
    found = operation("aten::bmm", [tensor(3, 4, 5, type="bf16"), tensor(3, 5, 6, type="bf16")], tensor(3, 4, 6))
    assert (found.family, found.type, found.sizes) == ("batched matmul", "bf16", (3, 4, 6, 5))


@pytest.mark.parametrize(
    "name", ["aten::view", "aten::t", "aten::empty_like", "aten::detach", "aten::_unsafe_view"]
)
def test_views_launch_nothing(name: str) -> None:
    """They cost the GPU no time."""
    assert operation_of(name, [tensor(4, 4)], [tensor(4, 4)]) is None


def test_expanded_dimensions_lie_in_memory_once() -> None:
    """A mask that is expanded over the heads is read once."""
    mask = tensor(2, 16, 8, 8, stride=(64, 0, 8, 1))
    assert mask.bytes == 2 * 8 * 8 * 4


@pytest.mark.parametrize(
    ("other", "family"),
    [((8, 16, 64, 64), "element-wise"), ((8, 1, 1, 64), "broadcast"), ((), "element-wise")],
)
def test_broadcasts_find_each_element(other: tuple[int, ...], family: str) -> None:
    """A number is none; a row of numbers is."""
    score = tensor(8, 16, 64, 64)
    assert operation("aten::add", [score, tensor(*other)], score).family == family


def test_kernels_that_find_each_element_take_words() -> None:
    """A strided copy of 16-bit elements counts as one of 32 bits; a plain copy does not."""
    half, strided = tensor(64, 64, type="bf16"), tensor(64, 64, type="bf16", stride=(1, 64))
    assert operation("aten::clone", [strided], half) == Operation("copy", "bf16", 0, 2 * 64 * 64 * 4, (0,))
    assert operation("aten::clone", [half], half) == Operation("element-wise", "bf16", 0, 2 * 64 * 64 * 2, (0,))


def test_a_copy_does_not_read_what_it_writes() -> None:
    """`copy_` moves its source and its target once each."""
    one = tensor(1024)
    assert operation("aten::copy_", [one, one], one).bytes == 2 * 4096


def test_softmax() -> None:
    """The backward pass runs a multiplication before its kernel; rows that are not aligned count as FP32."""
    score = tensor(8, 2048)
    forward = operation("aten::_softmax", [score], score)
    assert (forward.bytes, forward.sizes) == (2 * 8 * 2048 * 4, (2048,))
    assert operation("aten::_softmax_backward_data", [score, score], score).bytes == 3 * forward.bytes
    odd = tensor(8, 2047, type="bf16")
    assert operation("aten::_softmax", [odd], odd).bytes == 2 * 8 * 2047 * 4


def test_attention_has_heads_before_or_after_the_length() -> None:
    """The operator and its kernel's operator have their dimensions in another order."""
    outer = tensor(2, 16, 512, 64, type="bf16")
    inner = tensor(2, 512, 16, 64, type="bf16")
    above = operation("aten::_scaled_dot_product_flash_attention", [outer] * 3, outer)
    assert above == operation("aten::_flash_attention_forward", [inner] * 3, inner)
    assert (above.sizes, above.flops) == ((32, 512, 512, 64), 4 * 32 * 512 * 512 * 64)
    backward = operation("aten::_scaled_dot_product_flash_attention_backward", [outer] * 4, outer)
    assert backward.flops == above.flops * 5 // 2


@pytest.mark.parametrize(
    ("sizes", "kind", "expected"),
    [((1, 8, 64, 64), "bf16", 8), ((1, 8, 30522, 512), "bf16", 2), ((1, 8, 7, 64), "fp16", 1),
     ((1, 8, 7, 7), "fp32", 8)],
)  # fmt: skip
def test_alignment(sizes: tuple[int, ...], kind: str, expected: int) -> None:
    """16-bit elements are loaded 8 at once only if columns and sums are multiples of 8."""
    assert alignment(sizes, kind) == expected


@pytest.mark.parametrize("name", ["mine::add", "mine::mm", "mine::attention.default", "mine::view"])
def test_operators_of_the_program(name: str) -> None:
    """One that has the name of an operator of torch is still not that: it is only known to move its tensors."""
    found = operation(name, [tensor(2, 4, 8, 8), tensor(2, 4, 8, 8)], tensor(2, 4, 8, 8))
    assert found == Operation(UNKNOWN_FAMILY, "fp32", 0, 4 * 3 * 512, (0,))
    assert operation("fsdp::split_with_sizes_copy", [tensor(8)], tensor(8)).family == "copy"
