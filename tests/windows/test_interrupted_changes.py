"""The program's signal handler stops a profile, raises or does both, at any moment of a window."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from inspect import isfunction, unwrap
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import pytest
import torch

import instrument
from instrument.record.exporters.sessions import sessions
from instrument.record.exporters.torch_profiler import TorchProfilerCapture
from instrument.record.regions import dispatch
from instrument.record.regions.dispatch import ActiveEmitters
from instrument.record.windows.profile import Profile
from instrument.record.windows.recording import Recording
from instrument.record.windows.schedule_follower import running_profiles
from instrument.record.windows.steps import LoopStepCounter, StepIterator

from ..support import programs, warm
from .training import manifest, statuses

pytestmark = [pytest.mark.process, pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signals")]
# Out of some 700: Python handles a signal where a function begins and after each call of a C function.
MOMENTS = 700 if os.environ.get("INSTRUMENT_FUZZ") == "all" else 8
SEED = os.environ.get("INSTRUMENT_FUZZ_SEED") or str(random.randrange(1 << 32))  # draws the moments


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_stop_while_torch_stops(tmp_path: Path, device: str) -> None:
    """A signal while torch collects its events leaves the process alive, and the window is saved once."""
    script = programs.program(STOP_WHILE_STOPPING, tmp_path)
    done = warm.run(programs.python(script, [str(tmp_path / "out"), device]), programs.environment(), check=True)
    inside, running, later = json.loads(done.stdout.splitlines()[-1])
    assert [True, False] == [inside, running]
    assert [(1, "recorded")] == statuses(manifest(tmp_path / "out"))
    assert [(1, "recorded")] == statuses(later)


STOP_WHILE_STOPPING = """
    import json, os, signal, sys, threading
    import torch, instrument
    from torch.autograd import profiler

    def handle(*_):
        frame = sys._getframe(1)
        while frame is not None:
            inside.append(frame.f_code is profiler.profile.__exit__.__code__)
            frame = frame.f_back
        prof.stop()

    def disable():
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return stop()

    inside, stop = [], profiler._disable_profiler
    profiler._disable_profiler = disable
    signal.signal(signal.SIGTERM, handle)
    x = torch.ones(3, device=sys.argv[2])
    prof = instrument.profile(sys.argv[1], schedule="1")
    prof.start()
    prof.step()
    for _ in range(60000):
        x + 1
    prof.step()
    running, profiler._disable_profiler = torch.autograd._profiler_enabled(), stop
    with instrument.profile(sys.argv[1] + "/later", schedule="1") as later:
        for _ in range(3):
            later.step()
    print(json.dumps([any(inside), running, later.windows]))
