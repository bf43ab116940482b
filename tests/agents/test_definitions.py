"""What an agent is told that a number means: each is computed here from the events, by its definition alone."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instrument.explain.comparison.comparison import compare
from instrument.explain.diagnosis.diagnose import diagnose
from instrument.read.memory.read import read_memory
from instrument.start.agent.columns import Column
from instrument.start.agent.query import Aggregate, Query, query_answer
from instrument.start.agent.recordings import memory_answer
from instrument.start.agent.reports import comparison_answer, diagnosis_answer, syncs_answer, what_if_answer
from tests.memory.snapshots import block, event, segment, write
from tests.support.loops import BASE_US, Loop


def recorded(work: int, side: int = 0, queued: int = 0, **place: int) -> Loop:
    """Return a loop of steps with 0, 1, 2 and 2 synchronizations, and one more after the first step."""
    loop = Loop(**place)
    loop.gpu = queued
    add_kernel(loop, "early", -5, queued and queued + 5, 7)  # of earlier steps
    for number, syncs in enumerate((0, 1, 2, 2)):
        with loop.step(number):
            for _ in range(syncs):
                loop.launch(work * (number + 1))
                loop.synchronize()
            add_kernel(loop, "side", loop.cpu + 1, side, 8)
            loop.launch(2 * work)
        if not number:
            loop.synchronize()
            add_kernel(loop, "side", loop.cpu + 1, side, 8)
            loop.work(90)  # longer than the call before it blocked
    return loop


def add_kernel(loop: Loop, name: str, start: int, us: int, stream: int) -> None:
    """Add work that is launched when it starts; before 0, the launch is not recorded."""
    args = {"correlation": 1_000 + start, "stream": stream}
    made = loop.event("kernel", name, start, start + us) | {"pid": 0, "tid": stream, "args": args}
    loop.events += [made] * bool(us)
    if us and start >= 0:
        loop.add("cuda_runtime", "cudaLaunchKernel", start, start, **args)


def named(loop: Loop, name: str) -> list[dict[str, Any]]:
    """Return the events whose name or category begins so, in order of start, with start and end from 0 on."""
    found = [each for each in loop.events if name in (each["name"][: len(name)], each["cat"])]
    timed = (each | {"start": (at := each["ts"] - BASE_US), "end": at + each["dur"]} for each in found)
    return sorted(timed, key=lambda each: each["start"])


def steps_of(loop: Loop, since: int = 0) -> list[tuple[int, int]]:
    """Return when each step begins and ends: where the one before ends, GPU work included."""
    calls = {each["args"].get("correlation"): each["start"] for each in named(loop, "cuda_runtime")}
    work = [(calls.get(each["args"]["correlation"], -1), each["end"]) for each in named(loop, "kernel")]
    steps = [(each["start"], each["end"]) for each in named(loop, "ProfilerStep")]
    ends = [max(end, *(done for call, done in work if start <= call < end)) for start, end in steps]
    return list(zip([since, *ends], ends, strict=False))


def covered(since: int, until: int, *loops: Loop) -> int:
    """Return for how many ns of a time, in us, a kernel runs in any of the loops."""
    work = [range(each["start"], each["end"]) for loop in loops for each in named(loop, "kernel")]
    return 1_000 * len({us for each in work for us in each if since <= us < until})


def test_steps_and_columns(tmp_path: Path) -> None:
    """Steps begin after earlier work, and what-if takes their mean; aggregates leave out unknown values."""
    loop = recorded(40, queued=90)
    diagnosis = diagnose(loop.trace(tmp_path))
    lengths = [1_000 * (end - begin) for begin, end in steps_of(loop, 90)]
    guess = what_if_answer(diagnosis, diagnosis.what_if())["data"]
    assert (guess["before_ns"], guess["steps"]) == (round(statistics.mean(lengths)), 4)
    change = comparison_answer(compare(diagnosis, diagnosis))["data"]
    assert change["before_ns"] == statistics.median_low(lengths) != statistics.median(lengths)
    rows = query_answer(diagnosis, Query("kernels", ("name", "start_ns", "delay_ns", "step")))["data"]["rows"]
    assert rows[:2] == [["early", -95_000, None, None], ["volta_sgemm_128x64_tn", 0, 90_000, 0]]
    asked = [Aggregate(each, "delay_ns") for each in ("sum", "median", "p95")] + [Aggregate("count")]
    rows = query_answer(diagnosis, Query("kernels", aggregates=asked))["data"]["rows"]
    both = zip(named(loop, "volta"), named(loop, "cudaLaunch"), strict=True)
    delays = [1_000 * (kernel["start"] - call["start"]) for kernel, call in both]
    assert rows == [[sum(delays), statistics.median(delays), max(delays), len(delays) + 1]]  # p95 of 9: the last
    assert Column("max(value)", np.ones(1), np.ones(1, bool)).about()["unit"] == "that of the column unit"


def test_overlapping_work(tmp_path: Path) -> None:
    """Work off the path counts in the steps alone; of work that overlaps, each moment counts for one part."""
    loops = {"before": recorded(100, side=30), "after": recorded(200, side=60)}
    diagnoses = [diagnose(loop.trace(tmp_path)) for loop in loops.values()]
    (off,) = what_if_answer(diagnoses[0], diagnoses[0].what_if())["data"]["critical_path"]["off_path"]
    assert (off["name"], off["ns"]) == ("side", 4 * 30_000)  # and not that between steps
    parts = comparison_answer(compare(*diagnoses))["data"]["parts"]
    for name, loop in loops.items():
        step = sorted(steps_of(loop), key=lambda times: times[1] - times[0])[1]
        assert sum(part[f"{name}_ns"] for part in parts if part["kernel"]) == covered(*step, loop)


def test_two_gpus(tmp_path: Path) -> None:
    """The GPUs of two processes are idle when neither works; diagnose has the steps of one, what-if of both."""
    loops = recorded(100), recorded(70, process=2, device=1)
    diagnosis = diagnose(loops[0].trace(tmp_path, loops[1]))
    time = diagnosis_answer(diagnosis, ["time"], None)["data"]
    until = max(steps_of(loop)[-1][1] for loop in loops)
    given = [sum(row["ns"] for row in time[name]) for name in ("gpu", "idle_by_cause")]
    assert given == pytest.approx([250 * until, 250 * until - covered(0, until, *loops) / 4], abs=4)
    assert (time["steps"], what_if_answer(diagnosis, diagnosis.what_if())["data"]["steps"]) == (4, 8)


@pytest.mark.parametrize("steps", [True, False])
def test_synchronizations(tmp_path: Path, steps: bool) -> None:
    """They are counted by step, without steps all together; a gap is theirs for as long as they blocked."""
    loop = recorded(20)
    waits, kernels = named(loop, "cudaDevice"), named(loop, "kernel")
    loop.events = [each for each in loop.events if steps or each["cat"] != "user_annotation"]
    answer = syncs_answer(diagnose(loop.trace(tmp_path)))["data"]
    (found,) = answer["findings"]
    gaps = [(one["end"], two["start"]) for one, two in pairwise(kernels)]
    blocked = [sum(each["dur"] for each in waits if since <= each["end"] < until) for since, until in gaps]
    idle = sum(min(until - since, us) for (since, until), us in zip(gaps, blocked, strict=True))
    assert [found["idle_ns"], found["blocked_ns"]] == [1_000 * idle, 1_000 * sum(each["dur"] for each in waits)]
    given = [answer[name] for name in ("steps", "syncs_per_step", "median_syncs")]
    given += [found[name] for name in ("count", "per_step", "outside")]
    assert given == ([4, 2, 1, 6, 5 / 4, 1] if steps else [0, 6, 6, 6, 6, 6])


def test_freed_memory(tmp_path: Path) -> None:
    """A byte that is freed is -1, which is known, while -1 stands for unknown elsewhere."""
    loop = recorded(40)
    for at, size in ((1, 512), (2, -1), (3, -511)):
        about = {"Bytes": size, "Addr": 4_096, "Device Type": 0, "Device Id": -1}
        loop.events.append(loop.event("cpu_instant_event", "[memory]", at, at) | {"ph": "i", "args": about})
    answer = query_answer(diagnose(loop.trace(tmp_path)), Query("memory", aggregates=[Aggregate("sum", "bytes")]))
    assert (answer["data"]["rows"], answer["data"]["matched_rows"]) == ([[0]], 3)


def test_memory(tmp_path: Path) -> None:
    """Memory is in use, in the sizes asked for, until its free completes; without a history, the end is known."""
    events = [
        event("alloc", 8_192, 1_000), event("alloc", 16_384, 3_000), event("free_requested", 8_192, 1_000),
        event("alloc", 24_576, 500), event("free_completed", 8_192, 1_000),
    ]  # fmt: skip
    blocks = [block(0, 4_096), block(16_384, 3_072), block(24_576, 512), block(32_768, 2_560, "inactive")]
    paths = [write(tmp_path / f"{count}.pickle", [events[:count]], [segment(blocks)]) for count in (5, 2, 0)]
    full, less, bare = map(read_memory, paths)
    data, end = (memory_answer([each], None, None, None)["data"] for each in (full, bare))
    names = "peak_bytes", "before_bytes", "reserved_bytes", "cached_bytes"
    peak, used = 4_096 + 1_000 + 3_000 + 500, 4_096 + 3_072 + 512
    assert [data[name] for name in names] == [peak, 4_096, 10_240, 10_240 - peak]
    assert [end[name] for name in names] == [None, used, 10_240, 10_240 - used]
    assert data["state"] == {"reserved_bytes": 10_240, "used_bytes": used, "largest_hole_bytes": 2_560}
    assert [sum(use["bytes"] for use in each["uses"]) for each in (data, end)] == [peak, used]
    change = memory_answer([less, full], None, None, None)["data"]  # in the first, the block of 512 is older
    assert sum(part["change_bytes"] for part in change["changes"]) == change["change_bytes"] == 500 - 512
