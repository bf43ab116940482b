"""The time of an operator: measured, interpolated, or a bound."""

from __future__ import annotations

import pytest

from instrument.forecast.gpus import GPUS, gpu_named
from instrument.forecast.ideal import bound_ns, ideal_ns
from instrument.forecast.operations import Operation, Tensor, matmul, operation_of
from instrument.forecast.operator_time import operator_time
from instrument.forecast.table import Table, packaged_table, table_of

from .tables import BYTES, EFFICIENCY, MATMUL_SIZES, element_wise, measured, table

H100 = GPUS["h100"]
SQUARE = (4096, 4096, 4096)


def ns(operation: Operation, gpu: str = "h100", of: Table | None = None) -> float:
    return operator_time(operation, GPUS[gpu], of or packaged_table()).ns


def test_measured() -> None:
    """What was measured is given back, with the error of its family."""
    operation = matmul("linear", "fp32", *MATMUL_SIZES[4])
    found = operator_time(operation, H100, table("h100"))
    assert found.how == "measured"
    assert found.ns == pytest.approx(measured("h100", operation), rel=0.01)
    assert found.error == 0.05


@pytest.mark.parametrize("rows", [700, 1536, 4096, 16384])
def test_interpolated_between_sizes_and_beyond(rows: int) -> None:
    """Operators between and beyond the measured sizes are as efficient as those."""
    operation = matmul("linear", "fp32", 1, rows, 1024, 1024)
    found = operator_time(operation, H100, table("h100"))
    assert found.how == "interpolated"
    assert found.ns == pytest.approx(ideal_ns(operation, H100, (128, 128)) / EFFICIENCY, rel=0.02)


def test_the_error_grows_beyond_the_measured_sizes() -> None:
    """Far from all measurements, the forecast does not look as exact as near them."""
    errors = [
        operator_time(element_wise(moved), H100, table("h100")).error for moved in (BYTES[-1], BYTES[-1] << 12)
    ]
    assert errors[0] == 0.03
    assert errors[1] is not None
    assert errors[1] > 0.05


def test_waves() -> None:
    """One block more than the multiprocessors hold takes another wave; fewer in it cost the same."""
    one = matmul("linear", "fp32", 1, 128 * 132, 128, 4096)
    two = one._replace(sizes=(1, 128 * 133, 128, 4096))
    full = one._replace(sizes=(1, 128 * 264, 128, 4096))
    times = [ns(each, of=table("h100")) for each in (one, two, full)]
    assert times[1] > 1.9 * times[0]
    assert times[2] == pytest.approx(times[1], rel=0.05)


@pytest.mark.parametrize("gpu", ["b200", "mi300x"])
def test_nothing_measured_is_a_bound(gpu: str) -> None:
    """A GPU without measurements has its roofline, and no error."""
    operation = matmul("matmul", "fp32", 1, *SQUARE)
    found = operator_time(operation, GPUS[gpu], packaged_table())
    assert found == (bound_ns(operation, GPUS[gpu]), None, "bound")


def test_a_family_that_nobody_measured_is_a_bound() -> None:
    """So it is on a GPU with other measurements: a sort, or an operator of the program's own."""
    values = Tensor((1 << 20,), (1,), "fp32")
    for name in ("aten::sort", "aten::cumsum", "aten::native_batch_norm", "mine::operator"):
        operation = operation_of(name, [values], [values])
        assert operation is not None
        assert operator_time(operation, H100, packaged_table()).how == "bound"


@pytest.mark.parametrize(("gpu", "kind"), [("v100", "bf16"), ("t4", "bf16"), ("l4", "fp64")])
def test_a_type_without_units_of_its_own_is_not_free(gpu: str, kind: str) -> None:
    """It is at best as fast as FP32."""
    operation = matmul("matmul", kind, 1, *SQUARE)
    in_fp32 = bound_ns(operation._replace(type="fp32"), GPUS[gpu])
    assert operator_time(operation, GPUS[gpu], packaged_table()).ns >= in_fp32


def test_matmuls_in_fp8() -> None:
    """They take no less than their operations at the peak."""
    one = Tensor((8192, 8192), (8192, 1), "fp8")
    scale = Tensor((), (), "fp32")
    operation = operation_of("aten::_scaled_mm", [one, one, scale, scale], [Tensor((8192, 8192), None, "bf16")])
    assert operation is not None
    assert (operation.family, operation.flops) == ("matmul", 2 * 8192**3)
    assert operator_time(operation, H100, packaged_table()) == (bound_ns(operation, H100), None, "bound")