"""


@pytest.mark.parametrize("what", ["stops", "stops and exits", "raises"])
def test_a_handler_at_any_moment(tmp_path: Path, what: str) -> None:
    """The handler runs at each drawn function entry or C return, of torch or the library, from start to end.

    Afterwards no profiler is active and nothing is patched, each window has one line whose files exist, and a
    later profile records.
    """
    print(f"INSTRUMENT_FUZZ_SEED={SEED} draws the same moments again")
    script = programs.program(HANDLE_ANYWHERE, tmp_path)
    arguments = [str(tmp_path / "out"), what, str(MOMENTS), SEED]
    environment = programs.environment({"INSTRUMENT_SUMMARY": "0"})
    done = warm.run(programs.python(script, arguments), environment, timeout=300 + 5 * MOMENTS, check=True)
    swept, wrong, later = json.loads(done.stdout.splitlines()[-1])
    assert [] == wrong
    assert swept >= MOMENTS / 2
    assert [(1, "recorded"), (2, "recorded")] == statuses(later)


HANDLE_ANYWHERE = """
    import json, random, signal, sys
    from collections import Counter
    from pathlib import Path

    import torch, instrument
    from instrument.record.cuda_graphs import cuda_graphs
    from instrument.record.exporters.sessions import sessions
    from instrument.record.windows.schedule_follower import running_profiles

    out, what, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    draw = random.Random(int(sys.argv[4]))
    NAMES = ("capture_begin", "capture_end", "replay")

    class Limit(Exception):
        pass

    def patched():
        found = [vars(torch.cuda.CUDAGraph).get(name) for name in NAMES]
        return [*found, torch.profiler.record_function.__enter__]

    def run(folder, moment=None, seen=None):
        fired = []

        def handle(*_):
            fired.append(True)
            if what != "raises":
                prof.stop()
            if what != "stops":
                raise SystemExit if what == "stops and exits" else Limit

        def fire_at_moment(frame, event, function):
            if event not in ("call", "c_return"):
                return
            name = function.__qualname__ if event == "c_return" else ""
            place = frame.f_code.co_filename, frame.f_code.co_name, name
            if seen is not None and frame.f_code is not run.__code__:
                seen.setdefault(place)
            if place == moment and not fired:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGUSR1)

        signal.signal(signal.SIGUSR1, handle)
        prof = instrument.profile(folder, schedule="1,3")
        try:
            sys.setprofile(fire_at_moment)
            with prof:
                for _ in range(5):
                    torch.ones(3) + 1
                    prof.step()
        except (Limit, SystemExit):
            pass
        finally:
            sys.setprofile(None)
        if what == "raises":
            prof.stop()  # as the process's end does
        return prof, bool(fired)

    def check_state(prof):
        try:
            lines = [json.loads(line) for line in (prof.out / "manifest.jsonl").read_text().splitlines()]
        except OSError:
            lines = []
        if lines or prof._process:  # otherwise the interrupt came before the start
            assert {1: 1, 2: 1} == Counter(line["window"] for line in lines), lines
        assert sorted(prof.windows, key=str) == sorted(lines, key=str)
        missing = [file for line in lines for file in line["files"] if not (prof.out / file["path"]).exists()]
        assert not missing, missing
        assert not torch.autograd._profiler_enabled()
        assert before == patched()
        assert not prof._started and not running_profiles and sessions.owner is None
        assert not cuda_graphs._followers and not cuda_graphs._patches

    before, seen = patched(), {}
    run(out / "first")  # imports the modules that a profile needs
    run(out / "second", seen=seen)
    moments = draw.sample(list(seen), min(count, len(seen)))
    swept, wrong = 0, []
    for number, moment in enumerate(moments):
        prof, fired = run(out / str(number), moment)
        swept += fired
        try:
            check_state(prof)
        except AssertionError as error:
            wrong.append([moment, repr(error)])
    print(json.dumps([swept, wrong, run(out / "later")[0].windows]))
"""


def drive_by_step(prof: Profile) -> None:
    """Record windows of steps that the program announces with `step`."""
    with prof:
        for _ in range(5):
            torch.ones(3) + 1
            prof.step()


def drive_by_items(prof: Profile) -> None:
    """Record windows of the items that `instrument.steps` yields."""
    count = LoopStepCounter(prof, None, 0, {})
    for _ in StepIterator(range(5), count, lambda: count):
        torch.ones(3) + 1


def drive_and_abandon(prof: Profile) -> None:
    """Record windows of steps that the program announces with `step`, then abandon the profile."""
    prof.start()
    try:
        for _ in range(5):
            torch.ones(3) + 1
            prof.step()
    finally:
        prof.abandon("another one begins")


@pytest.mark.parametrize("drive", [drive_by_step, drive_by_items])
@pytest.mark.parametrize("after", [False, True])
def test_ctrl_c_while_a_step_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drive: Callable[[Profile], None], after: bool
) -> None:
    """The steps before that one are kept, as after Ctrl-C in the program's own lines."""
    mark = TorchProfilerCapture.step

    def interrupted(capture: TorchProfilerCapture, number: int | None) -> None:
        if number != 3 or after:
            mark(capture, number)
        if number == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(TorchProfilerCapture, "step", interrupted)
    prof = instrument.profile(tmp_path, schedule="1-4")
    with pytest.raises(KeyboardInterrupt):
        drive(prof)
    prof.stop()  # as the end of the process does
    (window,) = prof.windows
    assert ("partial", [1, 2]) == (window["status"], window["steps"])
    assert window["reason"] == "the loop ended before step 3: KeyboardInterrupt"
    assert [1, 2] == instrument.read_trace(tmp_path / window["files"][0]["path"]).steps["number"].tolist()


Drive = Callable[[Profile], None]  # runs a loop under a profile
Place = tuple[str, str]  # a file and a function in it


