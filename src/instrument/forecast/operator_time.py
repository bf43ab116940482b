"""How long an operator takes on a GPU: measured, interpolated, or the bound of the roofline."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .gpus import Gpu
from .ideal import best_tile_ns, bound_ns, ideal_ns
from .operations import Operation
from .table import MatmulKernels, Measurements, Table

How = Literal["measured", "interpolated", "bound"]
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

    A family that was measured on other GPUs alone has their mean share of the bound, with the error of a GPU left
    out of that mean. A GPU that was not measured at all has the efficiency of the one with the same chip, if any.
    """
    known = gpu.name if gpu.name in table.gpus else gpu.like
    if known is None or known not in table.gpus:
        return OperatorTime(bound_ns(operation, gpu), None, "bound")
    kernels = table.gpus[known].kernels.get(operation.type)
    if operation.family == "matmul" and kernels is not None:
        return _matmul(operation, gpu, known, table, kernels)
    measured = table.measurements(operation, known)
    if measured is not None:
        return _from(measured, operation, gpu)
    if operation.family in table.borrowed:
        share, error = table.borrowed[operation.family]
        return OperatorTime(ideal_ns(operation, gpu) / share, error, "interpolated")
    return OperatorTime(bound_ns(operation, gpu), None, "bound")


def _from(measured: Measurements, operation: Operation, gpu: Gpu) -> OperatorTime:
    ns, distance = measured.ns(operation, gpu)
    error = measured.error * (1 + max(0.0, distance - _FAR) / _FAR)
    return OperatorTime(ns * measured.scale, error, "interpolated" if distance else "measured")


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
