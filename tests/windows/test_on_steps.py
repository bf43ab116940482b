"""`on_steps` of `profile` and `steps`: the numbers of the steps beside the windows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.base.config import settings
from instrument.record.slow_steps import step_clock

from .training import manifest

MS = 1_000_000
Steps = list[instrument.StepNumbers]


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let a number of ms pass, by a clock of the test."""
    now_ns = [1]
    monkeypatch.setattr(step_clock, "perf_counter_ns", lambda: now_ns[0])

    def passed(ms: float) -> None:
        now_ns[0] += int(ms * MS)

    return passed


class Taken(Steps):
    """A function that also takes windows without a timed step."""

    takes_windows = True
    __call__ = Steps.append


def spans(got: Steps) -> list[tuple[int, float, float]]:
    """Return the first step, the last one and the number of summed ones of each call."""
    return [(each.first_step, each["instrument/step"], each["instrument/steps"]) for each in got]


def test_recorded_steps_are_not_summed(out: Path, take: Callable[[float], None]) -> None:
    """Steps in a window take longer; the numbers say what the others took, and which window there was."""
    got: Steps = []
    chosen = instrument.schedule(at="14-15", warmup=1)
    began_ns = time.time_ns()
    with instrument.profile(out, schedule=chosen, on_steps=instrument.every(10, got.append)) as prof:
        for step in range(28):
            take(90 if step in (13, 14, 15) else 3)
            prof.step()
    assert [(0, 9, 9), (10, 19, 7), (20, 27, 8)] == spans(got)
    assert {0.003} == {each["instrument/step_time_max_s"] for each in got}
    assert [0, 1, 1] == [each["instrument/windows"] for each in got]
    (window,) = got[1].windows
    (line,) = manifest(out)
    assert (line["window"], *line["steps"]) == (window.window, window.first_step, window.last_step)
    assert began_ns < window.begin_ns < window.end_ns < time.time_ns()
    assert [out / file["path"] for file in line["files"]] == list(window.files)
    assert all(file.exists() for file in window.files)
    assert ([], []) == (list(got[0].windows), list(got[2].windows))
    assert {out} == {each.run for each in got}
    assert prof.black_box is None


@pytest.mark.parametrize(("samples", "told"), [(32, "32"), (lambda: 7, None), (None, None)])
def test_a_trace_has_the_samples_of_a_step(out: Path, samples: Any, told: str | None) -> None:
    """Where their number is told, so that what is measured for a step is known for a sample."""
    chosen = instrument.schedule(at="2-3")
    on_steps = [print, instrument.every(10, print, samples=samples)]
    with instrument.profile(out, schedule=chosen, on_steps=on_steps) as prof:
        for _ in range(5):
            prof.step()
    (trace,) = instrument.read_traces(out).values()
    assert trace.metadata.get("instrument_samples") == told


def test_a_window_at_the_end_is_in_the_last_call(out: Path) -> None:
    """The loop ends in a window, which ends before the last call."""
    got = Taken()
    chosen = instrument.schedule(at="8-20")
    with instrument.profile(out, schedule=chosen, on_steps=instrument.every(10, got)) as prof:
        for _ in range(13):
            prof.step()
    assert [(8, 12)] == [(window.first_step, window.last_step) for window in got[-1].windows]
    assert 1 == got[-1]["instrument/windows"]


def test_a_window_that_ends_with_the_loop_is_reported(out: Path) -> None:
    """The last call has the window, also if no step is left, for a function that takes windows."""
    got, plain = Taken(), Steps()
    chosen = instrument.schedule(at="8-9")
    on_steps = [instrument.every(10, got), instrument.every(10, plain.append)]
    with instrument.profile(out, schedule=chosen, on_steps=on_steps) as prof:
        for _ in range(10):
            prof.step()
    assert [[], [(8, 9)]] == [[window[2:4] for window in each.windows] for each in got]
    assert [(0, 9, 7), (10, 9, 0)] == spans(got)
    assert [(0, 9, 7)] == spans(plain)


def test_an_interval_in_a_window_gives_no_call(out: Path, take: Callable[[float], None]) -> None:
    """No step in it is summed; the next call has the window."""
    got: Steps = []
    chosen = instrument.schedule(at="10-14", warmup=1)
    with instrument.profile(out, schedule=chosen, on_steps=instrument.every(5, got.append)) as prof:
        for _ in range(20):
            take(3)
            prof.step()
    assert [(0, 4, 4), (5, 9, 4), (15, 19, 5)] == spans(got)
    assert [0, 0, 1] == [len(each.windows) for each in got]
    assert all("instrument/step_time_p50_s" in each for each in got)


def test_the_time_of_the_function_is_in_no_step_of_the_run(out: Path) -> None:
    """Neither the lengths of the run nor the numbers contain it."""
    chosen = instrument.schedule(at="3-4")
    with instrument.profile(
        out, schedule=chosen, on_steps=instrument.every(10, lambda _: time.sleep(0.1))
    ) as prof:
        for _ in range(60):
            time.sleep(0.001)
            prof.step()
    (line,) = (out / "runs.jsonl").read_text().splitlines()
    lengths = json.loads(line)["lengths"]
    assert lengths["recording_ns"] > 0.5e9
    assert lengths["typical_ns"] + lengths["slow_ns"] < 0.5e9


def test_without_a_schedule_nothing_is_recorded(out: Path, take: Callable[[float], None]) -> None:
    """Neither is a window of the default schedule opened, nor one at a slow step."""
    got: Steps = []
    with instrument.profile(out, on_steps=got.append) as prof:
        for step in range(150):
            take(60 if step == 110 else 3)
            prof.step()
    for _ in instrument.steps(range(120), out, on_steps=got.append):
        take(3)
    assert [(0, 99, 99), (100, 149, 50), (0, 99, 99), (100, 119, 20)] == spans(got)
    assert [0, 1, 0, 0] == [each["instrument/slow_steps"] for each in got]
    assert not out.exists()


