"""Tests of `RunLengths`: where the time of a run is, and which slow steps recur."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from instrument.base.run_lengths import RunLengths, StepTally, period_of

MS = 1_000_000


def lengths_of(lengths_ns: Sequence[int], first: int = 0, **outside: Any) -> RunLengths:
    tally = StepTally()
    tally.add(first, lengths_ns)
    return RunLengths.of(tally, StepTally(), **outside)


@pytest.mark.parametrize(
    ("numbers", "every"),
    [
        ([6, 12, 18], 6),
        ([5, 11, 17], 6),  # counted from 1
        ([7, 13, 19], 0),  # three by chance
        ([7, 13, 19, 25], 6),
        ([6, 12], 0),
        ([6, 12, 24], 0),
        ([10, 21, 31, 42, 52, 62], 10),  # a distance of 10.4 steps
        ([10, 21, 31], 0),
        ([3, 4, 5, 6], 0),
        ([], 0),
    ],
)
def test_periods(numbers: list[int], every: int) -> None:
    """Numbers recur if their distances are equal, and chance rarely does that."""
    assert every == period_of(numbers)


def test_two_families_recur_side_by_side() -> None:
    """Steps of different lengths recur at distances of their own, also where both meet."""
    steps = [900 if step % 100 == 99 else 300 if step % 20 == 0 else 50 for step in range(1, 500)]
    found = lengths_of(steps, 1).recurrences()
    assert [(100, (99, 199, 299, 399, 499)), (20, tuple(range(20, 500, 20)))] == [each[:2] for each in found]


@pytest.mark.parametrize("spread", [0.05, 0.2, 0.4])
def test_a_stall_is_found_among_uneven_steps(spread: float) -> None:
    """Whatever the phase of a stall, its period is found where steps vary, but for a few."""
    missed = 0
    for seed in range(200):
        chance = random.Random(seed)
        every, phase = chance.randint(5, 60), chance.randint(0, 59)
        steps = [
            round((25 * chance.lognormvariate(0, spread) + 500 * ((step + phase) % every == 0)) * MS)
            for step in range(6 * every)
        ]
        missed += every not in [each.every for each in lengths_of(steps).recurrences()]
    assert missed <= 2


@pytest.mark.parametrize("spread", [0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("stalls", [0.0, 0.02, 0.1])
def test_chance_has_no_period(spread: float, stalls: float) -> None:
    """Of loops with random lengths and random stalls, at most one in a hundred seems to recur."""
    false = 0
    for seed in range(300):
        chance = random.Random(seed)
        steps = [
            round(25 * chance.lognormvariate(0, spread) * MS * (20 if chance.random() < stalls else 1))
            for _ in range(chance.randint(20, 400))
        ]
        false += bool(lengths_of(steps).recurrences())
    assert false <= 3


def test_an_even_loop_gets_one_sentence() -> None:
    """Steps that are alike are typical, whatever came before them."""
    assert ["100 steps in 2.50 s: 100 % in typical steps of 25.0 ms"] == list(
        lengths_of([25 * MS] * 100).sentences()
    )
    assert ["100 steps in 2.50 s, after 5.00 s of startup: 100 % in typical steps of 25.0 ms"] == list(
        lengths_of([25 * MS] * 100, start_ns=5_000 * MS).sentences()
    )


def test_stalls_of_epochs() -> None:
    """A loop whose every sixth step stalls is not typical; the second sentence says how to record a stall."""
    steps = [525 * MS if step % 6 == 0 else 25 * MS for step in range(1, 24)]
    assert [
        "23 steps in 2.08 s: 24 % in 20 steps of about 25.0 ms; "
        "76 % in every 6th step, of about 525 ms (6, 12, 18)",
        "No window shows a slow step; record one with --steps 11-13",
    ] == list(lengths_of(steps, 1).sentences())


@pytest.mark.parametrize(
    ("epochs", "said"),
    [
        ((0, 6, 12, 18), "76 % in every 6th step, the first of each epoch, of about 525 ms (6, 12, 18)"),
        ((0, 7, 13, 19), "76 % in every 6th step, of about 525 ms (6, 12, 18)"),
        (
            tuple(range(0, 24, 2)),
            "76 % in every 6th step, of about 525 ms (6, 12, 18)",
        ),  # most epochs begin as usual
        ((0, 6), "76 % in every 6th step, of about 525 ms (6, 12, 18)"),  # one may be chance
    ],
)
def test_stalls_at_the_begin_of_epochs(epochs: tuple[int, ...], said: str) -> None:
    """Where slow steps are the first of epochs, and epochs begin with a slow step, the sentence says that."""
    steps = [525 * MS if step % 6 == 0 else 25 * MS for step in range(1, 24)]
    assert next(lengths_of(steps, 1, epochs=epochs).sentences()).endswith(f"; {said}")


def test_epochs_of_different_lengths() -> None:
    """Stalls without a period are explained by epochs, too."""
    lengths = lengths_of(
        [525 * MS if step in (4, 13, 18) else 25 * MS for step in range(24)], epochs=(0, 4, 13, 18)
    )
    said, advice = lengths.sentences()
    assert said.endswith("; 75 % in the first step of each epoch, of about 525 ms (4, 13, 18)")
    assert "No window shows a slow step; record one with --steps 12-14" == advice


def test_a_window_that_shows_a_stall_needs_no_advice() -> None:
    """Once a slow step is recorded, nothing needs to be recorded."""
    steps = [525 * MS if step % 6 == 0 else 25 * MS for step in range(1, 24)]
    (said,) = replace(lengths_of(steps, 1), recorded=(12,)).sentences()
    assert "every 6th step" in said


@pytest.mark.parametrize(("hint", "how"), [("--steps {}", "--black-box"), ('at="{}"', "black_box=True")])
def test_irregular_stalls(hint: str, how: str) -> None:
    """Without a period, the black box opens a window at the next slow step."""
    steps = [525 * MS if step in (4, 7, 20, 29) else 25 * MS for step in range(40)]
    said, advice = lengths_of(steps).sentences(hint)
    assert said.endswith("; 70 % in 4 slow steps (4, 7, 20, 29)")
    assert f"No window shows a slow step; record one with {how}" == advice


def test_a_slow_step_of_the_start_hides_no_period() -> None:
    """A first slow step that is as long as a stall, such as one that compiles, belongs to no period."""
    steps = [500 * MS if step == 1 or (step and step % 6 == 0) else 25 * MS for step in range(30)]
    assert [(6, (6, 12, 18, 24))] == [each[:2] for each in lengths_of(steps).recurrences()]


def test_a_series_that_ended_recurs_no_more() -> None:
    """Slow steps at equal distances at the begin of a long loop, as of a warm-up, are not said to come again."""
    series = [25 * MS if step % 10 or not step else 525 * MS for step in range(31)]
    assert [10] == [each.every for each in lengths_of(series + [25 * MS] * 15).recurrences()]
    assert [] == lengths_of(series + [25 * MS] * 25).recurrences()


@pytest.mark.parametrize("extra", [(50,), (13, 50, 71, 80), (5, 13, 23, 31, 40, 50, 63, 71, 80)])
def test_a_series_among_other_slow_steps(extra: tuple[int, ...]) -> None:
    """Stalls of like length beside a series do not hide it."""
    steps = [110 * MS if step in extra else 100 * MS if step and step % 6 == 0 else 10 * MS for step in range(120)]
    ((every, series, _, _),) = lengths_of(steps).recurrences()
    assert (6, tuple(range(6, 120, 6))) == (every, series)
    assert len(extra) < 9 or "9 other slow steps" in next(lengths_of(steps).sentences())


def test_slow_steps_whose_numbers_are_forgotten() -> None:
    """Only the last slow steps have a number, but all count."""
    (said, _) = lengths_of([110 * MS if step % 10 == 9 else 10 * MS for step in range(1, 3_000)]).sentences()
    assert said.endswith(
        "47 % in every 10th step, of about 110 ms (2948, 2958, 2968, 2978, 2988, 2998, and 250 before); "
        "8 % in 44 earlier slow steps"
    )


def test_time_between_loops() -> None:
    """Where the time is outside of steps, no step is to blame."""
    (said,) = lengths_of([25 * MS] * 40, between_ns=3_000 * MS).sentences()
    assert "40 steps in 4.00 s: 25 % in 40 steps of about 25.0 ms; 75 % between loops" == said


@pytest.mark.parametrize(("share", "word"), [(0.81, True), (0.79, False)])
def test_typical_needs_most_of_the_time(share: float, word: bool) -> None:
    """The word is said only where typical steps have at least 80 % of the time."""
    lengths = lengths_of([25 * MS] * 40, between_ns=round(1_000 * MS * (1 / share - 1)))
    assert word == any("typical" in said for said in lengths.sentences())


def test_too_few_steps_say_nothing() -> None:
    """A handful of steps has no regularity."""
    assert [] == list(lengths_of([25 * MS] * 9).sentences())
    assert [] == list(replace(lengths_of([25 * MS] * 20), typical_ns=0).sentences())  # a file that is damaged


def test_the_time_of_recording() -> None:
    """The time that windows take is left out of the steps; it is named if it is long."""
    lengths = lengths_of([25 * MS] * 20)
    (little,), (much,) = (list(replace(lengths, recording_ns=ns).sentences()) for ns in (MS, 250 * MS))
    assert "recording" not in little
    assert much.startswith("20 steps in 500 ms, beside 250 ms of recording: 100 % in typical steps")


def test_json_round_trip() -> None:
    """What is written to the manifest is read again."""
    lengths = replace(lengths_of([25, 25, 900, 25]), recorded=(2,), epochs=(0, 2))
    assert lengths == RunLengths.from_json(json.loads(json.dumps(lengths.as_json())))


@pytest.mark.parametrize(
    "change", [{"slow": 7}, {"slow": [[1]]}, {"slow": [["a", 2]]}, {"typical_ns": None}, {"usual_ns": -1}]
)
def test_foreign_json_is_not_read(change: dict[str, Any]) -> None:
    """Lengths that this library did not write are left out."""
    good = {**lengths_of([25, 25, 25]).as_json(), "slow": [], "recorded": [], "epochs": []}
    assert RunLengths.from_json(good) is not None
    assert RunLengths.from_json({**good, **change}) is None
    assert RunLengths.from_json(None) is None


@pytest.mark.parametrize("steps", [300, 5_000, 100_000])
@pytest.mark.parametrize(
    ("early", "late", "became"), [(100, 190, "1.9 times as long"), (190, 100, "1.9 times faster")]
)
def test_steps_that_change_at_once_are_not_typical(steps: int, early: int, late: int, became: str) -> None:
    """A loop that becomes slower or faster has no typical step."""
    found = lengths_of([each * MS for each in [early] * (steps // 2) + [late] * (steps // 2)])
    assert not found.are_typical
    (said,) = found.sentences()
    assert f"that became {became} ({early} ms in the first quarter, {late} ms in the last)" in said
    assert RunLengths.from_json(json.loads(json.dumps(found.as_json()))) == found


@pytest.mark.parametrize("steps", [300, 5_000, 100_000])
def test_steps_that_drift_are_not_typical(steps: int) -> None:
    """Bit by bit, too."""
    found = lengths_of([round((100 + 90 * step / steps) * MS) for step in range(steps)])
    assert not found.are_typical
    assert found.change == pytest.approx(179 / 111, rel=0.05)


def test_chance_is_no_drift() -> None:
    """Of loops with random lengths, at most one in a hundred seems to drift."""
    false = 0
    for seed in range(300):
        chance = random.Random(seed)
        steps = [round(25 * chance.lognormvariate(0, 0.3) * MS) for _ in range(chance.randint(100, 600))]
        false += bool(lengths_of(steps).change)
    assert false <= 3
