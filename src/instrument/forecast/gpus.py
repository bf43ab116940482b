"""The GPUs that a forecast can be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from ..explain.metrics.roofline import GpuPeak, peak_of


@dataclass(frozen=True)
class Gpu:
    """A GPU to forecast for.

    Attributes:
        name: what users call it: "a100-40".
        peak: its peaks, and where they come from.
        multiprocessors: its multiprocessors (AMD: compute units), on which blocks of a kernel run side by side.
        memory_bytes: the size of its memory.
        like: the GPU with the same chip and another memory, whose measured efficiency holds for this one too; None
            if there is none.
    """

    name: str
    peak: GpuPeak
    multiprocessors: int
    memory_bytes: int
    like: str | None = None


def _gpu(name: str, device: str, multiprocessors: int, gigabytes: int, like: str | None = None) -> Gpu:
    peak = peak_of(device)
    assert peak is not None, device
    return Gpu(name, peak, multiprocessors, gigabytes << 30, like)


# Multiprocessors and memory: the data sheets and whitepapers that the peaks are from.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", "NVIDIA H100 80GB HBM3", 132, 80),
        _gpu("h200", "NVIDIA H200", 132, 141, like="h100"),
        _gpu("b200", "NVIDIA B200", 148, 180),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", 108, 80),
        _gpu("a100-40", "NVIDIA A100-SXM4-40GB", 108, 40, like="a100"),
        _gpu("l4", "NVIDIA L4", 58, 24),
        _gpu("v100", "Tesla V100-SXM2-32GB", 80, 32),
        _gpu("t4", "Tesla T4", 40, 16),
        _gpu("mi300x", "AMD Instinct MI300X", 304, 192),
    )
}
"""The GPUs by name."""


def gpu_named(name: str) -> Gpu:
    """Return the GPU with this name.

    Raises:
        ValueError: there is none.
    """
    try:
        return GPUS[name.lower().replace("a100-80", "a100")]
    except KeyError:
        raise ValueError(f'"gpu" must be one of {", ".join(GPUS)}: {name!r}') from None