@pytest.mark.parametrize("drive", [drive_by_step, drive_by_items, drive_and_abandon])
def test_an_interrupt_while_a_failed_window_is_cleaned_up(
    tmp_path: Path, lenient: None, monkeypatch: pytest.MonkeyPatch, drive: Drive
) -> None:
    """After the window's stop fails, Ctrl-C comes at the start of any function that cleans up after it."""
    for name in ("first", "second"):  # the first run imports the modules that a profile needs
        prof = instrument.profile(tmp_path / name, schedule="1,3")
        places = list(fail_a_stop(prof, monkeypatch, drive))
        prof.stop()
    assert len(places) > 20
    print(f"INSTRUMENT_FUZZ_SEED={SEED} draws the same moments again")
    for number, place in enumerate(random.Random(int(SEED)).sample(places, min(len(places), MOMENTS))):
        prof = instrument.profile(tmp_path / str(number), schedule="1,3")
        with pytest.raises(KeyboardInterrupt):
            fail_a_stop(prof, monkeypatch, drive, place)
        assert not torch.autograd._profiler_enabled(), place
        prof.stop()  # as the end of the process does
        assert (sessions.owner, list(running_profiles)) == (None, []), place
        numbers = [window["window"] for window in prof.windows]
        assert len(set(numbers)) == len(numbers), (place, numbers)
        with instrument.profile(tmp_path / str(number) / "later", schedule="1") as later:
            for _ in range(3):
                later.step()
        assert statuses(later.windows) == [(1, "recorded")], place


def fail_a_stop(
    prof: Profile, monkeypatch: pytest.MonkeyPatch, drive: Drive, place: Place | None = None
) -> dict[Place, None]:
    """Make a window's stop fail; with ``place``, interrupt the clean-up where that function starts.

    Returns:
        The functions that run in the clean-up.
    """
    stop, give_up = TorchProfilerCapture.stop, Profile._fail_window
    failed, pressed, places = list[bool](), list[bool](), dict[Place, None]()

    def fail_once(capture: TorchProfilerCapture) -> None:
        if not failed:
            failed.append(True)
            raise ValueError("cannot stop")
        stop(capture)

    def interrupt_at_place(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            current = frame.f_code.co_filename, frame.f_code.co_name
            if any(folder in current[0] for folder in ("instrument", "torch")):
                places.setdefault(current)
            if current == place and not pressed:
                pressed.append(True)
                sys.setprofile(None)
                raise KeyboardInterrupt

    def watched(prof: Profile, *arguments: Any) -> None:
        sys.setprofile(interrupt_at_place)
        try:
            give_up(prof, *arguments)
        finally:
            sys.setprofile(None)

    with monkeypatch.context() as patch:
        patch.setattr(TorchProfilerCapture, "stop", fail_once)
        patch.setattr(Profile, "_fail_window", watched)
        drive(prof)
    return places


@pytest.mark.usefixtures("lenient")
def test_an_interrupt_around_a_warm_up(tmp_path: Path) -> None:
    """After an interrupt at any line around a warm-up, no warm-up is left, and modules have no hooks.

    A line that runs several times is interrupted once for each way in which it is called.
    """
    model = torch.nn.Linear(2, 2)
    schedule = instrument.schedule(wait=1, warmup=1, active=1)

    def lines_before(interrupt_at: int) -> dict[tuple[tuple[str, int], ...], int]:
        """Interrupt before a line of `Recording` or of the set of warm-ups, by its number among those that run.

        Returns:
            The number at which each line first ran, by its stack of such lines.
        """
        ran, stacks, places = 0, dict[tuple[tuple[str, int], ...], int](), list[tuple[str, int]]()

        def line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal ran
            if event == "line":
                ran += 1
                stack = ((each.f_code, line) for each, line in walk_stack(frame))
                stacks.setdefault(tuple((code.co_name, line) for code, line in stack if code in watched), ran)
            if event == "line" and ran == interrupt_at:
                places.append((frame.f_code.co_name, frame.f_lineno))
                raise KeyboardInterrupt
            return line

        def called(frame: FrameType, event: str, _: Any) -> Any:
            return line if frame.f_code in watched else None

        sys.settrace(called)
        try:
            with (
                suppress(KeyboardInterrupt),
                instrument.profile(tmp_path, schedule=schedule, on_summary=lambda text: None) as prof,
            ):
                for _ in range(4):
                    with suppress(KeyboardInterrupt):
                        model(torch.ones(2))
                    with suppress(KeyboardInterrupt):
                        prof.step()
        finally:
            sys.settrace(None)
        prof.stop()  # the rest of the end, as at exit
        assert (0, []) == (dispatch.active.warm_up_count, list(model._forward_hooks)), places
        return stacks

    methods = [value for of in (Recording, ActiveEmitters) for value in vars(of).values() if isfunction(value)]
    watched = {unwrap(method).__code__ for method in methods}
    with instrument.annotate_modules(model):
        lines_before(0)  # imports what a profile needs
        moments = lines_before(0)
        assert len(moments) > 50
        for at in moments.values():
            lines_before(at)
