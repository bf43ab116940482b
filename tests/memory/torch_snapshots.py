"""Makes the snapshot of a step as each version of torch writes it: from Python, and from C++.

The keys are those of `torch/csrc/cuda/Module.cpp` and `memory_snapshot.cpp` of each version, the opcodes of C++
those of `torch/csrc/jit/serialization/pickler.cpp`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

ADDED: dict[str, tuple[str, ...]] = {
    "torch_npu": (),
    "2.1": (),
    "2.2": ("time_us",),
    "2.3": ("allocator_settings",),
    "2.5": ("external_annotations",),
    "2.8": ("compile_context",),
    "2.9": ("graph_capture_record_stream_reuse",),
    "2.10": ("user_metadata",),
    "2.12": ("pool_id",),
    "2.13": ("max_round_threshold", "max_cached_size"),
    "2.14": ("host_segments", "host_traces", "annotate"),
    "2.15": ("internal_metadata", "forward_frames"),
}
"""The keys, and the action of events, that each version added; the versions between them write the same."""

MIB = 1 << 20
BEGAN_US = 1_748_730_219_595_970
_SEGMENT = 0x7F3A_4000_0000
_TORCH = "/usr/lib/python3.11/site-packages/torch/"


def _frame(file: str, name: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": file, "line": line}


_ROOT = [_frame("/home/me/train.py", "train", 40), _frame("/home/me/train.py", "<module>", 90)]
BATCH = [_frame("/home/me/data.py", "load", 3), *_ROOT]
FORWARD = [
    _frame("/home/me/model.py", "forward", 12),
    _frame(_TORCH + "nn/modules/module.py", "_call_impl", 9),
    *_ROOT,
]
OPTIMIZER = [_frame(_TORCH + "optim/adam.py", "step", 5), *_ROOT]

# What happens on GPU 0, in an expandable segment: action, MiB after its begin, MiB, and the stack.
_STEP: list[tuple[str, int, int, list[dict[str, Any]] | None]] = [
    ("segment_map", 4, 16, BATCH),
    ("alloc", 4, 2, BATCH),
    ("alloc", 6, 2, FORWARD),  # an activation
    ("alloc", 8, 1, FORWARD),
    ("free_requested", 8, 1, FORWARD),
    ("free_completed", 8, 1, FORWARD),
    ("alloc", 8, 4, None),  # the gradient, on a thread of autograd
    ("free_requested", 6, 2, None),
    ("free_completed", 6, 2, None),
    ("alloc", 12, 4, OPTIMIZER),
    ("snapshot", 0, 14, None),  # an earlier one
    ("annotate", 12, 4, OPTIMIZER),
    ("oom", 77, 80 << 10, FORWARD),
]
_USED = [(0, 4, None), (4, 2, BATCH), (6, -2, None), (8, 4, None), (12, 4, OPTIMIZER), (16, -4, None)]


def snapshot_of(version: str) -> dict[str, Any]:
    """Return the snapshot; the peak of GPU 0 is 14 MiB, at its end, and that of GPU 2, of older memory, 1 MiB."""
    names = list(ADDED)
    keys = {key for name in names[: names.index(version) + 1] for key in ADDED[name]}
    traces = [[_event(keys, number, *each) for number, each in enumerate(_STEP)], [], []]
    traces[0] = [each for each in traces[0] if each["action"] != "annotate" or "annotate" in keys]
    found: dict[str, Any] = {
        "segments": [
            _segment(0, _SEGMENT, [_block(_SEGMENT, *each) for each in _USED], expandable=True),
            _segment(2, 2 * _SEGMENT, [_block(2 * _SEGMENT, 0, 1, BATCH)], expandable=False),
        ],
        "device_traces": traces,
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": True,
            "roundup_power2_divisions": {"1": 0, "2": 0},
        }
        | {key: False for key in ("graph_capture_record_stream_reuse", "max_round_threshold") if key in keys},
        "external_annotations": [
            {"name": "Optimizer.step#Adam.step", "stage": stage, "device": 0, "time_us": BEGAN_US + time_us}
            for stage, time_us in (("START", 9), ("END", 10))
        ],
        "host_segments": [_segment(-1, 1 << 30, [_block(1 << 30, 0, 64, BATCH)], expandable=False)],
        "host_traces": [_event(keys, 1, "alloc", 0, 64, BATCH)],
    }
    return {key: value for key, value in found.items() if key in keys | {"segments", "device_traces"}}


def _event(
    keys: set[str], number: int, action: str, offset: int, size: int, frames: list[dict[str, Any]] | None
) -> dict[str, Any]:
    place = {"device_free": offset} if action == "oom" else {"addr": _SEGMENT + offset * MIB}
    made: dict[str, Any] = {
        "action": action,
        **place,
        "size": size * MIB,
        "stream": 0,
        "time_us": BEGAN_US + number,
        "compile_context": "N/A",
        "user_metadata": "batch" if frames is BATCH else "",
        "internal_metadata": "a graph" if frames is OPTIMIZER else "",
        "pool_id": (0, 0),
    }
    if not made["internal_metadata"]:
        del made["internal_metadata"]
    always = {"action", *place, "size", "stream"}
    kept = {key: value for key, value in made.items() if key in keys | always}
    if frames is not None:
        kept["frames"] = frames
    elif action == "alloc" and "forward_frames" in keys:
        kept |= {"frames": [], "forward_frames": ['  File "/home/me/model.py", line 12, in forward\n']}
    return kept


def _segment(device: int, address: int, blocks: list[dict[str, Any]], *, expandable: bool) -> dict[str, Any]:
    used = sum(block["size"] for block in blocks if block["state"] != "inactive")
    return {
        "device": device,
        "address": address,
        "total_size": sum(block["size"] for block in blocks),
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": expandable,
        "frames": BATCH,
        "blocks": blocks,
    }


def _block(segment: int, offset: int, size: int, frames: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Return a block; with a negative size, one that is not in use."""
    return {
        "address": segment + offset * MIB,
        "size": abs(size) * MIB,
        "requested_size": max(size, 0) * MIB,
        "state": "active_allocated" if size > 0 else "inactive",
        "frames": frames or [],
    }


