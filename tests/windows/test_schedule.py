"""Schedules agree with torch's for torch's arguments, and with brute force for the others."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from inspect import signature
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instrument.record.planning.schedule import Schedule, StepAction, Window, schedule
from instrument.record.windows.steps import SCHEDULE_OPTIONS

ACTION = torch.profiler.ProfilerAction
ACTIONS = {
    ACTION.NONE: StepAction.WAIT,
    ACTION.WARMUP: StepAction.WARMUP,
    ACTION.RECORD: StepAction.ACTIVE,
    ACTION.RECORD_AND_SAVE: StepAction.ACTIVE,
}
HORIZON = 120

small = st.integers(0, 9)
cyclic = st.fixed_dictionaries(
    {
        "wait": small,
        "warmup": small,
        "active": st.integers(1, 9),
        "repeat": st.integers(0, 4),
        "skip_first": st.integers(0, 20),
        "skip_first_wait": st.sampled_from([0, 1, 2, False, True]),
    }
)
explicit = st.fixed_dictionaries(
    {
        "at": st.lists(st.integers(0, 25), min_size=1, max_size=6, unique=True).map(
            lambda tens: [n * 4 for n in tens]
        ),
        "warmup": small,
        "active": st.integers(1, 4),
    }
)


@st.composite
def periodic(draw: st.DrawFn) -> dict[str, int]:
    warmup, active = draw(small), draw(st.integers(1, 5))
    return {
        "every": warmup + active + draw(small),
        "warmup": warmup,
        "active": active,
        "repeat": draw(st.integers(0, 4)),
        "skip_first": draw(st.integers(0, 40)),
    }


plans = st.one_of(cyclic, explicit, periodic()).map(lambda arguments: schedule(**arguments))


def torch_schedule(arguments: dict[str, int]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of warmup=0
        return torch.profiler.schedule(**arguments)


def active_steps(plan: Schedule) -> list[int]:
    return [step for step in range(HORIZON) if plan.at(step)[0] is StepAction.ACTIVE]


@given(cyclic)
def test_cycles_agree_with_torch(arguments: dict[str, int]) -> None:
    """Each action is the one of torch.profiler.schedule, and torch saves exactly at stop - 1."""
    plan, oracle = schedule(**arguments), torch_schedule(arguments)
    for step in range(HORIZON):
        action, window = plan.at(step)
        assert ACTIONS[oracle(step)] is action
        saves = oracle(step) is ACTION.RECORD_AND_SAVE
        assert saves == (window is not None and step == window.stop - 1)


@given(plans)
def test_windows_are_numbered_and_never_overlap(plan: Schedule) -> None:
    """Windows have consecutive indices, ordered bounds, and start after the previous window."""
    windows = list(islice(plan.windows(), 10))
    assert list(range(1, len(windows) + 1)) == [window.index for window in windows]
    assert all(0 <= window.warmup <= window.active < window.stop for window in windows)
    assert all(before.stop <= after.warmup for before, after in pairwise(windows))
    assert windows == [plan.window(window.index) for window in windows]


@given(plans)
def test_count_is_the_number_of_windows(plan: Schedule) -> None:
    """A finite plan has ``count`` windows and None beyond; an endless one has no count."""
    assert plan.finite == (plan.count is not None)
    if plan.count is not None:
        assert plan.count == len(list(plan.windows()))
        assert plan.window(plan.count) is not None
        assert plan.window(plan.count + 1) is None
    else:
        assert plan.window(10**12) is not None


@given(plans)
def test_at_and_next_window_agree_with_the_windows(plan: Schedule) -> None:
    """`at` and `next_window` agree with a search through all windows."""
    windows = list(islice(plan.windows(), HORIZON + 1))
    for step in range(HORIZON):
        following = next((window for window in windows if window.stop > step), None)
        assert following == plan.next_window(step)
        if following is None or step < following.warmup:
            assert plan.at(step) == (StepAction.WAIT, None)
        else:
            assert (StepAction.WARMUP if step < following.active else StepAction.ACTIVE, following) == plan.at(
                step
            )


@given(explicit, st.randoms())
def test_named_steps(arguments: dict[str, Any], random: Any) -> None:
    """Named steps are recorded, in any order given, with as much warm-up as fits."""
    starts, active = arguments["at"], arguments["active"]
    plan = schedule(**arguments)
    assert sorted(start + i for start in starts for i in range(active)) == active_steps(plan)
    free = 0
    for window in plan.windows():
        assert max(free, window.active - arguments["warmup"]) == window.warmup
        free = window.stop
    random.shuffle(starts)
    assert plan == schedule(**arguments) == schedule(iter(starts), active=active, warmup=arguments["warmup"])
    as_text = ", ".join(map(str, starts))
    assert plan == schedule(as_text, active=active, warmup=arguments["warmup"])


@given(st.lists(st.integers(1, 9), min_size=2, max_size=12))
def test_ranges(lengths: list[int]) -> None:
    """Each inclusive range is one window; ``lengths`` alternates gaps and lengths."""
    text, step, expected = [], 0, []
    for gap, length in zip(lengths[::2], lengths[1::2], strict=False):
        first, last = step + gap, step + gap + length - 1
        text.append(f"{first}-{last}")
        expected.append(Window(len(text), first, first, last + 1))
        step = last + 1
    assert expected == list(schedule(",".join(reversed(text))).windows())


@given(periodic())
def test_period(arguments: dict[str, int]) -> None:
    """Recording starts at the multiples of the period that are not below skip_first."""
    multiples = range(arguments["every"], HORIZON, arguments["every"])
    starts = [n for n in multiples if n >= arguments["skip_first"]][: arguments["repeat"] or None]
    recorded = {start + i for start in starts for i in range(arguments["active"])}
    plan = schedule(**arguments)
    assert sorted(step for step in recorded if step < HORIZON) == active_steps(plan)
    for window in islice(plan.windows(), 5):
        assert arguments["warmup"] == window.active - window.warmup


@given(plans)
def test_a_schedule_is_a_value(plan: Schedule) -> None:
    """A schedule can be pickled, is equal and hashes by its arguments, and cannot be changed."""
    copy = pickle.loads(pickle.dumps(plan))
    assert (plan, hash(plan), repr(plan)) == (copy, hash(copy), repr(copy))
    with pytest.raises(AttributeError):
        plan.count = 3  # type: ignore[misc]


def test_far_steps_are_computed_by_arithmetic() -> None:
    """The last of 10**12 windows is found without a search."""
    plan = schedule(every=1000, repeat=10**12)
    assert (StepAction.ACTIVE, Window(10**12, 10**15, 10**15, 10**15 + 1)) == plan.at(10**15)
    assert plan.next_window(10**15 + 1) is None


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (schedule(wait=1, warmup=1, active=3, repeat=2), "Schedule('2-4,7-9', warmup=1)"),
        (schedule(every=1000), "Schedule('1000,2000,3000,...', warmup=0)"),
        (
            schedule(every=1000, active=2, repeat=9),
            "Schedule('1000-1001,2000-2001,3000-3001,...,9000-9001', warmup=0)",
        ),
        (schedule("100, 10 - 12", warmup=2), "Schedule('10-12,100', warmup=2)"),
        (schedule(7), "Schedule('7', warmup=0)"),
        (schedule("7-7"), "Schedule('7', warmup=0)"),
    ],
)
def test_repr_shows_the_steps(plan: Schedule, text: str) -> None:
    assert text == repr(plan)


INTEGER = "must be an integer >="
STEPS = '"at" must be steps such as "10-12,100"'
REFUSED = [
    ({}, ValueError, f'"active" {INTEGER} 1 unless "at" or "every" is given: None'),
    ({"wait": 1, "warmup": 1}, ValueError, f'"active" {INTEGER} 1 unless "at" or "every" is given: None'),
    ({"active": 0}, ValueError, f'"active" {INTEGER} 1: 0'),
    ({"active": -3}, ValueError, f'"active" {INTEGER} 1: -3'),
    ({"active": True}, TypeError, f'"active" {INTEGER} 1: True'),
    ({"active": "3"}, TypeError, f"\"active\" {INTEGER} 1: '3'"),
    ({"active": 1, "wait": -1}, ValueError, f'"wait" {INTEGER} 0: -1'),
    ({"active": 1, "warmup": 1.0}, TypeError, f'"warmup" {INTEGER} 0: 1.0'),
    ({"active": 1, "repeat": False}, TypeError, f'"repeat" {INTEGER} 0: False'),
    ({"active": 1, "skip_first": None}, TypeError, f'"skip_first" {INTEGER} 0: None'),
    ({"active": 1, "skip_first_wait": 0.5}, TypeError, f'"skip_first_wait" {INTEGER} 0: 0.5'),
    ({"at": []}, ValueError, '"at" must name at least one step: []'),
    ({"at": ""}, ValueError, f"{STEPS}: ''"),
    ({"at": "12-10"}, ValueError, "\"at\" must have the lower step of a range first: '12-10'"),
    ({"at": "1,a-b"}, ValueError, f"{STEPS}: 'a-b' in '1,a-b'"),
    ({"at": "1,,2"}, ValueError, f"{STEPS}: '' in '1,,2'"),
    ({"at": "-5"}, ValueError, f"{STEPS}: '-5'"),
    ({"at": "1.5"}, ValueError, f"{STEPS}: '1.5'"),
    ({"at": "1-2-3"}, ValueError, f"{STEPS}: '1-2-3'"),
    ({"at": "x"}, ValueError, f"{STEPS}: 'x'"),
    ({"at": -1}, ValueError, f'"at" {INTEGER} 0: -1'),
    ({"at": True}, TypeError, f'"at" {INTEGER} 0: True'),
    ({"at": 2.0}, TypeError, f'"at" {INTEGER} 0: 2.0'),
    ({"at": b"1"}, TypeError, '"at" must be steps by number or a string such as "10-12,100": b\'1\''),
    ({"at": [1, 2.0]}, TypeError, '"at" must hold integers >= 0: 2.0'),
    ({"at": ["10-12"]}, TypeError, "\"at\" must hold integers >= 0: '10-12'"),
    ({"at": [7, 3, 7]}, ValueError, '"at" must name each window once: 7 twice in [7, 3, 7]'),
    ({"at": "5-6,5-6"}, ValueError, "\"at\" must name each window once: 5-6 twice in '5-6,5-6'"),
    ({"at": "10-12,12"}, ValueError, "do not overlap: 10-12 and 12 in '10-12,12'"),
    ({"at": [12, 10], "active": 3}, ValueError, "do not overlap: 10-12 and 12-14 in [12, 10] with active=3"),
    ({"at": "10-12", "active": 1}, ValueError, '"active" must be left out with ranges in "at", \'10-12\': 1'),
    ({"steps": 1}, TypeError, "unexpected keyword argument 'steps'"),
    ({"at": 1, "every": 2}, ValueError, '"every" must be left out with "at": 2'),
    ({"at": 1, "wait": 2}, ValueError, '"wait" must be left out with "at": 2'),
    ({"at": 1, "repeat": 2}, ValueError, '"repeat" must be left out with "at": 2'),
    ({"at": 1, "skip_first": 2}, ValueError, '"skip_first" must be left out with "at": 2'),
    ({"at": 1, "skip_first_wait": 1}, ValueError, '"skip_first_wait" must be left out with "at": 1'),
    ({"every": 5, "wait": 1}, ValueError, '"wait" must be left out with "every": 1'),
    ({"every": 5, "skip_first_wait": True}, ValueError, '"skip_first_wait" must be left out with "every": True'),
    ({"every": 0}, ValueError, f'"every" {INTEGER} 1 (warmup=0 + active=1): 0'),
    ({"every": -5}, ValueError, f'"every" {INTEGER} 1 (warmup=0 + active=1): -5'),
    ({"every": 3, "warmup": 2, "active": 2}, ValueError, f'"every" {INTEGER} 4 (warmup=2 + active=2): 3'),
    ({"every": 10.0}, TypeError, f'"every" {INTEGER} 1 (warmup=0 + active=1): 10.0'),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED, ids=[str(case[0]) for case in REFUSED])
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """Wrong arguments raise at the call; the message names the argument, what is accepted, and the value."""
    with pytest.raises(error) as caught:
        schedule(**arguments)
    assert message in str(caught.value)


cycles = st.fixed_dictionaries(
    {name: st.integers(0, 3) for name in ("wait", "warmup", "repeat", "skip_first", "skip_first_wait")}
    | {"active": st.integers(1, 3)}
)


@given(cycles)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of a missing warm-up
def test_a_call_returns_the_action_of_torchs_schedule(arguments: dict[str, Any]) -> None:
    """A schedule returns the actions of torch's own with the same arguments."""
    plan, expected = schedule(**arguments), torch.profiler.schedule(**arguments)
    assert [expected(step) for step in range(40)] == [plan(step) for step in range(40)]