@pytest.mark.parametrize("none", [[], [None], ()])
def test_no_function_records_nothing_either(out: Path, none: Any) -> None:
    """As on ranks whose list has no function; `None` is not given."""
    with instrument.profile(out, on_steps=none) as prof:
        prof.step()
    for _ in instrument.steps(range(3), out, on_steps=none):
        pass
    assert not out.exists()


def test_with_a_black_box_a_slow_step_opens_a_window(out: Path, take: Callable[[float], None]) -> None:
    """Both use one clock."""
    got: Steps = []
    with instrument.profile(out, black_box=True, trigger_steps=2, on_steps=got.append) as prof:
        for step in range(150):
            take(60 if step == 110 else 3)
            prof.step()
    assert [110] == [slow.step for slow in got[1].slow_steps]
    assert 1 == got[1]["instrument/windows"]


def test_epochs_report_the_rest(out: Path, take: Callable[[float], None]) -> None:
    """Each loop over the items ends an interval; the next one goes on with the count."""
    got: Steps = []
    iterator = instrument.steps(range(25), out, on_steps=instrument.every(10, got.append))
    for _ in range(2):
        for _ in iterator:
            take(3)
        take(1000)
    assert [(0, 9, 9), (10, 19, 10), (20, 24, 5), (25, 29, 5), (30, 39, 10), (40, 49, 10)] == spans(got)
    assert {0.003} == {each["instrument/step_time_max_s"] for each in got}


def test_a_loop_that_fails_reports_the_rest(out: Path) -> None:
    """The steps before the error are reported; the one that failed has not ended."""
    got: Steps = []
    with pytest.raises(KeyError), instrument.profile(out, on_steps=instrument.every(10, got.append)) as prof:
        for step in range(20):
            if step == 13:
                raise KeyError
            prof.step()
    assert [(0, 9, 9), (10, 12, 3)] == spans(got)


def test_a_last_step_without_a_call_counts(out: Path) -> None:
    """An adapter ends the last step with the run."""
    got: Steps = []
    prof = instrument.profile(out, on_steps=got.append)
    prof.start()
    for _ in range(4):
        prof.step()
    prof.end(complete=True)
    assert [(0, 4, 4)] == spans(got)


def test_a_phase_is_left_out(out: Path, take: Callable[[float], None]) -> None:
    """An evaluation as a phase of the profile neither takes time of a step nor counts steps."""
    got: Steps = []
    with instrument.profile(out, on_steps=instrument.every(10, got.append)) as prof:
        for step in range(20):
            take(3)
            prof.step()
            if step % 5 == 4:
                with prof.phase("evaluation"):
                    for _ in range(7):
                        take(100)
                        prof.step()
    assert [(0, 9, 9), (10, 19, 10)] == spans(got)
    assert {0.003} == {each["instrument/step_time_max_s"] for each in got}


def test_gradient_accumulation(out: Path, take: Callable[[float], None]) -> None:
    """Several items are one step."""
    got: Steps = []
    reported = instrument.every(5, got.append, samples=8)
    for _ in instrument.steps(range(40), out, accumulate=4, on_steps=reported):
        take(3)
    assert [(0, 4, 4), (5, 9, 5)] == spans(got)
    assert (0.012, pytest.approx(8 / 0.012)) == (
        got[1]["instrument/step_time_max_s"], got[1]["instrument/samples_per_s"]
    )  # fmt: skip


def test_a_jump_of_the_count(out: Path) -> None:
    """A loop that goes to another step reports what came before."""
    got: Steps = []
    with instrument.profile(out, on_steps=instrument.every(10, got.append), first_step=5) as prof:
        for step in range(5, 23):
            prof.step(100 if step == 12 else None)
    assert [(5, 9, 4), (10, 12, 3), (100, 109, 10)] == spans(got)


def test_ranks_that_record_nothing_report_too(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank has its numbers, whichever records."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    got: Steps = []
    with instrument.profile(out, schedule="2-3", ranks=[0], on_steps=instrument.every(10, got.append)) as prof:
        for _ in range(10):
            prof.step()
    assert [(3, 4)] == [(each.rank, each.world_size) for each in got]
    assert not out.exists()


def test_off_means_off(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With INSTRUMENT=0 no function is called."""
    monkeypatch.setattr(settings, "enabled", False)
    got: Steps = []
    for _ in instrument.steps(range(5), out, on_steps=instrument.every(1, got.append)):
        pass
    assert [] == got


def test_close_comes_once_at_the_end_of_the_run(out: Path) -> None:
    """After the last call; the end of an epoch is not the end of the run."""
    calls: list[Any] = []

    class Exporter:
        def __call__(self, numbers: instrument.StepNumbers) -> None:
            calls.append(numbers["instrument/step"])

        def close(self) -> None:
            calls.append("closed")

    prof = instrument.profile(out, on_steps=instrument.every(4, Exporter()))
    prof.start()
    for _ in range(6):
        prof.step()
    prof.pause(begun=True)
    assert [3, 5] == calls
    prof.start()
    prof.step()
    prof.stop()
    prof.stop()
    assert [3, 5, 6, "closed"] == calls


def test_the_function_may_stop_the_profile(out: Path) -> None:
    """It is called on the loop's thread, between two steps."""
    got: Steps = []

    def stop(numbers: instrument.StepNumbers) -> None:
        got.append(numbers)
        prof.stop()

    prof = instrument.profile(out, on_steps=instrument.every(5, stop))
    with prof:
        for _ in range(12):
            prof.step()
    assert [(0, 4, 4)] == spans(got)
