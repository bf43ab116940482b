"""Makes memory snapshots as torch pickles them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FRAMES = [
    {"name": "forward", "filename": "/home/me/model.py", "line": 12},
    {"name": "train", "filename": "/home/me/train.py", "line": 40},
]


def event(action: str, address: int, size: int, **more: Any) -> dict[str, Any]:
    """Return an event of the allocator."""
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": FRAMES, **more}


def segment(blocks: Sequence[dict[str, Any]], device: int = 0) -> dict[str, Any]:
    """Return a segment with these blocks."""
    total = sum(block["size"] for block in blocks)
    return {
        "device": device,
        "address": 0,
        "total_size": total,
        "stream": 0,
        "segment_type": "large",
        "blocks": list(blocks),
    }


def block(address: int, size: int, state: str = "active_allocated") -> dict[str, Any]:
    """Return a block of a segment."""
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": FRAMES[:1]}


def write(
    path: Path, traces: Sequence[Sequence[dict[str, Any]]], segments: Sequence[Any] = (), **more: Any
) -> Path:
    """Write a snapshot with the events of each device."""
    data = {"segments": list(segments), "device_traces": [list(each) for each in traces], **more}
    path.write_bytes(pickle.dumps(data))
    return path
