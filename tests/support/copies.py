"""Copies between CPU and GPU, and whether the CPU waits for each, on the simulated GPU and in a dry run."""

from __future__ import annotations

from typing import Any

import torch

LARGE = 100_000  # elements; CUDA takes 64 KiB from pageable memory at once

WAITING = {
    "large": 'h.to("cuda", non_blocking=True)',
    "large by cuda": "h.cuda(non_blocking=True)",
    "a byte more than 64 KiB": 'torch.ones(65537, dtype=torch.uint8).to("cuda", non_blocking=True)',
    "converted from more": 'torch.ones(9000, dtype=torch.int64).to("cuda", torch.half, non_blocking=True)',
    "into another": "g.copy_(h, non_blocking=True)",
    "expanded": "g.copy_(h[:1].expand(100_000), non_blocking=True)",
    "broadcast": "g.copy_(p[:1], non_blocking=True)",
    "pinned, with gaps": 'p[::2].to("cuda", non_blocking=True)',
    "pinned, with gaps, by cuda": "p[::2].cuda(non_blocking=True)",
    "pinned, a part of each row": 'p2[:, :250].to("cuda", non_blocking=True)',
    "pinned, with gaps, into another": "g[:50_000].copy_(p[::2], non_blocking=True)",
    "pinned, transposed, into another": "g2.copy_(p2.t(), non_blocking=True)",
    "pinned, channels last, to contiguous": "p4.to(memory_format=torch.channels_last).pin_memory()"
    '.to("cuda", memory_format=torch.contiguous_format, non_blocking=True)',
    "back": "h.copy_(g, non_blocking=True)",
    "back, small": "h[:3].copy_(g[:3], non_blocking=True)",
    "back, converted": "h.copy_(half, non_blocking=True)",
    "back to pinned, with gaps": "p[::2].copy_(g[:50_000], non_blocking=True)",
    "blocking, small": 'h[:3].to("cuda")',
    "assigned": "g[:3] = h[:3]",
}
CLEAN = {
    "small": 'h[:3].to("cuda", non_blocking=True)',
    "64 KiB": 'torch.ones(65536, dtype=torch.uint8).to("cuda", non_blocking=True)',
    "converted to more": 'torch.ones(9000, dtype=torch.half).to("cuda", torch.int64, non_blocking=True)',
    "small, into another": "g[:3].copy_(h[:3], non_blocking=True)",
    "small, with gaps": "g[:3].copy_(h[:6:2], non_blocking=True)",
    "pinned": 'p.to("cuda", non_blocking=True)',
    "pinned, converted": 'p.to("cuda", torch.half, non_blocking=True)',
    "pinned, into another": "g.copy_(p, non_blocking=True)",
    "pinned, into another type": "half.copy_(p, non_blocking=True)",
    "pinned, into a row": "g.view(1, -1).copy_(p, non_blocking=True)",
    "pinned, into gaps on the GPU": "g[::2].copy_(p[:50_000], non_blocking=True)",
    "pinned, transposed": 'p2.t().to("cuda", non_blocking=True)',
    "pinned, both transposed": "g2.t().copy_(p2.t(), non_blocking=True)",
    "pinned, permuted": 'p4.permute(0, 2, 3, 1).to("cuda", non_blocking=True)',
    "pinned, channels last": 'p4.to("cuda", memory_format=torch.channels_last, non_blocking=True)',
    "back to pinned": "p.copy_(g, non_blocking=True)",
    "back to pinned from gaps on the GPU": "p[:50_000].copy_(g[::2], non_blocking=True)",
    "back to pinned, expanded": "p.copy_(g[:1], non_blocking=True)",
    "pinned, channels last, kept": "p4.to(memory_format=torch.channels_last).pin_memory()"
    '.to("cuda", memory_format=torch.channels_last, non_blocking=True)',
    "back to pinned, converted": "p.copy_(half, non_blocking=True)",
    "back, pinned by torch": 'g.to("cpu", non_blocking=True)',
}
ALL = [(source, True) for source in WAITING.values()] + [(source, False) for source in CLEAN.values()]
NAMES = [*(f"waits: {name}" for name in WAITING), *(f"clean: {name}" for name in CLEAN)]


def names() -> dict[str, Any]:
    """Return the tensors that the copies name."""
    g = torch.zeros(LARGE, device="cuda")
    return {
        "torch": torch, "g": g, "half": g.half(), "g2": torch.zeros(500, 500, device="cuda"),
        "h": torch.ones(LARGE), "p": torch.ones(LARGE).pin_memory(),
        "p2": torch.ones(500, 500).pin_memory(), "p4": torch.ones(4, 8, 32, 32).pin_memory(),
    }  # fmt: skip