@pytest.mark.parametrize("arguments", [{"at": "3-4,7"}, {"every": 4, "warmup": 1}])
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of a missing warm-up and of several cycles
def test_torchs_profiler_follows_any_schedule(arguments: dict[str, Any]) -> None:
    """torch.profiler also follows a schedule that torch itself cannot express."""
    ready: list[int] = []
    plan = schedule(**arguments)
    options: dict[str, Any] = {"activities": [torch.profiler.ProfilerActivity.CPU], "schedule": plan}
    with torch.profiler.profile(on_trace_ready=lambda p: ready.append(p.step_num), **options) as prof:
        for _ in range(9):
            prof.step()
    stops = [window.stop for window in islice(plan.windows(), 2)]
    assert [stop for stop in stops if stop <= 9] == ready


def test_numbers_out_of_range() -> None:
    """Step numbers below 0 and window indices below 1 raise an error."""
    plan = schedule(active=1)
    for method in (plan.at, plan.next_window):
        with pytest.raises(ValueError, match='"step" must be an integer >= 0: -1'):
            method(-1)
    with pytest.raises(ValueError, match='"index" must be an integer >= 1: 0'):
        plan.window(0)


def test_integers_of_other_types() -> None:
    """Integers of numpy, as configurations hold them, are accepted."""
    numpy = pytest.importorskip("numpy")
    assert schedule([10, 20], active=2) == schedule(numpy.array([10, 20]), active=numpy.int64(2))


def test_user_names() -> None:
    """`dir` lists what users call, and nothing internal."""
    window = schedule("3").window(1)
    assert ["active", "index", "stop", "warmup"] == dir(window)
    for plan in (schedule("3"), schedule(active=1), schedule(every=3)):
        assert ["at", "count", "finite", "next_window", "window", "windows"] == dir(plan)
        assert all(hasattr(plan, name) for name in dir(plan))


def test_names_of_the_arguments() -> None:
    """`steps` and the hints of the exporter know every argument of a schedule."""
    assert {*SCHEDULE_OPTIONS} == {*signature(schedule).parameters}


def test_imports_no_torch() -> None:
    """The module imports neither torch nor other large packages."""
    heavy = {"torch", "numpy", "structlog"}
    code = f"import sys, instrument.record.planning.schedule; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
