"""What GPUs can do at best: operations and bytes per second, by the vendors' data sheets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Peak:
    """The peaks of one GPU, as the program sees it: of an MI250, one of its two dies.

    Attributes:
        name: the product.
        architecture: its generation, as in the names of kernels: "sm90", "gfx942".
        memory_bytes_per_s: bytes per second between the GPU and its memory.
        flops_per_s: operations per second by type. "fp32" and "fp64" are the ordinary units; "tf32", "fp16",
            "bf16", "fp8" and "int8" the matrix units without sparsity, adding up in 32 bits (consumer cards run at
            half of the advertised rate then).
        source: where the figures come from.
    """

    name: str
    architecture: str
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float] = field(hash=False)
    source: str

    @property
    def generation(self) -> int:
        """The compute capability times 10, such as 90; 0 for GPUs that are not NVIDIA's."""
        return int(self.architecture[2:]) if self.architecture.startswith("sm") else 0

    def ridge(self, kind: str) -> float | None:
        """Return the operations per byte from which this type is bound by compute; None if it is unknown."""
        flops = self.flops_per_s.get(kind)
        return flops / self.memory_bytes_per_s if flops else None


def _peak(name: str, architecture: str, gigabytes: float, source: str, **teraflops: float) -> Peak:
    flops = {kind: rate * _TERA for kind, rate in teraflops.items()}
    if "fp16" in flops and architecture not in ("sm70", "sm75"):
        flops.setdefault("bf16", flops["fp16"])
    return Peak(name, architecture, gigabytes * _GIGA, flops, source)


