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


def _peak(
    pattern: str, name: str, architecture: str, gigabytes: float, source: str, **teraflops: float
) -> tuple[re.Pattern[str], Peak]:
    """Return a pattern for names of a device, and its peaks; ``source`` is a whitepaper or has a data sheet."""
    maker = "NVIDIA" if architecture.startswith("sm") else "AMD Instinct"
    sheet = "" if source.endswith("whitepaper") else " data sheet"
    flops = {kind: rate * _TERA for kind, rate in teraflops.items()}
    if "fp16" in flops and architecture not in ("sm70", "sm75"):
        flops.setdefault("bf16", flops["fp16"])
    peak = Peak(name, architecture, gigabytes * _GIGA, flops, f"{maker} {source}{sheet}")
    return re.compile(pattern, re.IGNORECASE), peak


_HOPPER = {"fp64": 34, "fp32": 67, "tf32": 494.7, "fp16": 989.4, "fp8": 1978.9, "int8": 1978.9}
_CDNA3 = {"fp64": 81.7, "fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "fp8": 2614.9, "int8": 2614.9}
_AMPERE = {"fp64": 9.7, "fp32": 19.5, "tf32": 156, "fp16": 312, "int8": 624}
_VOLTA = {"fp64": 7.8, "fp32": 15.7, "fp16": 125}

# The first pattern that is found in the name of a device decides.
_PEAKS = (
    _peak(r"GB200", "GB200", "sm100", 8000, "GB200 NVL72", fp32=80, tf32=1250, fp16=2500, fp8=5000),
    _peak(r"\bB200", "B200", "sm100", 8000, "DGX B200", fp32=75, tf32=1100, fp16=2250, fp8=4500),
    _peak(r"\bB100", "B100", "sm100", 8000, "HGX B100", fp32=60, tf32=900, fp16=1750, fp8=3500),
    _peak(r"GH200.*144", "GH200 144GB", "sm90", 4900, "GH200", **_HOPPER),
    _peak(r"GH200", "GH200", "sm90", 4000, "GH200", **_HOPPER),
    _peak(r"\bH200", "H200", "sm90", 4800, "H200", **_HOPPER),
    _peak(r"\bH20\b", "H20", "sm90", 4000, "H20", fp32=44, tf32=74, fp16=148, fp8=296, int8=296),
    _peak(r"H100 PCIe", "H100 PCIe", "sm90", 2000, "H100", fp64=26, fp32=51, tf32=378, fp16=756, fp8=1513),
    _peak(r"H100 NVL", "H100 NVL", "sm90", 3900, "H100 NVL", fp64=30, fp32=60, tf32=417.5, fp16=835.5, fp8=1670.5),
    _peak(r"\bH100", "H100 SXM", "sm90", 3350, "H100", **_HOPPER),
    _peak(r"\bH800", "H800 SXM", "sm90", 3350, "H100", **{**_HOPPER, "fp64": 1}),
    _peak(r"A100.*PCIE-80GB|A100 80GB PCIe", "A100 80GB PCIe", "sm80", 1935, "A100", **_AMPERE),
    _peak(r"A100.*80GB", "A100 80GB SXM", "sm80", 2039, "A100", **_AMPERE),
    _peak(r"\bA100|A800", "A100 40GB", "sm80", 1555, "A100", **_AMPERE),
    _peak(r"\bA30\b", "A30", "sm80", 933, "A30", fp64=5.2, fp32=10.3, tf32=82, fp16=165, int8=330),
    _peak(r"\bA10\b", "A10", "sm86", 600, "A10", fp32=31.2, tf32=62.5, fp16=125, int8=250),
    _peak(r"\bA40\b", "A40", "sm86", 696, "A40", fp32=37.4, tf32=74.8, fp16=149.7, int8=299.3),
    _peak(r"RTX A6000", "RTX A6000", "sm86", 768, "RTX A6000", fp32=38.7, tf32=77.4, fp16=154.8),
    _peak(r"RTX 6000 Ada", "RTX 6000 Ada", "sm89", 960, "RTX 6000 Ada", fp32=91.1, tf32=182.1, fp16=364.2),
    _peak(r"\bL40S", "L40S", "sm89", 864, "L40S", fp32=91.6, tf32=183, fp16=362, fp8=733, int8=733),
    _peak(r"\bL4\b", "L4", "sm89", 300, "L4", fp32=30.3, tf32=60, fp16=121, fp8=242, int8=242),
    _peak(r"RTX 5090", "RTX 5090", "sm120", 1792, "Blackwell whitepaper", fp32=104.8, tf32=104.8, fp16=209.5),
    _peak(r"RTX 4090", "RTX 4090", "sm89", 1008, "Ada whitepaper", fp32=82.6, tf32=82.6, fp16=165.2),
    _peak(r"RTX 3090(?! Ti)", "RTX 3090", "sm86", 936, "Ampere whitepaper", fp32=35.6, tf32=35.6, fp16=71),
    _peak(r"RTX 2080 Ti", "RTX 2080 Ti", "sm75", 616, "Turing whitepaper", fp32=13.4, fp16=53.8),
    _peak(r"\bT4\b", "T4", "sm75", 320, "T4", fp32=8.1, fp16=65, int8=130),
    _peak(r"V100S", "V100S PCIe", "sm70", 1134, "V100S", fp64=8.2, fp32=16.4, fp16=130),
    _peak(r"V100-PCIE", "V100 PCIe", "sm70", 900, "V100", fp64=7, fp32=14, fp16=112),
    _peak(r"V100", "V100 SXM2", "sm70", 900, "V100", **_VOLTA),
    _peak(r"MI355X", "MI355X", "gfx950", 8000, "MI355X", fp64=78.6, fp32=157.3, fp16=2516.6, fp8=5033.2),
    _peak(r"MI350X", "MI350X", "gfx950", 8000, "MI350X", fp64=72.1, fp32=144.2, fp16=2306.9, fp8=4613.7),
    _peak(r"MI325X", "MI325X", "gfx942", 6000, "MI325X", **_CDNA3),
    _peak(r"MI300X", "MI300X", "gfx942", 5300, "MI300X", **_CDNA3),
    _peak(
        r"MI300A", "MI300A", "gfx942", 5300, "MI300A", fp64=61.3, fp32=122.6, tf32=490.3, fp16=980.6, fp8=1961.2
    ),
    _peak(r"MI250X", "MI250X die", "gfx90a", 1638, "MI250X", fp64=23.9, fp32=23.9, fp16=191.5),
    _peak(r"MI250", "MI250 die", "gfx90a", 1638, "MI250", fp64=22.6, fp32=22.6, fp16=181),
    _peak(r"MI210", "MI210", "gfx90a", 1638, "MI210", fp64=22.6, fp32=22.6, fp16=181, int8=181),
)

PRODUCTS: tuple[Peak, ...] = tuple(peak for _, peak in _PEAKS)
"""All GPUs whose peaks are known."""


@lru_cache(64)
def peak_of(device_name: str) -> Peak | None:
    """Return the peaks of the GPU with this name, as CUDA or HIP reports it; None if they are not known."""
    return next((peak for pattern, peak in _PEAKS if pattern.search(device_name)), None)
