"""How long an operator takes on a GPU: measured, interpolated, or the bound of the roofline."""

from __future__ import annotations

from math import ceil, exp, log, log2
from statistics import mean
from typing import Literal, NamedTuple

from .gpus import Gpu
from .ideal import best_tile_ns, bound_ns
from .measurements import Measurements
from .operations import FULLY_ALIGNED, MATMULS, Operation, alignment, matmul
from .table import MatmulKernels, Table

How = Literal["measured", "interpolated", "bound"]
OTHER_MEMORY = 2.0
"""By how much errors are larger on a GPU of which only one with the same chip and another memory was measured."""

_ASSUMED = 0.5  # the error of what was assumed and not measured
_FAR = 2.0  # doublings of sizes, beyond which the error grows with the distance


class OperatorTime(NamedTuple):
    """The time of one call on the GPU.

    Attributes:
        ns: the time.
        error: the mean error of operators of this family on this GPU that were left out of the table, as a share;
            None for a bound, which says nothing about it.
        how: "measured" if an operator of the same sizes was; "interpolated" from measured ones; "bound" if there
            are none: the roofline, and no forecast.
    """

    ns: float
    error: float | None
    how: How


def operator_time(operation: Operation, gpu: Gpu, table: Table) -> OperatorTime:
    """Return how long an operation takes on a GPU.

    A family or size that was measured on other GPUs alone is as efficient as there, with the error of a GPU that
    is left out. A GPU that was not measured at all has the efficiency of the one with the same chip, if any, and
    twice its error.
    """
    known = table.name_of(gpu)
    if known is None:
        return OperatorTime(bound_ns(operation, gpu), None, "bound")
    time = _time(operation, gpu, known, table)
    if known == gpu.name or time.error is None:
        return time
    return OperatorTime(time.ns, OTHER_MEMORY * time.error, "interpolated")


def _time(operation: Operation, gpu: Gpu, known: str, table: Table) -> OperatorTime:
    kernels = table.gpus[known].kernels.get(operation.type)
    if operation.family == "matmul" and kernels is not None:
        return _matmul(operation, gpu, known, table, kernels)
    measured = table.measurements(operation, known)
    own = _from(measured, operation, gpu) if measured is not None else None
    if own is not None and own.distance <= _FAR:
        return own.time
    if (
        own is not None
        and operation.family in MATMULS
        and alignment(operation.sizes, operation.type) < FULLY_ALIGNED
    ):
        return _misaligned(operation, gpu, known, table)
    borrowed = _borrowed(operation, gpu, known, table)
    if borrowed is not None and (own is None or borrowed.distance < own.distance):
        return borrowed.time
    return own.time if own is not None else OperatorTime(bound_ns(operation, gpu), None, "bound")


class _Candidate(NamedTuple):
    time: OperatorTime
    distance: float  # of the nearest measurement


def _from(measured: Measurements, operation: Operation, gpu: Gpu) -> _Candidate:
    ns, distance = measured.ns(operation, gpu)
    error = measured.error * (1 + max(0.0, distance - _FAR) / _FAR)
    return _Candidate(OperatorTime(ns, error, "interpolated" if distance else "measured"), distance)


def _misaligned(operation: Operation, gpu: Gpu, known: str, table: Table) -> OperatorTime:
    """Return the time of a matmul of 16-bit types whose rows do not start at multiples of 16 bytes.

    Tensor cores wait for elements that are loaded one by one: the time is between that of the aligned matmul and
    that of the ordinary units in FP32, and each halving of the elements that are loaded at once costs the same
    factor.
    """
    aligned, one_by_one = aligned_and_fp32(operation, gpu, table)
    lost = 1 - log2(alignment(operation.sizes, operation.type)) / log2(FULLY_ALIGNED)
    share = lost * table.gpus[known].misaligned
    return OperatorTime(one_by_one**share * aligned ** (1 - share), _ASSUMED, "interpolated")


def aligned_and_fp32(operation: Operation, gpu: Gpu, table: Table) -> tuple[float, float]:
    """Return the time of a matmul of 16-bit types if its rows were aligned, and if it were of FP32."""
    batch, rows, columns, sums = operation.sizes
    up = [ceil(size / FULLY_ALIGNED) * FULLY_ALIGNED for size in (columns, sums)]
    aligned = operator_time(matmul(operation.family, operation.type, batch, rows, *up), gpu, table).ns
    in_fp32 = operator_time(matmul(operation.family, "fp32", batch, rows, columns, sums), gpu, table).ns
    return aligned, max(aligned, in_fp32)


def _borrowed(operation: Operation, gpu: Gpu, known: str, table: Table) -> _Candidate | None:
    """Return the time if this GPU were as efficient as those that were measured nearest, in the mean."""
    error = table.borrowed.get(operation.family)
    found = [table.measurements(operation, name) for name in table.gpus if name != known]
    times = [measured.ns(operation, gpu) for measured in found if measured is not None]
    if error is None or not times:
        return None
    least = min(distance for _, distance in times)
    near = [log(ns) for ns, distance in times if distance < least + 1]
    return _Candidate(OperatorTime(exp(mean(near)), error, "interpolated"), least)


def _matmul(operation: Operation, gpu: Gpu, known: str, table: Table, kernels: MatmulKernels) -> OperatorTime:
    """Return the time of a matmul without a bias.

    Its kernel was measured as that of a linear layer, for which cuBLASLt now and then chooses a slow one, and the
    best of the measured kernels is a lower limit: the geometric mean of both is taken.
    """
    ns = best_tile_ns(operation, gpu, kernels.tiles)
    error = kernels.error
    linear = table.measurements(operation._replace(family="linear"), known)
    if linear is not None:
        upper, distance = linear.ns(operation, gpu)
        ns = (upper * ns) ** 0.5
        error *= 1 + max(0.0, distance - _FAR) / _FAR
    return OperatorTime(ns * kernels.scale, error, "interpolated")