_N, _A = "NVIDIA {} data sheet", "AMD Instinct {} data sheet"
_HOPPER = {"fp64": 34, "fp32": 67, "tf32": 494.7, "fp16": 989.4, "fp8": 1978.9, "int8": 1978.9}
_CDNA3 = {"fp64": 81.7, "fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "fp8": 2614.9, "int8": 2614.9}
_AMPERE = {"fp64": 9.7, "fp32": 19.5, "tf32": 156, "fp16": 312, "int8": 624}
_VOLTA = {"fp64": 7.8, "fp32": 15.7, "fp16": 125}

# The first pattern that is found in the name of a device decides.
_PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"GB200", _peak("GB200", "sm100", 8000, _N.format("GB200 NVL72"), fp32=80, tf32=1250, fp16=2500, fp8=5000)),
    (r"\bB200", _peak("B200", "sm100", 8000, _N.format("DGX B200"), fp32=75, tf32=1100, fp16=2250, fp8=4500)),
    (r"\bB100", _peak("B100", "sm100", 8000, _N.format("HGX B100"), fp32=60, tf32=900, fp16=1750, fp8=3500)),
    (r"GH200.*144", _peak("GH200 144GB", "sm90", 4900, _N.format("GH200"), **_HOPPER)),
    (r"GH200", _peak("GH200", "sm90", 4000, _N.format("GH200"), **_HOPPER)),
    (r"\bH200", _peak("H200", "sm90", 4800, _N.format("H200"), **_HOPPER)),
    (r"\bH20\b", _peak("H20", "sm90", 4000, _N.format("H20"), fp32=44, tf32=74, fp16=148, fp8=296, int8=296)),
    (
        r"H100 PCIe",
        _peak("H100 PCIe", "sm90", 2000, _N.format("H100"), fp64=26, fp32=51, tf32=378, fp16=756, fp8=1513),
    ),
    (
        r"H100 NVL",
        _peak(
            "H100 NVL", "sm90", 3900, _N.format("H100 NVL"), fp64=30, fp32=60, tf32=417.5, fp16=835.5, fp8=1670.5
        ),
    ),
    (r"\bH100", _peak("H100 SXM", "sm90", 3350, _N.format("H100"), **_HOPPER)),
    (r"\bH800", _peak("H800 SXM", "sm90", 3350, _N.format("H100"), **{**_HOPPER, "fp64": 1})),
    (r"A100.*PCIE-80GB|A100 80GB PCIe", _peak("A100 80GB PCIe", "sm80", 1935, _N.format("A100"), **_AMPERE)),
    (r"A100.*80GB", _peak("A100 80GB SXM", "sm80", 2039, _N.format("A100"), **_AMPERE)),
    (r"\bA100|A800", _peak("A100 40GB", "sm80", 1555, _N.format("A100"), **_AMPERE)),
    (r"\bA30\b", _peak("A30", "sm80", 933, _N.format("A30"), fp64=5.2, fp32=10.3, tf32=82, fp16=165, int8=330)),
    (r"\bA10\b", _peak("A10", "sm86", 600, _N.format("A10"), fp32=31.2, tf32=62.5, fp16=125, int8=250)),
    (r"\bA40\b", _peak("A40", "sm86", 696, _N.format("A40"), fp32=37.4, tf32=74.8, fp16=149.7, int8=299.3)),
    (r"RTX A6000", _peak("RTX A6000", "sm86", 768, _N.format("RTX A6000"), fp32=38.7, tf32=77.4, fp16=154.8)),
    (
        r"RTX 6000 Ada",
        _peak("RTX 6000 Ada", "sm89", 960, _N.format("RTX 6000 Ada"), fp32=91.1, tf32=182.1, fp16=364.2),
    ),
    (r"\bL40S", _peak("L40S", "sm89", 864, _N.format("L40S"), fp32=91.6, tf32=183, fp16=362, fp8=733, int8=733)),
    (r"\bL4\b", _peak("L4", "sm89", 300, _N.format("L4"), fp32=30.3, tf32=60, fp16=121, fp8=242, int8=242)),
    (
        r"RTX 5090",
        _peak("RTX 5090", "sm120", 1792, "NVIDIA Blackwell whitepaper", fp32=104.8, tf32=104.8, fp16=209.5),
    ),
    (r"RTX 4090", _peak("RTX 4090", "sm89", 1008, "NVIDIA Ada whitepaper", fp32=82.6, tf32=82.6, fp16=165.2)),
    (
        r"RTX 3090(?! Ti)",
        _peak("RTX 3090", "sm86", 936, "NVIDIA Ampere whitepaper", fp32=35.6, tf32=35.6, fp16=71),
    ),
    (r"RTX 2080 Ti", _peak("RTX 2080 Ti", "sm75", 616, "NVIDIA Turing whitepaper", fp32=13.4, fp16=53.8)),
    (r"\bT4\b", _peak("T4", "sm75", 320, _N.format("T4"), fp32=8.1, fp16=65, int8=130)),
    (r"V100S", _peak("V100S PCIe", "sm70", 1134, _N.format("V100S"), fp64=8.2, fp32=16.4, fp16=130)),
    (r"V100-PCIE", _peak("V100 PCIe", "sm70", 900, _N.format("V100"), fp64=7, fp32=14, fp16=112)),
    (r"V100", _peak("V100 SXM2", "sm70", 900, _N.format("V100"), **_VOLTA)),
    (
        r"MI355X",
        _peak("MI355X", "gfx950", 8000, _A.format("MI355X"), fp64=78.6, fp32=157.3, fp16=2516.6, fp8=5033.2),
    ),
    (
        r"MI350X",
        _peak("MI350X", "gfx950", 8000, _A.format("MI350X"), fp64=72.1, fp32=144.2, fp16=2306.9, fp8=4613.7),
    ),
    (r"MI325X", _peak("MI325X", "gfx942", 6000, _A.format("MI325X"), **_CDNA3)),
    (r"MI300X", _peak("MI300X", "gfx942", 5300, _A.format("MI300X"), **_CDNA3)),
    (
        r"MI300A",
        _peak(
            "MI300A",
            "gfx942",
            5300,
            _A.format("MI300A"),
            fp64=61.3,
            fp32=122.6,
            tf32=490.3,
            fp16=980.6,
            fp8=1961.2,
        ),
    ),
    (r"MI250X", _peak("MI250X die", "gfx90a", 1638, _A.format("MI250X"), fp64=23.9, fp32=23.9, fp16=191.5)),
    (r"MI250", _peak("MI250 die", "gfx90a", 1638, _A.format("MI250"), fp64=22.6, fp32=22.6, fp16=181)),
    (r"MI210", _peak("MI210", "gfx90a", 1638, _A.format("MI210"), fp64=22.6, fp32=22.6, fp16=181, int8=181)),
)

PRODUCTS: tuple[Peak, ...] = tuple(peak for _, peak in _PEAKS)
"""All GPUs whose peaks are known."""

_COMPILED = tuple((re.compile(pattern, re.IGNORECASE), peak) for pattern, peak in _PEAKS)


@lru_cache(64)
def peak_of(device_name: str) -> Peak | None:
    """Return the peaks of the GPU with this name, as CUDA or HIP reports it; None if they are not known."""
    return next((peak for pattern, peak in _COMPILED if pattern.search(device_name)), None)
