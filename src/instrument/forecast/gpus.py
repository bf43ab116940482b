"""The GPUs that a forecast can be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from ..explain.metrics.roofline import GpuPeak, peak_of

CONTEXT_BYTES = 512 << 20
"""What a CUDA context with its libraries takes of the memory: 0.3 to 0.6 GB, by GPU and driver."""

_HOPPER = ("h100", "h200", "b200")
_HOPPER_WORKSPACE = (32 << 20) - 8519680  # torch gives cuBLAS more there, for each of two threads


@dataclass(frozen=True)
class Gpu:
    """A GPU to forecast for.

    Attributes:
        name: what users call it: "a100-40".
        peak: its peaks, and where they come from.
        multiprocessors: its multiprocessors (AMD: compute units), on which blocks of a kernel run side by side.
        memory_bytes: the size of its memory, as the driver reports it.
        like: the GPU with the same chip and another memory, whose measured efficiency holds for this one too; None
            if there is none.
    """

    name: str
    peak: GpuPeak
    multiprocessors: int
    memory_bytes: int
    like: str | None = None

    @property
    def torch_bytes(self) -> int:
        """The memory for what a dry run counts, without the context and what cuBLAS takes more than on an A100."""
        return self.memory_bytes - CONTEXT_BYTES - 2 * (_HOPPER_WORKSPACE if self.name in _HOPPER else 0)


def _gpu(name: str, device: str, multiprocessors: int, gibibytes: float, like: str | None = None) -> Gpu:
    peak = peak_of(device)
    assert peak is not None, device
    return Gpu(name, peak, multiprocessors, int(gibibytes * (1 << 30)), like)


# Multiprocessors: the data sheets and whitepapers that the peaks are from. Memory: the least `total_memory` seen
# in torch's profiles and in its errors of too little memory, which is less than the data sheet says.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", "NVIDIA H100 80GB HBM3", 132, 79.11),
        _gpu("h200", "NVIDIA H200", 132, 139.8, like="h100"),
        _gpu("b200", "NVIDIA B200", 148, 178.3),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", 108, 79.14),
        _gpu("a100-40", "NVIDIA A100-SXM4-40GB", 108, 39.39, like="a100"),
        _gpu("l4", "NVIDIA L4", 58, 22.03),
        _gpu("v100", "Tesla V100-SXM2-32GB", 80, 31.73),
        _gpu("t4", "Tesla T4", 40, 14.56),
        _gpu("mi300x", "AMD Instinct MI300X", 304, 191.98),
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
