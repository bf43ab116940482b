"""Another torch profiler of the program around a window: it keeps its recording, and the reason is recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

import instrument
from instrument import gpu

from ..support import programs
from .training import (
    COUNT,
    TWICE,
    expected,
    manifest,
    reasons,
    recorded,
    run,
    steps,
    train,
)

pytestmark = pytest.mark.usefixtures("lenient")


@pytest.mark.parametrize("opened", [0, 1])
def test_another_torch_profiler_keeps_its_events(out: Path, opened: int) -> None:
    """A profiler of the user's, there before the warm-up or come in during it, is left alone."""
    other = torch.profiler.profile(activities=[ProfilerActivity.CPU])

    def body(number: int) -> None:
        if number == opened:
            other.start()
        if number == 4:
            other.stop()

    run(out, body)
    reason = ["another torch profiler is active", "another torch profiler began during warm-up"][opened]
    assert [("skipped", reason), ("recorded", None)] == reasons(manifest(out))
    assert [[6, 7]] == recorded(out)
    calls = [event for event in other.events() if event.name == "aten::addmm"]
    assert 4 - opened <= len(calls) <= 5 - opened


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 0, ["recorded", "recorded"]),
        (1, 1, ["recorded" if gpu.supported() else "another torch profiler began during warm-up", "recorded"]),
        (1, 3, ["another torch profiler began during warm-up", "recorded"]),
        (2, 2, ["another torch profiler began inside the window, which ended its recording", "recorded"]),
        (2, 4, ["another torch profiler began inside the window, which ended its recording", "recorded"]),
        (2, 9, ["another torch profiler began inside the window, which ended its recording",
                "another torch profiler is active"]),
    ],
)  # fmt: skip
def test_another_torch_profiler_around_a_window(
    out: Path, tmp_path: Path, begin: int, end: int, expected: list[str]
) -> None:
    """Wherever a profiler of the user's begins and ends, it keeps its events, and the process lives on.

    torch 2.13 ends with a segmentation fault where a profiler is stopped whose recording another one took over.
    With a GPU that is yet to be used, the window has no warm-up for another profiler to end.
    """
    other = torch.profiler.profile(activities=[ProfilerActivity.CPU])

    def body(number: int) -> None:
        if number == begin:
            other.start()
            torch.ones(3).prod()
        if number == end:
            other.stop()

    run(out, body)
    assert expected == [entry["reason"] or entry["status"] for entry in manifest(out)]
    other.export_chrome_trace(str(tmp_path / "other.json"))
    assert "aten::prod" in {event.name for event in other.events()}


@pytest.mark.parametrize("waits", [0, 1, 2, 3])
def test_a_torch_profiler_with_a_warm_up_of_its_own(out: Path, tmp_path: Path, waits: int) -> None:
    """Its warm-up, too, is left alone: it gets its trace, and every window of ours is accounted for."""
    copies = []

    def ready(prof: Any) -> None:
        copies.append(tmp_path / f"{prof.step_num}.json")
        prof.export_chrome_trace(str(copies[-1]))

    schedule = torch.profiler.schedule(wait=waits, warmup=1, active=1, repeat=1)
    other = torch.profiler.profile(activities=[ProfilerActivity.CPU], schedule=schedule, on_trace_ready=ready)
    prof = instrument.profile(out, schedule=instrument.schedule(**TWICE))
    with other, prof:
        trained = train(COUNT, lambda: (prof.step(), other.step()))
    assert expected(COUNT) == trained
    assert [[waits + 1]] == [steps(path) for path in copies]
    outcomes = [entry["reason"] or entry["status"] for entry in manifest(out)]
    assert all(outcome == "recorded" or outcome.startswith("another torch profiler") for outcome in outcomes)


OTHER_THREAD = """
    import json, sys, threading
    import torch, instrument
    from torch.profiler import ProfilerActivity, profile

    events = []

    def other():
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            torch.ones(3).prod()
        events.extend(event.name for event in prof.events())

    with instrument.profile(sys.argv[1], schedule=instrument.schedule("1-2,4")) as prof:
        for number in range(6):
            torch.ones(3).sum()
            if number == 1:
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
            prof.step()
    print(json.dumps(["aten::prod" in events, prof.windows]))
"""


def test_a_torch_profiler_on_another_thread(tmp_path: Path) -> None:
    """Its recording, too, ends ours; nothing of it is touched, and the next window is recorded."""
    done = programs.run(
        programs.python(programs.program(OTHER_THREAD, tmp_path), [str(tmp_path / "out")]), programs.environment()
    )
    events, entries = json.loads(done.stdout.splitlines()[-1])
    assert events
    reason = "another torch profiler began on another thread inside the window, which ended its recording"
    assert [("skipped", reason), ("recorded", None)] == reasons(entries)


def test_a_torch_profiler_that_warms_up_already(tmp_path: Path) -> None:
    """One that prepared before there was a window of ours keeps its recording; ours is skipped."""
    code = """
import torch, instrument
from torch.profiler import ProfilerActivity, profile
theirs = profile(activities=[ProfilerActivity.CPU])
theirs.prepare_trace()
with instrument.profile("out", schedule="0-1") as prof:
    prof.step()
    theirs.start_trace()
    torch.ones(3) + 1
    theirs.stop_trace()
assert {"aten::add"} <= {event.name for event in theirs.events()}
assert [entry["reason"] for entry in prof.windows] == ["another torch profiler is active"], prof.windows
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=programs.environment(), check=True)
