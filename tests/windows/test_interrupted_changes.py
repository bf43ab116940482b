"""A signal handler of the program stops a profile, raises or does both, at any moment of its windows."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import instrument
from instrument.exporters.sessions import sessions
from instrument.exporters.torch_profiler import TorchProfilerCapture
from instrument.windows.profile import Profile
from instrument.windows.steps import Count, Steps

from ..support import programs
from .training import manifest, statuses

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signals")
# Of some 700: a signal is handled where a function begins, and after each call of one in C.
MOMENTS = 700 if os.environ.get("INSTRUMENT_FUZZ") == "all" else 8
SEED = os.environ.get("INSTRUMENT_FUZZ_SEED") or str(random.randrange(1 << 32))  # of the moments that are drawn


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_stop_while_torch_stops(tmp_path: Path, device: str) -> None:
    """The signal comes while torch reads what it recorded: the process lives, and the window is saved once."""
    script = programs.program(CLOSING, tmp_path)
    done = programs.run(programs.python(script, [str(tmp_path / "out"), device]), programs.environment())
    inside, running, later = json.loads(done.stdout.splitlines()[-1])
    assert [True, False] == [inside, running]
    assert [(1, "recorded")] == statuses(manifest(tmp_path / "out"))
    assert [(1, "recorded")] == statuses(later)


CLOSING = """
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
    """From the profile's start to its end, whatever function is entered or left, of torch's as of the library.

    Nothing stays on or patched, each window has one line, whose files exist, and a later profile records.
    """
    print(f"INSTRUMENT_FUZZ_SEED={SEED} draws the same moments again")
    script = programs.program(SWEPT, tmp_path)
    arguments = [str(tmp_path / "out"), what, str(MOMENTS), SEED]
    environment = programs.environment({"INSTRUMENT_SUMMARY": "0"})
    done = programs.run(programs.python(script, arguments), environment, timeout=300 + 5 * MOMENTS)
    swept, wrong, later = json.loads(done.stdout.splitlines()[-1])
    assert [] == wrong
    assert swept >= MOMENTS / 2
    assert [(1, "recorded"), (2, "recorded")] == statuses(later)


SWEPT = """
    import json, random, signal, sys
    from collections import Counter
    from pathlib import Path

    import torch, instrument
    from instrument.cuda_graphs import cuda_graphs
    from instrument.exporters.sessions import sessions
    from instrument.windows.profile import Profile

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

        def look(frame, event, function):
            if event not in ("call", "c_return"):
                return
            name = function.__qualname__ if event == "c_return" else ""
            here = frame.f_code.co_filename, frame.f_code.co_name, name
            if seen is not None and frame.f_code is not run.__code__:
                seen.setdefault(here)
            if here == moment and not fired:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGUSR1)

        signal.signal(signal.SIGUSR1, handle)
        prof = instrument.profile(folder, schedule="1,3")
        try:
            sys.setprofile(look)
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

    def state(prof):
        try:
            lines = [json.loads(line) for line in (prof.out / "manifest.jsonl").read_text().splitlines()]
        except OSError:
            lines = []
        if lines or prof._process:  # else it was interrupted before it started
            assert {1: 1, 2: 1} == Counter(line["window"] for line in lines), lines
        assert sorted(prof.windows, key=str) == sorted(lines, key=str)
        missing = [file for line in lines for file in line["files"] if not (prof.out / file["path"]).exists()]
        assert not missing, missing
        assert not torch.autograd._profiler_enabled()
        assert before == patched()
        assert not prof._started and not Profile._running and sessions.owner is None
        assert not cuda_graphs._followers and not cuda_graphs._patches

    before, seen = patched(), {}
    run(out / "first")  # imports what is needed
    run(out / "second", seen=seen)
    moments = draw.sample(list(seen), min(count, len(seen)))
    swept, wrong = 0, []
    for number, moment in enumerate(moments):
        prof, fired = run(out / str(number), moment)
        swept += fired
        try:
            state(prof)
        except AssertionError as error:
            wrong.append([moment, repr(error)])
    print(json.dumps([swept, wrong, run(out / "later")[0].windows]))
"""


def by_hand(prof: Profile) -> None:
    """Train with windows of steps that the program announces."""
    with prof:
        for _ in range(5):
            torch.ones(3) + 1
            prof.step()


def by_items(prof: Profile) -> None:
    """Train with windows of the items that `instrument.steps` hands out."""
    count = Count(prof, None, 0, {})
    for _ in Steps(range(5), count, lambda: count):
        torch.ones(3) + 1


def abandoned(prof: Profile) -> None:
    """Train with windows of steps that the program announces, and abandon the profile in the end."""
    prof.start()
    try:
        for _ in range(5):
            torch.ones(3) + 1
            prof.step()
    finally:
        prof.abandon("another one begins")


Way = Callable[[Profile], None]  # how a profile is driven
Place = tuple[str, str]  # a file and a function in it


@pytest.mark.parametrize("way", [by_hand, by_items, abandoned])
def test_an_interrupt_while_a_window_is_given_up(
    tmp_path: Path, lenient: None, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    """Its stop failed; then Ctrl-C comes where any function begins that takes the window off."""
    for name in ("first", "second"):  # the first one imports what is needed
        prof = instrument.profile(tmp_path / name, schedule="1,3")
        places = list(give_up_a_window(prof, monkeypatch, way))
        prof.stop()
    assert len(places) > 20
    print(f"INSTRUMENT_FUZZ_SEED={SEED} draws the same moments again")
    for number, place in enumerate(random.Random(int(SEED)).sample(places, min(len(places), MOMENTS))):
        prof = instrument.profile(tmp_path / str(number), schedule="1,3")
        with pytest.raises(KeyboardInterrupt):
            give_up_a_window(prof, monkeypatch, way, place)
        assert not torch.autograd._profiler_enabled(), place
        prof.stop()  # as the end of the process does
        assert (sessions.owner, list(Profile._running)) == (None, []), place
        numbers = [window["window"] for window in prof.windows]
        assert len(set(numbers)) == len(numbers), (place, numbers)
        with instrument.profile(tmp_path / str(number) / "later", schedule="1") as later:
            for _ in range(3):
                later.step()
        assert statuses(later.windows) == [(1, "recorded")], place


def give_up_a_window(
    prof: Profile, monkeypatch: pytest.MonkeyPatch, way: Way, place: Place | None = None
) -> dict[Place, None]:
    """The window's stop fails, and Ctrl-C comes at the start of each function that cleans up after it.

    Returns:
        All such places; with ``place``, Ctrl-C comes at that one alone.
    """
    stop, give_up = TorchProfilerCapture.stop, Profile._give_up
    failed, pressed, places = list[bool](), list[bool](), dict[Place, None]()

    def fail_once(capture: TorchProfilerCapture) -> None:
        if not failed:
            failed.append(True)
            raise ValueError("cannot stop")
        stop(capture)

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            here = frame.f_code.co_filename, frame.f_code.co_name
            if any(folder in here[0] for folder in ("instrument", "torch")):
                places.setdefault(here)
            if here == place and not pressed:
                pressed.append(True)
                sys.setprofile(None)
                raise KeyboardInterrupt

    def watched(prof: Profile, *arguments: Any) -> None:
        sys.setprofile(look)
        try:
            give_up(prof, *arguments)
        finally:
            sys.setprofile(None)

    with monkeypatch.context() as patch:
        patch.setattr(TorchProfilerCapture, "stop", fail_once)
        patch.setattr(Profile, "_give_up", watched)
        way(prof)
    return places
