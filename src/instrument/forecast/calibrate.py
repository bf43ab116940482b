"""Measures operators on the GPU of this machine, for a table of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..explain.metrics.roofline import peak_of
from .content import Measured, content_of
from .gpus import GPUS, Gpu
from .operations import Tensor, operation_of
from .recorded import type_name

_ROWS, _COLUMNS, _SUMS = (512, 2048, 8192), (768, 1024, 4096, 16384), (768, 1024, 4096)
_BATCHES = (
    (16, 512, 512, 64),
    (16, 512, 64, 512),
    (64, 1024, 1024, 64),
    (64, 1024, 64, 1024),
    (64, 256, 256, 256),
)
_WIDTHS = (512, 1024, 2048, 8192)
_POWERS = range(18, 28, 2)  # of the elements of operators that move bytes
_REPEATS = 5
_STRETCH_S = 0.004  # what one of the repeats takes about


class _Probe(NamedTuple):
    """An operator to measure: its name, its inputs and a call of it."""

    name: str
    inputs: Sequence[torch.Tensor]
    call: Callable[[], Any]


def calibrate(seconds: float = 120.0) -> tuple[Gpu, dict[str, Any]]:
    """Measure operators on the GPU for so long at most; return the GPU and the content of its table.

    Raises:
        RuntimeError: there is no GPU.
        ValueError: forecasts do not know this GPU, or the time was too short to measure anything.
    """
    gpu = this_gpu()
    measured = list(_measured(gpu, monotonic() + seconds))
    if not measured:
        raise ValueError(f"nothing was measured in {seconds:g} s")
    source = f"measured by instrument calibrate on {torch.cuda.get_device_name()}, torch {torch.__version__}"
    return gpu, {"source": source, "gpus": {gpu.name: content_of(gpu, measured)}, "borrowed": {}}


def this_gpu() -> Gpu:
    """Return the GPU of this machine, as forecasts know it.

    Raises:
        RuntimeError: there is none.
        ValueError: forecasts do not know it.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU to measure")
    name = torch.cuda.get_device_name()
    peak = peak_of(name)
    same = [gpu for gpu in GPUS.values() if gpu.peak == peak]
    alike = [gpu for gpu in GPUS.values() if peak is not None and gpu.peak.name.split()[0] == peak.name.split()[0]]
    if not alike:
        raise ValueError(f"forecasts know {', '.join(GPUS)}, and not {name}")
    return (same or alike)[0]


def _measured(gpu: Gpu, end: float) -> Iterator[Measured]:
    for probe in _probes(gpu):
        if monotonic() > end:
            return
        result = probe.call()
        results = [each for each in (result if isinstance(result, tuple) else (result,)) if each is not None]
        operation = operation_of(
            probe.name, [_described(each) for each in probe.inputs], [*map(_described, results)]
        )
        if operation is not None:
            yield Measured(operation, _ns(probe.call))


def _ns(call: Callable[[], Any]) -> float:
    """Return how long a call takes on the GPU if many follow each other."""
    count = max(2, min(200, int(_STRETCH_S / max(_seconds(call, 2) / 2, 1e-6))))
    return 1e9 * median(_seconds(call, count) / count for _ in range(_REPEATS))


def _seconds(call: Callable[[], Any], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _described(tensor: torch.Tensor) -> Tensor:
    return Tensor(tuple(tensor.shape), tensor.stride(), type_name(tensor.dtype))


def _made(*shape: int, type: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.rand(shape, dtype=type, device="cuda", requires_grad=grad)


def _probes(gpu: Gpu) -> Iterator[_Probe]:
    """Yield what to measure, what matters most first."""
    has_bf16 = "bf16" in gpu.peak.flops_per_s
    for kind in (torch.float32, torch.bfloat16 if has_bf16 else torch.float16):
        yield from _matmuls(kind)
    for power in _POWERS:
        yield from _moving(1 << power)
        for width in _WIDTHS:
            yield from _by_row((1 << power) // width, width)
    for length in (512, 1024, 2048) if has_bf16 else ():  # flash attention needs a GPU of that time
        yield from _attention(16, length)


def _matmuls(kind: torch.dtype) -> Iterator[_Probe]:
    for rows, columns, sums in product(_ROWS, _COLUMNS, _SUMS):
        left, weight, bias = (
            _made(rows, sums, type=kind),
            _made(columns, sums, type=kind),
            _made(columns, type=kind),
        )
        right = _made(sums, columns, type=kind)
        linear = [bias, left, weight.t()]
        yield _Probe("addmm", linear, partial(functional.linear, left, weight, bias))
        yield _Probe("mm", [left, right], partial(torch.mm, left, right))
    for batch, rows, columns, sums in _BATCHES:
        one, other = _made(batch, rows, sums, type=kind), _made(batch, sums, columns, type=kind)
        yield _Probe("bmm", [one, other], partial(torch.bmm, one, other))


def _moving(elements: int) -> Iterator[_Probe]:
    rows = elements // 1024
    one, other, row = _made(rows, 1024), _made(rows, 1024), _made(1024)
    yield _Probe("add", [one, other], lambda: one + other)
    yield _Probe("mul", [one], lambda: one * 2.0)
    yield _Probe("add", [one, row], lambda: one + row)
    yield _Probe("clone", [one.t()], lambda: one.t().contiguous())
    yield _Probe("sum", [one], lambda: one.sum(0))
    yield _Probe("native_dropout", [one], lambda: torch.native_dropout(one, 0.1, True))
    numbers = torch.randint(0, rows, (rows,), device="cuda")
    yield _Probe("embedding", [one, numbers], lambda: functional.embedding(numbers, one))


def _by_row(rows: int, width: int) -> Iterator[_Probe]:
    of, gradient = _made(rows, width, grad=True), _made(rows, width)
    weight = _made(width, grad=True)
    bias = _made(width, grad=True)
    plain = of.detach()
    yield _Probe("_softmax", [plain], lambda: plain.softmax(-1))
    score = of.softmax(-1)
    yield _Probe("_softmax_backward_data", [gradient, plain], _gradient(score, [of], gradient))
    yield _Probe("native_layer_norm", [plain], lambda: functional.layer_norm(plain, (width,), weight.detach()))
    normal = functional.layer_norm(of, (width,), weight, bias)
    yield _Probe("native_layer_norm_backward", [gradient, plain], _gradient(normal, [of, weight, bias], gradient))


def _attention(heads: int, length: int) -> Iterator[_Probe]:
    query = _made(4, heads, length, 64, type=torch.bfloat16, grad=True)
    plain, gradient = query.detach(), _made(4, heads, length, 64, type=torch.bfloat16)
    name = "_scaled_dot_product_flash_attention"
    yield _Probe(name, [plain] * 3, lambda: functional.scaled_dot_product_attention(plain, plain, plain))
    mixed = functional.scaled_dot_product_attention(query, query.detach(), query.detach())
    yield _Probe(f"{name}_backward", [plain] * 4, _gradient(mixed, [query], gradient))


def _gradient(result: torch.Tensor, inputs: list[torch.Tensor], gradient: torch.Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)
