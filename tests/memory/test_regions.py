"""The region of an allocation is that of its thread; where the thread is not known, there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import instrument
from instrument.record.allocator_history.window_memory import RegionLog
from instrument.record.regions.region import Region

from .snapshots import event, write
from .test_breakdown import FORWARD

LOOP, AUTOGRAD, LOADER = 140_001, 140_002, 140_003  # threads
IN_THREAD = [
    {"filename": "/home/me/data.py", "name": "load", "line": 3},
    {"filename": "/usr/lib/python3.11/threading.py", "name": "_bootstrap", "line": 1002},
]


def opened(name: str, begin: int, end: int | None, thread: int, number: int) -> list[dict[str, Any]]:
    """Return the entries of a range as `RegionLog` makes them; with the end None, it does not end."""
    both = [("START", begin), ("END", end)]
    return [
        {
            "name": name, "stage": stage, "device": 0, "time_us": at,
            "source": "instrument", "range": number, "thread": thread,
        }
        for stage, at in both
        if at is not None
    ]  # fmt: skip


STEP = opened("ProfilerStep#3", 0, 100, LOOP, 0)


def regions(path: Path, at: dict[int, Any], *ranges: list[dict[str, Any]]) -> dict[int, str]:
    """Return the region of an allocation at each of these times, with these frames; frees have none."""
    events = []
    for number, (time, stack) in enumerate(at.items()):
        events.append(event("alloc", time, 1 << number, time_us=time, frames=stack))
        events += [event("free_requested", time, 1 << number, time_us=time, frames=[]) for _ in range(2)]
    marks = [each for entries in ranges for each in entries]
    found = instrument.read_memory(write(path / "a.pickle", [events], external_annotations=marks)).break_down()
    by_region = found.by_region().items()
    return {
        time: next((region for region, (sizes, _) in by_region if sizes >> number & 1), "")
        for number, time in enumerate(at)
    }


def test_columns(tmp_path: Path) -> None:
    """The source, the range and the thread of what instrument notes; torch's own entries have none."""
    log = RegionLog()
    log.pop(log.push(Region("forward", 0)))
    torchs = {"name": "Optimizer.step#SGD.step", "stage": "START", "device": 0, "time_us": 1}
    path = write(tmp_path / "a.pickle", [], external_annotations=[torchs, *log.annotations(0)])
    table = instrument.read_memory(path).annotations
    thread = log.annotations(0)[0]["thread"]
    assert ["", "instrument", "instrument"] == table.text("source")
    assert ([-1, 0, 0], [-1, thread, thread]) == (table.range.tolist(), table.thread.tolist())


def test_another_thread(tmp_path: Path) -> None:
    """A region that another thread opens meanwhile is not that of the loop, nor the other way round."""
    found = regions(
        tmp_path, {3: FORWARD, 5: IN_THREAD, 7: FORWARD, 9: FORWARD, 60: FORWARD},
        STEP, opened("forward", 2, 8, LOOP, 1), opened("prefetch", 4, 50, LOADER, 2),
    )  # fmt: skip
    step = "ProfilerStep#3"
    assert {3: "forward", 5: "prefetch", 7: "forward", 9: step, 60: step} == found


def test_the_loop_waits_for_autograd(tmp_path: Path) -> None:
    """In a backward pass, the region is that of autograd's thread or of the loop, not of threads beside them."""
    found = regions(
        tmp_path, {3: FORWARD, 12: [], 15: [], 25: [], 70: FORWARD},
        STEP, opened("prefetch", 1, 13, LOADER, 1), opened("prefetch", 14, 99, LOADER, 2),
        opened("forward", 2, 8, LOOP, 3), opened("backward", 10, 30, LOOP, 4),
        opened("layer (backward)", 11, 20, AUTOGRAD, 5),
    )  # fmt: skip
    layer = "layer (backward)"
    assert {3: "forward", 12: layer, 15: layer, 25: "backward", 70: "ProfilerStep#3"} == found


def test_several_threads_of_autograd(tmp_path: Path) -> None:
    """Those of several GPUs run at the same time: the region is that of the loop."""
    found = regions(
        tmp_path, {3: FORWARD, 12: [], 14: []},
        STEP, opened("backward", 10, 30, LOOP, 1),
        opened("first", 11, 20, AUTOGRAD, 2), opened("second", 13, 21, AUTOGRAD + 9, 3),
    )  # fmt: skip
    assert {3: "ProfilerStep#3", 12: "first", 14: "backward"} == found


