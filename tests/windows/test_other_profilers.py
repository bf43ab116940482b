"""Another torch profiler of the program around a window: it keeps its recording, and the window has a reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

import instrument
from instrument.base.compat import gpu

from ..support import programs, warm
from .training import (
    STEPS,
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
    """A user's profiler that starts before or during the warm-up keeps its events; the window is skipped."""
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
    """A user's profiler keeps its events wherever it starts and stops, and the process survives.

    torch 2.13 crashes when a profiler is stopped whose recording another one took over.
    With an unused GPU, the window has no warm-up that another profiler could end.
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
def test_a_torch_profiler_with_its_own_warm_up(out: Path, tmp_path: Path, waits: int) -> None:
    """A profiler with a warm-up gets its trace, and every window is recorded or has a reason."""
    copies = []

    def ready(prof: Any) -> None:
        copies.append(tmp_path / f"{prof.step_num}.json")
        prof.export_chrome_trace(str(copies[-1]))

    schedule = torch.profiler.schedule(wait=waits, warmup=1, active=1, repeat=1)
    other = torch.profiler.profile(activities=[ProfilerActivity.CPU], schedule=schedule, on_trace_ready=ready)
    prof = instrument.profile(out, schedule=instrument.schedule(**TWICE))
    with other, prof:
        trained = train(STEPS, lambda: (prof.step(), other.step()))
    assert expected(STEPS) == trained
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
    """A profiler on another thread keeps its events and ends the window; the next window is recorded."""
    command = programs.python(programs.program(OTHER_THREAD, tmp_path), [str(tmp_path / "out")])
    done = warm.run(command, programs.environment(), check=True)
    events, entries = json.loads(done.stdout.splitlines()[-1])
    assert events
    reason = "another torch profiler began on another thread inside the window, which ended its recording"
    assert [("skipped", reason), ("recorded", None)] == reasons(entries)


def test_a_torch_profiler_that_prepared_earlier(tmp_path: Path) -> None:
    """A profiler that prepared before the window keeps its recording; the window is skipped."""
    code = """
import torch, instrument
from torch.profiler import ProfilerActivity, profile
other = profile(activities=[ProfilerActivity.CPU])
other.prepare_trace()
with instrument.profile("out", schedule="0-1") as prof:
    prof.step()
    other.start_trace()
    torch.ones(3) + 1
    other.stop_trace()
assert {"aten::add"} <= {event.name for event in other.events()}
assert [entry["reason"] for entry in prof.windows] == ["another torch profiler is active"], prof.windows
"""
    warm.run([sys.executable, "-c", code], programs.environment(), cwd=tmp_path, check=True)


def test_two_profiles_with_overlapping_windows(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second window is skipped, which one line and the manifest say; later ones are recorded."""
    first = instrument.profile(out / "first", schedule="2-4")
    second = instrument.profile(out / "second", schedule="3-5,8")
    with first, second:
        for _ in range(10):
            torch.ones(3) + 1
            first.step()
            second.step()
    reason = "another profile of this process has a window"
    assert [("recorded", None)] == reasons(first.windows)
    assert [("skipped", reason), ("recorded", None)] == reasons(second.windows)
    (line,) = [record.message for record in caplog.records if reason in record.message]
    fields = "window=1, step=3, rank=0, opened_by=schedule"
    assert line == f"instrument: window.skipped ({fields}, reason={reason})"