def test_a_family_measured_on_other_gpus() -> None:
    """It is as efficient as there, with the error of that."""
    both = table("h100", "a100")
    own = both.gpus["h100"].families
    assert isinstance(own, dict)
    del own["element-wise", "any"]
    operation = element_wise(BYTES[2])
    found = operator_time(operation, H100, both)
    assert (found.how, found.error) == ("interpolated", 0.11)
    assert found.ns == pytest.approx(measured("h100", operation), rel=0.02)


def test_the_same_chip_with_another_memory() -> None:
    """The A100 of 40 GB computes like that of 80 GB, and moves bytes as much slower as its memory is."""
    big, small = GPUS["a100"].peak.memory_bytes_per_s, GPUS["a100-40"].peak.memory_bytes_per_s
    computing, moving = matmul("linear", "fp32", 1, *SQUARE), element_wise(1 << 30)
    assert ns(computing, "a100-40") == pytest.approx(ns(computing, "a100"), rel=0.02)
    assert ns(moving, "a100-40") / ns(moving, "a100") == pytest.approx(big / small, rel=0.02)


def test_the_same_chip_is_less_certain() -> None:
    """What was measured on one is interpolated on the other, with twice the error."""
    operation = element_wise(BYTES[2])
    found = operator_time(operation, GPUS["a100-40"], table("a100"))
    assert (found.how, found.error) == ("interpolated", 0.06)


def test_misaligned_where_no_16_bit_type_was_measured() -> None:
    """Then the matmul is a bound like any other."""
    assert operator_time(matmul("matmul", "bf16", 1, 64, 63, 65), GPUS["l4"], packaged_table()).how == "bound"


def test_larger_operators_take_longer() -> None:
    """Times grow with each of the sizes, in the table that ships."""
    for gpu in packaged_table().gpus:
        for place in range(3):
            sizes = [256, 512, 1024]
            times = []
            for size in (512, 2048, 8192, 32768):
                sizes[place] = size
                times.append(ns(matmul("matmul", "fp32", 1, *sizes), gpu))
            assert times == sorted(times), (gpu, place)


def test_a_matmul_is_never_faster_than_the_data_sheet() -> None:
    """The table that ships does not beat the peaks by more than a clock above that of the data sheet."""
    for gpu in packaged_table().gpus:
        for size in (512, 2048, 8192, 16384):
            operation = matmul("matmul", "fp32", 1, size, size, size)
            assert ns(operation, gpu) > 0.9 * bound_ns(operation, GPUS[gpu]), (gpu, size)


def test_misaligned_matmuls_of_16_bits() -> None:
    """They lie between aligned ones and FP32; two elements at once are better than one."""
    aligned, two, one = (ns(matmul("matmul", "bf16", 1, 4096, columns, 4096)) for columns in (4096, 4098, 4097))
    assert aligned < two < one < ns(matmul("matmul", "fp32", 1, 4096, 4097, 4096))


def test_16_bits_are_faster_than_32() -> None:
    """FP16 runs at the rate of BF16, far above FP32."""
    kinds = {kind: ns(matmul("matmul", kind, 1, *SQUARE)) for kind in ("fp32", "fp16", "bf16")}
    assert kinds["fp16"] == kinds["bf16"] < kinds["fp32"] / 5


def test_unknown_gpu() -> None:
    """The error says what there is."""
    with pytest.raises(ValueError, match=r"must be one of h100, h200, .*: 'p100'"):
        gpu_named("p100")


def test_types_that_a_gpu_has_no_units_for_are_not_like_others() -> None:
    """On a T4, BF16 runs on the ordinary units and FP16 on tensor cores."""
    measured_half = {
        "family": "matmul", "type": "fp16", "error": 0.05, "sizes": [[1, *SQUARE]], "ns": [5_000_000],
        "tiles": [[0, 0]],
    }  # fmt: skip
    content = {"families": [measured_half], "kernels": {}, "steps": None}
    of = table_of({"source": "", "gpus": {"t4": content}, "borrowed": {}})
    half = matmul("matmul", "fp16", 1, *SQUARE)
    assert operator_time(half, GPUS["t4"], of).how == "measured"
    assert operator_time(half._replace(type="bf16"), GPUS["t4"], of).how == "bound"