def test_the_loop_runs_in_a_thread(tmp_path: Path) -> None:
    """What such threads allocate while several have regions open has none, unless all have the same."""
    beside = opened("load", 4, 5, LOADER, 2), opened("forward", 6, 40, LOADER, 3)
    found = regions(
        tmp_path, {3: IN_THREAD, 4: IN_THREAD, 7: IN_THREAD, 9: IN_THREAD, 41: IN_THREAD},
        STEP, opened("forward", 2, 8, LOOP, 1), *beside,
    )  # fmt: skip
    assert {3: "", 4: "", 7: "forward", 9: "", 41: ""} == found
    assert {3: "forward", 9: "ProfilerStep#3"} == regions(
        tmp_path, {3: IN_THREAD, 9: IN_THREAD}, STEP, opened("forward", 2, 8, LOOP, 1)
    )


def test_no_thread_steps(tmp_path: Path) -> None:
    """Which thread the loop's is, is not known: there is a region where all have the same."""
    both = opened("one", 1, 9, LOOP, 1), opened("two", 3, 4, LOADER, 2), opened("one", 5, 6, LOADER, 3)
    assert {2: "", 3: "", 5: "one"} == regions(tmp_path, dict.fromkeys((2, 3, 5), FORWARD), *both)
    assert {2: "one", 20: ""} == regions(tmp_path, dict.fromkeys((2, 20), FORWARD), both[0])


def test_ranges_by_number(tmp_path: Path) -> None:
    """Ranges of one name overlap, end in any order, and on any thread; one that began earlier has only an end."""
    moved = opened("outer", 1, 7, LOOP, 1)
    moved[1]["thread"] = LOADER
    found = regions(
        tmp_path, dict.fromkeys((2, 4, 6, 8, 11, 13), FORWARD),
        STEP, moved, opened("one", 3, 9, LOOP, 2), opened("two", 5, 10, LOOP, 3), opened("one", 12, None, LOOP, 4),
        opened("two", 0, 6, LOOP, 9)[1:],
    )  # fmt: skip
    step = "ProfilerStep#3"
    assert {2: "outer", 4: "one", 6: "two", 8: "two", 11: step, 13: "one"} == found


def test_torchs_own_ranges(tmp_path: Path) -> None:
    """They are the loop's, and nest with its regions."""
    torchs = [
        {"name": "Optimizer.step#SGD.step", "stage": stage, "device": 0, "time_us": at}
        for stage, at in (("START", 4), ("END", 6))
    ]
    found = regions(
        tmp_path, dict.fromkeys((3, 5, 7), FORWARD),
        STEP, opened("update", 2, 8, LOOP, 1), torchs, opened("prefetch", 1, 50, LOADER, 2),
    )  # fmt: skip
    assert {3: "update", 5: "Optimizer.step#SGD.step", 7: "update"} == found


def test_another_gpu(tmp_path: Path) -> None:
    """A region is open on a thread, whichever GPU is used."""
    events = [event("alloc", 3, 3, time_us=3, frames=FORWARD)]
    path = write(
        tmp_path / "a.pickle", [[], events], external_annotations=[*STEP, *opened("forward", 2, 8, LOOP, 1)]
    )
    assert {"forward": (3, 1)} == instrument.read_memory(path).break_down(1).by_region()


def test_unknown_times(tmp_path: Path) -> None:
    """An event of torch 2.1, which has no time, is in no region, and a range without times contains nothing."""
    known, unknown = event("alloc", 1, 1, time_us=3, frames=FORWARD), event("alloc", 2, 2, frames=FORWARD)
    marks = [{"name": name, "stage": "START", "device": 0} for name in ("timed", "timeless")]
    marks[0]["time_us"] = 2
    path = write(tmp_path / "a.pickle", [[unknown, known]], external_annotations=marks)
    assert {"timed": (1, 1)} == instrument.read_memory(path).break_down().by_region()


def test_a_begin_that_was_not_kept(tmp_path: Path) -> None:
    """Of the thread that steps, only ends are left: it has no range open, and another one's is not its own."""
    marks = [
        {"name": "backward", "stage": "START", "device": 0, "time_us": 1, "range": 8, "thread": 4},
        {"name": "ProfilerStep#1", "stage": "END", "device": 0, "time_us": 9, "range": 1, "thread": 3},
    ]
    events = [{**event("alloc", 512, 512), "time_us": 5}]
    found = instrument.read_memory(write(tmp_path / "a.pickle", [events], external_annotations=marks)).break_down()
    assert {} == found.by_region()
