"""Tests of `step` and `stop` on other threads, and of forks inside a window."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import instrument
from instrument.record.exporters.sessions import OTHER_WINDOW

from ..support import programs, warm
from .training import (
    STEPS,
    Recorder,
    expected,
    manifest,
    recorded,
    statuses,
    steps,
    traces,
    train,
)

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("lenient")]


def call_in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_step_on_another_thread(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step on another thread counts; the window stays open until the thread that opened it steps again."""
    with instrument.profile(out, schedule=instrument.schedule("2-3")) as prof:
        trained = train(STEPS, lambda: call_in_thread(prof.step) if prof.step_num in (2, 3) else prof.step())
    assert expected(STEPS) == trained
    assert STEPS == prof.step_num
    (entry,) = manifest(out)
    assert "partial" == entry["status"]
    assert "steps ended on another thread than the one that opened the window" == entry["reason"]
    assert [2] == steps(traces(out)[0])
    assert 1 == caplog.text.count("on another thread than the one that opened the window")


def test_a_thread_for_each_step(out: Path) -> None:
    """Each window that no thread stays for is skipped, with a line; a thread that stays records a later one."""
    schedule = instrument.schedule(wait=1, warmup=0, active=2, repeat=5)
    with instrument.profile(out, schedule=schedule) as prof:
        for _ in range(12):
            call_in_thread(prof.step)
        train(4, prof.step)
    lines = manifest(out)
    assert [(1, "skipped"), (2, "skipped"), (3, "skipped"), (4, "skipped"), (5, "recorded")] == statuses(lines)
    assert all("the thread of the window ended" in line["reason"] for line in lines[:4])


def test_two_windows_that_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a window of one thread prepares, that of another thread is skipped; torch would crash with both."""
    first, second = tmp_path / "first", tmp_path / "second"
    prepare = torch.profiler.profile.prepare_trace

    def record(out: Path) -> None:
        with instrument.profile(out, schedule="1") as prof:
            train(3, prof.step)

    def prepare_beside_another(profiler: torch.profiler.profile) -> None:
        monkeypatch.undo()
        call_in_thread(functools.partial(record, second))
        prepare(profiler)

    monkeypatch.setattr(torch.profiler.profile, "prepare_trace", prepare_beside_another)
    record(first)
    assert [("recorded", None)] == [(line["status"], line["reason"]) for line in manifest(first)]
    assert [("skipped", OTHER_WINDOW)] == [(line["status"], line["reason"]) for line in manifest(second)]


STOP_ON_ANOTHER_THREAD = """
    import json, sys, threading
    import torch, instrument

    prof = instrument.profile(sys.argv[1], schedule=instrument.schedule("2-3,5"))
    prof.start()
    for number in range(8):
        torch.ones(3).sum()
        if number == 2:
            thread = threading.Thread(target=prof.stop)
            thread.start()
            thread.join(30)
            assert not thread.is_alive()
        prof.step()
    with instrument.profile(sys.argv[1], schedule=instrument.schedule(at=1)) as again:
        for number in range(3):
            again.step()
    print(json.dumps(prof.windows + again.windows))
"""


def test_a_stop_on_another_thread(tmp_path: Path) -> None:
    """Torch cannot stop on another thread, so the next step ends the window; the manifest has the reason."""
    script = programs.program(STOP_ON_ANOTHER_THREAD, tmp_path)
    done = warm.run(programs.python(script, [str(tmp_path / "out")]), programs.environment(), check=True)
    entries = json.loads(done.stdout.splitlines()[-1])
    assert [(1, "skipped"), (2, "not reached"), (1, "recorded")] == statuses(entries)
    assert "the loop ended on another thread than the one that opened the window" == entries[0]["reason"]


FORKING = """
    import json, os, sys, warnings
    import torch, instrument

    warnings.simplefilter("ignore")

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.full((2,), float(index))

    def main():
        total, statuses = 0.0, []
        options = {"num_workers": 2, "multiprocessing_context": "fork"}
        with instrument.profile(sys.argv[1], schedule=instrument.schedule("2-3,6-7")) as prof:
            prof.step()
            prof.step()
            for batch in torch.utils.data.DataLoader(Numbers(), batch_size=2, **options):  # forks inside a window
                total += batch.sum().item()
                prof.step()
            child = os.fork()
            if child == 0:
                for number in range(3):
                    torch.ones(3).sum()
                    prof.step()
                prof.stop()
                os._exit(5)  # as multiprocessing does
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            for number in range(4):
                prof.step()
        return total, statuses, prof.windows

    if __name__ == "__main__":
        print(json.dumps(main()))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_in_a_window(tmp_path: Path) -> None:
    """Workers and children end normally and write no line; the parent's windows are recorded."""
    script = programs.program(FORKING, tmp_path)
    done = warm.run(programs.python(script, [str(tmp_path / "out")]), programs.environment(), check=True)
    total, codes, entries = json.loads(done.stdout.splitlines()[-1])
    assert 56.0 == total
    assert [5] == codes
    assert [(1, "recorded"), (2, "recorded")] == statuses(entries)
    assert entries == manifest(tmp_path / "out")
    assert [[2, 3], [6, 7]] == recorded(tmp_path / "out")


ENDING_FORK = """
    import os, signal, sys
    import torch, instrument

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrument.profile(sys.argv[1], schedule=instrument.schedule("2-4")) as prof:
        for number in range(8):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            prof.step()
            if number == {number}:
                child = os.fork()
                if child == 0:
                    signal.alarm(30)
                    print("the child's output", flush=False)
                    {ending}
    if child:
        print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot end a process without destructors")
@pytest.mark.parametrize(
    ("number", "ending", "status"),
    [(3, "sys.exit(3)", 3), (3, "raise KeyError", 1), (3, "break", 0), (6, "break", 0)],
)
def test_a_fork_ends_as_without_a_window(tmp_path: Path, number: int, ending: str, status: int) -> None:
    """A child that ends like any program neither hangs nor crashes, in a window and after one."""
    script = programs.program(ENDING_FORK.format(number=number, ending=ending), tmp_path)
    done = warm.run(programs.python(script, [str(tmp_path / "out")]), programs.environment(), check=True)
    assert ["the child's output", f"status {status}"] == done.stdout.splitlines()
    assert [(1, "recorded")] == statuses(manifest(tmp_path / "out"))


def test_a_fork_that_abandons_a_profile_keeps_the_parents_windows(out: Path) -> None:
    """Only the parent writes the lines of its windows."""
    with instrument.profile(out, schedule=instrument.schedule("1-2"), exporter=Recorder()) as prof:
        for _ in range(4):
            prof.step()
        number = os.fork()
        if number == 0:
            prof.abandon("in a fork")
            os._exit(len(prof.windows))
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        assert [] == prof.windows
    assert [(1, "recorded")] == statuses(manifest(out))