def cpp_pickle(value: Any) -> bytes:
    """Return ``value`` as torch pickles it in C++: protocol 2, and a list or dictionary in one batch.

    Texts go into the memo when they first occur, lists and dictionaries after their last item: all of them here,
    and in torch those that something else refers to, which are most.
    """
    return b"\x80\x02" + b"".join(_CppPickler().written(value)) + b"."


class _CppPickler:
    def __init__(self) -> None:
        self._memo: dict[str | int, int] = {}  # by text, or by the id of a list or dictionary

    def written(self, value: Any) -> Iterable[bytes]:
        if isinstance(value, str):
            key: str | int = value
        elif isinstance(value, (list, dict)):
            key = id(value)
        else:
            yield _number(value)
            return
        if key in self._memo:
            yield _numbered(b"h", b"j", self._memo[key])
            return
        if isinstance(value, str):
            data = value.encode()
            yield b"X" + struct.pack("<I", len(data)) + data
        elif isinstance(value, list):
            yield b"]("
            for each in value:
                yield from self.written(each)
            yield b"e"
        else:
            yield b"}("
            for both in value.items():
                for each in both:
                    yield from self.written(each)
            yield b"u"
        self._memo[key] = len(self._memo)
        yield _numbered(b"q", b"r", self._memo[key])


def _numbered(short: bytes, long: bytes, number: int) -> bytes:
    return short + bytes([number]) if number < 256 else long + struct.pack("<I", number)


def _number(value: Any) -> bytes:
    """Return a number, a constant, or a tuple of two numbers."""
    if isinstance(value, tuple):
        return b"".join(map(_number, value)) + b"\x86"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    for code, form, bits in (b"K", "<B", 8), (b"M", "<H", 16):
        if 0 <= value < 1 << bits:
            return code + struct.pack(form, value)
    if -1 << 31 <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)
