"""Memory snapshots as tables, with the peak of each GPU; other files are an error in a sentence."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import instrument
from instrument.base.errors import TraceError

from ..support.shared_traces import shared
from .snapshots import FRAMES, block, event, segment, write

BLOCKS: list[dict[str, Any]] = [{}]
# From a replay of the events in a loop over dictionaries.
PEAKS = {
    "ctx128_forward": 19_487_442_944,
    "ctx128_forward_mixed": 24_008_252_416,
    "ctx128_fullstep": 54_937_606_148,
    "mosaic_sample": 2_255_406_836,
    "npu_expandable": 597_483_440,
    "python_stacks_ctx128": 25_002_371_076,
}


def test_tables(tmp_path: Path) -> None:
    """Events by device, segments, blocks, annotations, and the frames of stacks."""
    first = [event("alloc", 100, 8, time_us=5, user_metadata="mine"), event("free_completed", 100, 8)]
    second = [event("oom", 1, 2**40, stream=7)]
    marks = [{"stage": "START", "name": "Optimizer.step#SGD.step", "device": 1, "time_us": 9}]
    segments = [segment([block(100, 8, "inactive"), block(108, 4)], device=1)]
    path = write(tmp_path / "a.pickle", [first, second], segments, external_annotations=marks)
    found = instrument.read_memory(path)
    assert ["alloc", "free_completed", "oom"] == found.events.text("action")
    assert [0, 0, 1] == found.events.device.tolist()
    assert [5000, -1, -1] == found.events.time_ns.tolist()
    assert ["mine", "", ""] == found.events.text("user_metadata")
    assert [0, 1] == found.devices
    assert ["inactive", "active_allocated"] == found.blocks.text("state")
    assert ["Optimizer.step#SGD.step"] == found.annotations.text("name")
    stack = found.stacks[found.events.stack[0]]
    assert [frame["filename"] for frame in FRAMES] == [found.frames.text("file")[row] for row in stack]
    assert [12, 40] == found.frames.line[list(stack)].tolist()
    assert "3 events, 1 segments" in repr(found)


def test_high_addresses(tmp_path: Path) -> None:
    """Addresses from 2**63 on are told apart, of events and of blocks, also of blocks without one."""
    high = 2**64 - 4096
    second = {key: value for key, value in block(0, 32).items() if key != "address"}
    parts = [{**segment([block(high, 16), second]), "address": high}]
    events = [event("alloc", high + 16, 32), event("free_completed", high + 64, 8)]
    found = instrument.read_memory(write(tmp_path / "a.pickle", [events], parts))
    assert [-4096, -4080] == found.blocks.address.tolist()
    assert 16 + 8 + 32 == found.peak().bytes
    most = 2**63 - 1
    parts = [{**segment([block(most, 9), second]), "address": most}]
    assert 2 == len(instrument.read_memory(write(tmp_path / "b.pickle", [[]], parts)).blocks)


def test_blocks_of_older_torch(tmp_path: Path) -> None:
    """In torch 2.0, it has no address, and its frames in a history, the newest first."""
    old = [{"size": 8, "state": "inactive"}, {"size": 2, "state": "active_allocated"}]
    old[1]["history"] = [{"addr": 108, "real_size": 2, "frames": frames} for frames in (FRAMES[1:], FRAMES[:1])]
    part = {**segment(old), "address": 100}
    found = instrument.read_memory(write(tmp_path / "a.pickle", [], [part]))
    assert [100, 108] == found.blocks.address.tolist()
    assert ["train"] == [found.frames.text("name")[row] for row in found.stacks[found.blocks.stack[1]]]


def test_failed_allocation(tmp_path: Path) -> None:
    """Its event has the free memory of the device instead of an address."""
    failed = {"action": "oom", "device_free": 77, "size": 2**40, "stream": 0, "frames": FRAMES}
    found = instrument.read_memory(write(tmp_path / "a.pickle", [[event("alloc", 1, 8), failed]]))
    assert ["alloc", "oom"] == found.events.text("action")
    assert [-1, 77] == found.events.device_free_bytes.tolist()
    assert 8 == found.peak().bytes


def test_stack_of_older_memory(tmp_path: Path) -> None:
    """It is not that of the event that frees it."""
    found = instrument.read_memory(write(tmp_path / "a.pickle", [[event("free_completed", 1, 8)]]))
    assert [0] == found.allocations.stack.tolist()


def replay(traces: list[list[dict[str, Any]]], device: int, blocks: list[tuple[int, int]]) -> int:
    """Return the peak of a device, from its events one by one."""
    seen: set[int] = set()
    used = 0
    for each in traces[device]:
        if each["action"] == "free_completed" and each["addr"] not in seen:
            used += each["size"]
        seen.add(each["addr"])
    used += sum(size for address, size in blocks if address not in seen)
    peak, live = used, {}
    for each in traces[device]:
        if each["action"] == "alloc":
            live[each["addr"]] = each["size"]
            used += each["size"]
        else:
            used -= live.pop(each["addr"], each["size"])
        peak = max(peak, used)
    return peak


@given(st.lists(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 50)), max_size=30), min_size=1, max_size=3))
def test_peak_of_any_events(tmp_path_factory: pytest.TempPathFactory, plan: list[list[tuple[int, int]]]) -> None:
    """The peak is that of a replay, with memory that is older than the events."""
    traces, segments = [], []
    for device, steps in enumerate(plan):
        live: dict[int, int] = {address: 100 + address for address in range(5)}  # of which some are freed
        trace = []
        for address, size in steps:
            if address in live:
                trace.append(event("free_completed", address, live.pop(address)))
            else:
                live[address] = size
                trace.append(event("alloc", address, size))
        traces.append(trace)
        segments.append(segment([block(address, size) for address, size in live.items()], device))
    path = write(tmp_path_factory.mktemp("peak") / "a.pickle", traces, segments)
    found = instrument.read_memory(path)
    for device, each in enumerate(segments):
        blocks = [(item["address"], item["size"]) for item in each["blocks"]]
        peak = found.peak(device)
        assert peak.bytes == replay(traces, device, blocks) == found.allocations.bytes[peak.rows].sum()


@pytest.mark.parametrize("name", PEAKS)
def test_peak_of_real_snapshots(name: str) -> None:
    """Of torch with C++ and Python stacks, of torch_npu with expandable segments, of another tool."""
    found = instrument.read_memory(shared(f"memory/{name}.pickle"))
    peak = found.peak()
    assert (peak.bytes, peak.bytes) == (PEAKS[name], found.allocations.bytes[peak.rows].sum())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a pickle"),
        (b"\x1f\x8b", "not a pickle"),
        (b'{"traceEvents": []}', "not a pickle"),
        (pickle.dumps([]), "no segments"),
        (pickle.dumps({"segments": [], "device_traces": [[event("alloc", 1, -5)]]}), "a size is negative"),
        (
            pickle.dumps({"segments": [], "device_traces": [[event("alloc", n, 2**62) for n in (1, 2)]]}),
            "more than",
        ),
        (pickle.dumps({"segments": 5}), "no segments"),
        (pickle.dumps({"segments": [{"device": 128}]}), "0 to 127"),
        (pickle.dumps({"segments": [{"device": -1}]}), "0 to 127"),
        (pickle.dumps({"segments": [{"device": 10**5000}]}), "0 to 127"),
        (pickle.dumps({"segments": [], "device_traces": [[]] * 129}), "0 to 127"),
        (pickle.dumps({"segments": [5]}), "not a dictionary"),
        (pickle.dumps({"segments": [{"blocks": [5]}]}), "not a dictionary"),
        (pickle.dumps({"segments": [{"blocks": 5}]}), "not a list"),
        (pickle.dumps({"segments": [], "device_traces": 5}), "not a list"),
        (pickle.dumps({"segments": [], "device_traces": [5]}), "not a list"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc"}]]}), "not those of its devices"),
        (pickle.dumps({"segments": [], "x": {"action": "alloc", "addr": 5}}), "not those of its devices"),
        (
            pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": 5, "frames": [7]}]]}),
            "frame",
        ),
    ],
)
def test_other_files(tmp_path: Path, data: bytes, reason: str) -> None:
    """The error names the file and says what is wrong."""
    path = tmp_path / "a.pickle"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=reason):
        instrument.read_memory(path)


@pytest.mark.parametrize(
    "data",
    [
        {"segments": [{}] * 9},
        {"segments": [{"blocks": [{}] * 9}]},
        {"segments": [{"blocks": BLOCKS} for _ in range(9)]},
        {"segments": [], "external_annotations": [{}] * 9},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 5}]] * 9},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 5}] * 9]},
    ],
)
def test_entries_that_are_repeated(tmp_path: Path, data: dict[str, Any]) -> None:
    """Some kB can name one entry, or one list of entries, a million times: the second time is an error."""
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(data))
    with pytest.raises(TraceError, match=r"twice|not those of its devices"):
        instrument.read_memory(path)
