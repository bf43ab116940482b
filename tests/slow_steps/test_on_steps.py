"""The functions of `on_steps` get the numbers of the steps of a loop."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import instrument
from instrument.base.config import settings
from instrument.record.slow_steps import step_reports
from instrument.record.slow_steps.box import BlackBox
from instrument.record.slow_steps.step_numbers import chosen_functions

from .conftest import MS, Clock

Steps = list[instrument.StepNumbers]
PARTS = {"data": 2.0, "forward": 3.0, "other": 1.0}


@pytest.fixture
def box_with(make: Callable[..., BlackBox]) -> Callable[..., BlackBox]:
    """Make boxes that run, with the functions of ``on_steps``."""

    def made(*on_steps: Any, **options: Any) -> BlackBox:
        return make(reported=step_reports.Reported(chosen_functions(on_steps) or ()), **options)

    return made


def run(box: BlackBox, clock: Clock, count: int, **parts: float) -> None:
    """Run steps of 6 ms; ``parts`` changes or adds parts, in ms."""
    for _ in range(count):
        for name, ms in {**PARTS, **parts}.items():
            if name == "other":
                clock.advance(ms)
            else:
                with instrument.annotate(name):
                    clock.advance(ms)
        box.step()


def without_prefix(numbers: instrument.StepNumbers) -> dict[str, float]:
    assert all(name.startswith("instrument/") for name in numbers)
    return {name.removeprefix("instrument/"): value for name, value in numbers.items()}


def test_the_numbers_of_an_interval(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """Every hundredth step the function gets the times of the last hundred, exactly."""
    got: Steps = []
    box = box_with(got.append)
    run(box, clock, 150)
    run(box, clock, 2, data=10.0)
    run(box, clock, 48)
    assert [99, 199] == [numbers["instrument/step"] for numbers in got]
    assert {
        "step": 199, "steps": 100, "slow_steps": 2, "step_time_mean_s": pytest.approx(0.00616),
        "step_time_p50_s": 0.006, "step_time_p99_s": 0.014, "step_time_max_s": 0.014,
        "phase_data_s": pytest.approx(0.00216), "phase_forward_s": 0.003, "phase_other_s": pytest.approx(0.001),
        "windows": 0,
    } == without_prefix(got[1])  # fmt: skip
    assert (100, [150, 151]) == (got[1].first_step, [slow.step for slow in got[1].slow_steps])
    assert [6 * MS] * 50 + [14 * MS] * 2 + [6 * MS] * 48 == list(got[1].durations_ns)
    assert (0, 1, None) == (got[1].rank, got[1].world_size, got[1].run)
    assert all(type(value) in (int, float) for value in got[1].values())


def test_the_first_step_belongs_to_the_start(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """Compilation in the first step is in no number."""
    got: Steps = []
    box = box_with(instrument.every(10, got.append))
    run(box, clock, 1, forward=9000.0)
    run(box, clock, 9)
    assert (9, 0.006) == (got[0]["instrument/steps"], got[0]["instrument/step_time_max_s"])


def test_p99_is_of_the_nearest_rank(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """Of 100 steps it is the 99th, of fewer the longest one."""
    got: Steps = []
    box = box_with(instrument.every(100, got.append), instrument.every(50, got.append))
    for ms in range(1, 201):
        clock.advance(ms)
        box.step()
    assert [0.05, 0.099 + 0.001, 0.1, 0.15, 0.199, 0.2] == [
        numbers["instrument/step_time_p99_s"] for numbers in got
    ]


@pytest.mark.parametrize("steps", [1, 7, 31, 32, 33, 64, 100, 1500])
def test_any_interval(clock: Clock, box_with: Callable[..., BlackBox], steps: int) -> None:
    """Intervals of any length, also longer than the ring, are complete and in order; the rest comes at the end."""
    got: Steps = []
    box = box_with(instrument.every(steps, got.append))
    expected = []
    for step in range(3333):
        clock.advance(1 + step % 5)
        expected.append((1 + step % 5) * MS)
        box.step()
    box.stop()
    assert expected[1:] == [ns for numbers in got for ns in numbers.durations_ns]
    first = 1 if steps == 1 else 0  # the first step of a run is not summed
    assert list(range(first, 3333, steps)) == [numbers.first_step for numbers in got]
    assert 3332 == got[-1]["instrument/step"]


def test_several_functions_each_have_their_interval(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """Two functions do not disturb each other."""
    few: Steps = []
    many: Steps = []
    box = box_with(instrument.every(40, many.append), instrument.every(7, few.append))
    run(box, clock, 84)
    box.stop()
    assert [39, 79, 83] == [numbers["instrument/step"] for numbers in many]
    assert [*range(6, 84, 7)] == [numbers["instrument/step"] for numbers in few]


def test_a_resumed_run_calls_at_the_same_steps(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """Calls come at multiples of the interval, whatever step a run begins with."""
    got: Steps = []
    box = box_with(instrument.every(10, got.append), first_step=1004)
    run(box, clock, 20)
    box.stop()
    assert [(1004, 1009, 5), (1010, 1019, 10), (1020, 1023, 4)] == [
        (numbers.first_step, numbers["instrument/step"], numbers["instrument/steps"]) for numbers in got
    ]


def test_evaluation_and_checkpoint_are_apart(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """A step that contains one counts without it; pauses and recorded steps do not count."""
    got: Steps = []
    box = box_with(instrument.every(10, got.append, samples=3))
    run(box, clock, 4)
    run(box, clock, 1, evaluation=500.0, checkpoint=100.0)
    box.pause()
    clock.advance(700)
    box.resume()
    box.hold()
    run(box, clock, 2, data=50.0)
    box.resume()
    run(box, clock, 3)
    numbers = without_prefix(got[0])
    assert (7, 0.006, 0.006) == (numbers["steps"], numbers["step_time_mean_s"], numbers["step_time_max_s"])
    assert pytest.approx(500) == numbers["samples_per_s"]
    assert pytest.approx(0.5 / 7) == numbers["phase_evaluation_s"]
    assert pytest.approx(0.1 / 7) == numbers["phase_checkpoint_s"]
    assert pytest.approx(0.001) == numbers["phase_other_s"]


def test_a_step_that_an_evaluation_makes_slow_does_not_count(
    clock: Clock, box_with: Callable[..., BlackBox]
) -> None:
    """The box has it, the numbers have only the step that was slow in another phase."""
    got: Steps = []
    box = box_with(got.append)
    run(box, clock, 50)
    run(box, clock, 1, evaluation=500.0)
    run(box, clock, 1, forward=70.0)
    run(box, clock, 48)
    assert [50, 51] == [slow.step for slow in box.slow_steps]
    assert (1, [51]) == (got[0]["instrument/slow_steps"], [slow.step for slow in got[0].slow_steps])


def test_samples_and_tokens(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """A number is that of a step, a function has the total so far; one that fails is left out."""
    got: Steps = []
    seen = [100]
    box = box_with(instrument.every(10, got.append, samples=12, tokens=lambda: seen[0]))
    for _ in range(21):
        seen[0] += 60
        run(box, clock, 1)
    assert pytest.approx(2000) == got[1]["instrument/samples_per_s"]
    assert pytest.approx(10_000) == got[1]["instrument/tokens_per_s"]


def test_errors_do_not_reach_the_loop(
    clock: Clock, box_with: Callable[..., BlackBox], lenient: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The function fails each time, which is logged once; a failing count only costs its number."""
    got: Steps = []

    def fail(numbers: object) -> None:
        raise RuntimeError("no network")

    box = box_with(instrument.every(10, fail), instrument.every(10, got.append, samples=lambda: 1 // 0))
    run(box, clock, 30)
    box.stop()
    assert 3 == len(got)
    assert "instrument/samples_per_s" not in got[2]
    assert 1 == sum("on_steps failed" in record.getMessage() for record in caplog.records)


def test_the_time_of_the_function_is_in_no_step(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """A logger that takes a second does not make a step slow."""
    got: Steps = []

    def report(numbers: instrument.StepNumbers) -> None:
        got.append(numbers)
        clock.advance(1000)

    box = box_with(instrument.every(10, report))
    run(box, clock, 100)
    assert {0.006} == {numbers["instrument/step_time_max_s"] for numbers in got}
    assert not box.slow_steps


def test_go_to_ends_an_interval(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """The steps before a jump are reported, and none is twice."""
    got: Steps = []
    box = box_with(instrument.every(10, got.append))
    run(box, clock, 13)
    box.go_to(5)
    run(box, clock, 7)
    box.stop()
    assert [(0, 9), (10, 12), (5, 9), (10, 11)] == [
        (numbers.first_step, numbers["instrument/step"]) for numbers in got
    ]
    assert 9 + 3 + 5 + 2 == sum(len(numbers.durations_ns) for numbers in got)


def test_close_at_the_end(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """What has a `close` is closed once, after the rest."""
    calls: list[object] = []

    class Exporter:
        def __call__(self, numbers: instrument.StepNumbers) -> None:
            calls.append(numbers["instrument/step"])

        def close(self) -> None:
            calls.append("closed")

    box = box_with(instrument.every(4, Exporter()))
    run(box, clock, 6)
    box.stop()
    box.stop()
    assert [3, 5, "closed"] == calls


def test_an_empty_rest_is_not_reported(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """A loop that ends with an interval has no rest; nor has one without steps."""
    got: Steps = []
    box = box_with(instrument.every(5, got.append))
    run(box, clock, 10)
    box.stop()
    box_with(got.append).stop()
    assert [4, 9] == [numbers["instrument/step"] for numbers in got]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reports_nothing(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """The copy of a box in a child calls no function."""
    got: list[int] = []
    box = box_with(instrument.every(5, lambda _: got.append(os.getpid())))
    run(box, clock, 5)
    child = os.fork()
    if not child:
        run(box, clock, 20)
        box.stop()
        os._exit(len(got))
    assert 1 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_waits_are_those_of_the_outermost_detector(
    clock: Clock, box_with: Callable[..., BlackBox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are means over the steps that the detector checked, from the begin of the interval on."""

    class Totals:
        syncs, blocked_ns, untimed, steps = 7, 700, 0, 7

    totals = Totals()
    monkeypatch.setattr(step_reports, "sync_totals", [totals])
    got: Steps = []
    box = box_with(instrument.every(10, got.append))
    run(box, clock, 10)
    totals.syncs, totals.blocked_ns, totals.steps = 13, 4_000_700, 9
    run(box, clock, 10)
    assert "instrument/syncs" not in got[0]
    assert (3, 0.002) == (got[1]["instrument/syncs"], got[1]["instrument/sync_wait_s"])
    assert {"syncs": 6, "sync_wait_s": 0.004} == got[1].totals
    totals.syncs, totals.untimed, totals.steps = 14, 1, 10
    run(box, clock, 10)
    assert {"syncs": 1} == got[2].totals
    assert "instrument/sync_wait_s" not in got[2]


def test_totals_count_the_steps_that_are_not_summed(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """Samples are those of all steps, while times and rates leave out the first one."""
    got: Steps = []
    tokens = [0]
    box = box_with(instrument.every(10, got.append, samples=32, tokens=lambda: tokens[0]))
    for _ in range(10):
        tokens[0] += 7
        run(box, clock, 1)
    assert {"samples": 320, "tokens": 70} == got[0].totals
    assert 9 == got[0]["instrument/steps"]


def test_steps_that_go_back(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """After a jump below the first step all steps are summed; a jump in the first step leaves that one out."""
    got: Steps = []
    box = box_with(instrument.every(10, got.append), first_step=1000)
    run(box, clock, 10)
    box.go_to(900)
    run(box, clock, 10)
    assert [9, 10] == [each["instrument/steps"] for each in got]
    resumed: Steps = []
    box = box_with(instrument.every(10, resumed.append))
    box.go_to(500)
    run(box, clock, 10)
    assert [(500, 9)] == [(each.first_step, each["instrument/steps"]) for each in resumed]


def test_a_count_that_begins_anew(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """How much the interval took is then unknown."""
    got: Steps = []
    counts = iter([50, 90, 10, 40])
    box = box_with(instrument.every(10, got.append, samples=lambda: next(counts)))
    run(box, clock, 30)
    assert [{"samples": 40}, {}, {"samples": 30}] == [each.totals for each in got]
    assert "instrument/samples_per_s" not in got[1]


def test_an_interrupt_in_a_function(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """It reaches the program; the next call comes when it is due, and all functions are closed."""

    class Closing(Steps):
        closed = 0
        interrupts = False

        def __call__(self, numbers: instrument.StepNumbers) -> None:
            self.append(numbers)
            if self.interrupts or len(self) == 1:
                raise KeyboardInterrupt

        def close(self) -> None:
            self.closed += 1

    first, second = Closing(), Closing()
    box = box_with(instrument.every(10, first), instrument.every(10, second))
    for _ in range(2):  # each function interrupts once
        with pytest.raises(KeyboardInterrupt):
            run(box, clock, 10)
    run(box, clock, 20)
    assert [9, 19, 29, 39] == [each["instrument/step"] for each in first]
    first.interrupts = True
    run(box, clock, 1)
    with pytest.raises(KeyboardInterrupt):
        box.stop()
    assert (1, 1) == (first.closed, second.closed)


def test_a_function_that_ends_a_step(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """The step counts, and the function is not called in itself."""
    got: Steps = []

    def log(numbers: instrument.StepNumbers) -> None:
        got.append(numbers)
        box.step()

    box = box_with(instrument.every(1, log))
    run(box, clock, 5)
    assert 4 == len(got)
    assert 9 == box.step_num


@pytest.mark.parametrize("name", ["eval", "validate", "train.validation", "evaluation"])
def test_names_of_evaluations(clock: Clock, box_with: Callable[..., BlackBox], name: str) -> None:
    """Their time is in no step."""
    got: Steps = []
    box = box_with(instrument.every(10, got.append))
    run(box, clock, 9)
    with instrument.annotate(name):
        clock.advance(500)
    run(box, clock, 1)
    assert 0.006 == got[0]["instrument/step_time_max_s"]
    assert 0.5 == pytest.approx(got[0]["instrument/phase_evaluation_s"] * 9)


def test_numbers_can_be_pickled(clock: Clock, box_with: Callable[..., BlackBox]) -> None:
    """With their attributes, as queues between processes need it."""
    got: Steps = []
    run(box_with(instrument.every(10, got.append, samples=2)), clock, 10)
    copy = pickle.loads(pickle.dumps(got[0]))
    assert (copy, copy.durations_ns, copy.totals) == (got[0], got[0].durations_ns, {"samples": 20})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0, print), ValueError, '"steps" must be an integer >= 1: 0'),
        ((100_001, print), ValueError, '"steps" must be an integer <= 100000: 100001'),
        (("10", print), TypeError, "\"steps\" must be an integer >= 1: '10'"),
        ((10, None), TypeError, '"function" must be a function: None'),
        ((10, print, 0), ValueError, '"samples" must be an integer >= 1 or a function: 0'),
        ((10, print, None, "x"), TypeError, "\"tokens\" must be an integer >= 1 or a function: 'x'"),
    ],
)
def test_wrong_arguments_of_every(arguments: Any, error: type[Exception], text: str) -> None:
    """The error names the argument and its value."""
    with pytest.raises(error) as caught:
        instrument.every(*arguments)
    assert text == str(caught.value)


@pytest.mark.parametrize("wrong", [5, "log", [5], {"a": 1}])
def test_wrong_on_steps(wrong: Any) -> None:
    """What is no function is refused by everything that takes `on_steps`."""
    for make in (
        instrument.black_box,
        instrument.profile,
        lambda on_steps: instrument.steps([], on_steps=on_steps),
    ):
        with pytest.raises(TypeError, match='"on_steps" must be a function, an instrument'):
            make(on_steps=wrong)


def test_off_means_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """With INSTRUMENT=0 no function is called."""
    monkeypatch.setattr(settings, "enabled", False)
    got: Steps = []
    with instrument.black_box(on_steps=instrument.every(1, got.append)) as box:
        for _ in range(5):
            box.step()
    assert [] == got
