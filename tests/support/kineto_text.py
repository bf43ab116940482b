"""Small traces of every kind of event, and the formats of their files."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

Event = dict[str, Any]

CATEGORIES = [
    "cpu_op", "Operator", "user_annotation", "python_function", "cuda_runtime", "cuda_driver", "Runtime",
    "mtia_runtime", "kernel", "Kernel", "gpu_memcpy", "Memcpy", "gpu_memset", "Memset", "mtia_ccp_events",
    "gpu_user_annotation", "cuda_sync", "overhead", "Trace", "", None,
]  # fmt: skip
NAMES = [
    "aten::mm",
    "c10d::recv_",
    "record_param_comms",
    "[memory]",
    "ProfilerStep#3",
    "ProfilerStep#4",
    "nn.Module: A_0",
    "dma_request",
    'ü\\ " }]',
    "",
]

integers = st.one_of(st.integers(0, 9), st.sampled_from([-1, -5, 2**31, 2**40, 2**63 - 1, 2**63, 2**64, 10**30]))
odd = st.one_of(integers, st.none(), st.sampled_from(["7", "many", ""]))
sizes = st.lists(st.integers(0, 1024), min_size=3, max_size=3)
reals = st.one_of(st.integers(0, 90), st.decimals(0, 100, places=3), st.sampled_from([None, "n"]))
texts = st.sampled_from(["allreduce", "0", "Float", None, 5])
nested = st.sampled_from([[], [[1, 512], []], [{"name": "x"}, {"name": "y"}], ["Scalar", ""], None, {"ph": 5}])
_ARGS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("correlation", "External id", "external id", "Sequence number", "device", "stream"), odd),
    **dict.fromkeys(("Src Rank", "Dst Rank"), odd),
    **dict.fromkeys(("bytes", "size", "registers per thread", "shared memory", "In msg nelems", "Bytes"), odd),
    **dict.fromkeys(("Addr", "Device Type", "Device Id", "Total Allocated", "Total Reserved"), odd),
    **dict.fromkeys(("grid", "block"), sizes),
    **dict.fromkeys(("blocks per SM", "est. achieved occupancy %"), reals),
    **dict.fromkeys(("Collective name", "Process Group Name", "dtype"), texts),
    **dict.fromkeys(("Input Dims", "Input type", "Concrete Inputs", "stacks"), nested),
    "name": texts,
}
args = st.one_of(
    st.lists(st.sampled_from(sorted(_ARGS)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: _ARGS[name] for name in names})
    ),
    st.sampled_from([None, [], "text", 7, {}]),
)
places = st.sampled_from([0, 1, 7, "stream 7", "0", "Spans", "", 2**40, None])
moments = st.decimals(0, 10**6, places=3) | st.integers(0, 1000)
since_1970 = st.decimals(1_712_195_495_000_000, 1_712_195_496_000_000, places=3)
durations = st.decimals(-1, 10**6, places=3) | st.sampled_from([0, 1, 10])


def events(
    phases: str = "XXXXXXiRCMsf", times: st.SearchStrategy[Any] = moments, max_size: int = 12
) -> st.SearchStrategy[list[Event]]:
    """Return lists of events that may lack any key except the phase and the time."""
    return st.lists(
        st.fixed_dictionaries(
            {"ph": st.sampled_from(phases), "ts": times},
            optional={
                "cat": st.sampled_from(CATEGORIES),
                "name": st.sampled_from(NAMES),
                "pid": places,
                "tid": places,
                "dur": durations,
                "args": args,
            },
        ),
        max_size=max_size,
    )


def ordinary(count: int, size: int = 0) -> list[Event]:
    """Return the events of a typical trace, each with distinct args of this size."""
    return [
        {
            "ph": "X",
            "cat": ("cpu_op", "kernel", "python_function", "cuda_runtime")[number % 4],
            "name": f"event {number}",
            "pid": 1,
            "tid": 1 + number % 2,
            "ts": Decimal(number * 10) + Decimal("0.125"),
            "dur": Decimal("5.001"),
            "args": {"External id": number, "correlation": number, "Input Dims": [[2, number]], "pad": "x" * size},
        }
        for number in range(count)
    ]


def dumps(content: Any, **style: Any) -> str:
    """Return JSON with exact Decimals."""
    text = json.dumps(content, default=lambda value: f"\0{value}", **style)
    return re.sub(r'"\\u0000([^"]*)"', r"\1", text)


def written(events: list[Event], *, style: str = "object") -> bytes:
    """Return a file in a style: "object", "tail" (no text before the events), "array", "pretty", "crlf", "bom"."""
    metadata = {"schemaVersion": 1, "distributedInfo": {"rank": 3, "world_size": 8}}
    if style == "array":
        return dumps(events).encode()
    if style == "tail":
        return dumps({"traceEvents": events, **metadata, "name": "}]"}, separators=(",", ":")).encode()
    content = {"schemaVersion": 1, "traceEvents": events, "distributedInfo": metadata["distributedInfo"]}
    if style == "pretty":
        return dumps(content, indent=2).encode()
    if style == "crlf":
        return dumps(content, indent=1, ensure_ascii=False).replace("\n", "\r\n").encode()
    return (b"\xef\xbb\xbf" if style == "bom" else b"") + dumps(content).encode()


STYLES = ("object", "tail", "array", "pretty", "crlf", "bom")
