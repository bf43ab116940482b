"""The render stages of Perfetto's traces, which in those of torch 2.14 are the only record of GPU work.

The schema: gpu_render_stage_event.proto in Perfetto. Stages and lanes have numbers that earlier packets list with
their names; torch, in monitor_pftrace.cpp, names each stage after its kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .protobuf_messages import Schema, text_of

STAGES: Schema = {
    "RenderStage": {
        "duration": (2, "uint64"),
        "extra": (6, "Extra*"),
        "gpu": (11, "int64"),
        "lane_iid": (13, "uint64"),
        "stage_iid": (14, "uint64"),
        "name_iid": (20, "uint64"),
        "launch": (21, "Launch"),
    },
    "Extra": {"name": (1, "bytes"), "value": (2, "bytes")},
    "Launch": {"grid": (1, "Size"), "block": (2, "Size"), "args": (3, "LaunchArgument*")},
    "Size": {"x": (1, "uint64"), "y": (2, "uint64"), "z": (3, "uint64")},
    "LaunchArgument": {"name_iid": (1, "uint64"), "value": (4, "uint64")},
}
"""The messages of render stages."""

_CATEGORIES = {
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Annotation": "gpu_user_annotation",
    "EventRecord": "graph_event_node",
    "HostNode": "graph_host_node",
}
_LANE = re.compile(r"\[(\d+)\]")  # "[07] stream 7"
_IS_TEXT = "Process Group Name"  # which may be "0"


def stage_event(stage: Any, texts: Mapping[str, Mapping[int, str]]) -> dict[str, Any]:
    """Return a render stage as an event of torch's JSON, without its times."""
    kind, lane = (texts["stages"].get(iid, "") for iid in (stage.stage_iid, stage.lane_iid))
    args: dict[str, Any] = {}
    for each in stage.extra:
        name, value = text_of(each.name), text_of(each.value)
        args[name] = int(value) if value.isascii() and value.isdecimal() and name != _IS_TEXT else value
    number = _LANE.match(lane)
    stream = args.get("stream id", int(number[1]) if number else -1)
    args |= {"device": stage.gpu, "stream": stream}
    if stage.HasField("launch"):
        said = {texts["launch_arguments"].get(each.name_iid, ""): each.value for each in stage.launch.args}
        grid, block = ([size.x, size.y, size.z] for size in (stage.launch.grid, stage.launch.block))
        args |= {"grid": grid, "block": block}
        args["registers per thread"] = said.get("registers_per_thread", -1)
        args["shared memory"] = said.get("shared_mem_dynamic", -1)
    name = texts["names"].get(stage.name_iid) or kind
    category = _CATEGORIES.get(kind, "kernel")
    return {"ph": "X", "cat": category, "name": name, "pid": stage.gpu, "tid": stream, "args": args}
