"""Windows that are requested while a loop runs: where they go, and what they record."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import instrument
from instrument.record.planning.requests import RequestedWindows, WindowRequest
from instrument.record.planning.schedule import Schedule, StepAction, Window

from .training import manifest, recorded, statuses, steps, traces, train

STEPS = 60
schedules = st.one_of(
    st.builds(
        lambda wait, warmup, active, repeat: instrument.schedule(
            wait=wait, warmup=warmup, active=active, repeat=repeat
        ),
        st.integers(0, 5),
        st.integers(0, 2),
        st.integers(1, 4),
        st.integers(0, 4),
    ),
    st.sampled_from([instrument.schedule("3-5,20"), instrument.schedule(every=10, active=2)]),
)
requests = st.lists(
    st.tuples(st.integers(0, STEPS), st.integers(1, 5), st.integers(0, 2), st.none() | st.integers(0, STEPS)),
    max_size=8,
)


def followed(
    planned: Schedule, asked: list[tuple[int, int, int, int | None]]
) -> tuple[list[tuple[StepAction, Window | None]], list[Window], RequestedWindows]:
    """Return what each step is, the window that serves each request, and the schedule."""
    windows = RequestedWindows(planned)
    served, actions = [], []
    for step in range(STEPS):
        for number, (at, active, warmup, first) in enumerate(asked):
            if at == step:
                request = WindowRequest(f"request {number}", active, warmup, first)
                served.append((request, windows.add(request, step)))
        actions.append(windows.at(step))
        following = windows.next_window(step)
        if actions[-1][1] is not None:
            assert actions[-1][1] == following
    for request, window in served:
        assert request.reason in windows.opened_by(windows.next_window(window.stop - 1) or window)
    return actions, [window for _, window in served], windows


@given(schedules, requests)
def test_windows_follow_each_other_whatever_is_requested(
    planned: Schedule, asked: list[tuple[int, int, int, int | None]]
) -> None:
    """Windows are numbered without a gap, and each recorded step is in one window, from its first to its last."""
    actions, _, _ = followed(planned, asked)
    seen: dict[int, list[tuple[int, StepAction, Window]]] = {}
    for step, (action, window) in enumerate(actions):
        if window is not None:
            seen.setdefault(window.index, []).append((step, action, window))
    assert list(range(1, len(seen) + 1)) == list(seen)
    for of_window in seen.values():
        window = of_window[-1][2]
        expected = list(range(window.warmup, min(window.stop, STEPS)))
        assert expected == [step for step, _, _ in of_window]
        assert all((action is StepAction.ACTIVE) == (step >= window.active) for step, action, _ in of_window)


@given(schedules, requests)
def test_planned_windows_stay_as_they_are(
    planned: Schedule, asked: list[tuple[int, int, int, int | None]]
) -> None:
    """Requests move no planned step, and change no label of a planned window."""
    actions, _, windows = followed(planned, asked)
    for step, (action, window) in enumerate(actions):
        expected_action, expected = planned.at(step)
        if expected is not None:
            assert window is not None
            assert (expected_action, expected.index) == (action, windows.label(window))


@given(schedules, requests)
def test_each_request_is_served(planned: Schedule, asked: list[tuple[int, int, int, int | None]]) -> None:
    """The recording of the window that serves a request does not begin before the request."""
    _, served, _ = followed(planned, asked)
    made = sorted((each for each in asked if each[0] < STEPS), key=lambda each: each[0])
    for (at, _, _, first), window in zip(made, served, strict=True):
        assert window.active >= max(at, first or 0)


def run(out: Path, count: int, ask: dict[int, Any], **arguments: Any) -> Any:
    """Train; request windows with the arguments of ``ask`` in its steps; return the profile."""
    with instrument.profile(out, **arguments) as prof:
        train(count, prof.step, lambda number: prof.trigger(**ask[number]) if number in ask else None)
    return prof


def test_a_request_opens_a_window_at_the_next_step(out: Path) -> None:
    """The window has its reason in the manifest, and a folder that is named after its first step."""
    run(out, 20, {4: {"reason": "loss is NaN", "steps": 2}}, schedule="15")
    assert [("step-6", ["loss is NaN"], [6, 7]), (1, ["schedule"], [15, 15])] == [
        (line["window"], line["opened_by"], line["steps"]) for line in manifest(out)
    ]
    assert ["window-0001", "window-step-6"] == [path.parent.name for path in traces(out)]
    assert [[15], [6, 7]] == [steps(path) for path in traces(out)]


def test_a_request_before_a_planned_window_joins_it(out: Path) -> None:
    """The planned window is recorded as planned, with both reasons."""
    run(out, 12, {6: {"reason": "asked"}}, schedule=instrument.schedule("8-9", warmup=1))
    assert [(1, ["schedule", "asked"], [8, 9])] == [
        (line["window"], line["opened_by"], line["steps"]) for line in manifest(out)
    ]


def test_a_request_within_a_window_waits_for_its_end(out: Path) -> None:
    """The open window is not cut, and the requested one follows it."""
    run(out, 12, {3: {"steps": 1, "warmup": 0}}, schedule="2-5")
    assert [[2, 5], [6, 6]] == [line["steps"] for line in manifest(out)]


def test_requests_after_the_last_planned_window(out: Path) -> None:
    """A finished schedule does not end the profile."""
    run(out, 30, {10: {"steps": 1}, 20: {"steps": 2, "warmup": 0}}, schedule="2")
    assert [[2], [12], [21, 22]] == recorded(out)


def test_a_request_at_the_end_is_in_the_manifest(out: Path) -> None:
    """A window that the loop does not reach is not forgotten, whether its warm-up began or not."""
    prof = run(out, 5, {4: {"reason": "too late"}}, schedule="1")
    prof.trigger("after the end")
    assert [(1, "recorded"), ("step-6", "skipped")] == statuses(prof.windows)
    assert ["too late"] == prof.windows[1]["opened_by"]
    with instrument.profile(out / "other", schedule="1") as prof:
        train(3, prof.step)
        prof.trigger("too late")
    assert [(1, "recorded"), ("step-4", "not reached")] == statuses(prof.windows)


def test_a_request_without_a_schedule_is_served_by_the_open_window(out: Path) -> None:
    """One window of everything holds the requested steps too."""
    prof = run(out, 5, {2: {"reason": "asked"}})
    assert [["schedule", "asked"]] == [line["opened_by"] for line in prof.windows]


def test_a_function_as_schedule(out: Path) -> None:
    """A schedule of torch, which does not plan ahead, is followed around a requested window."""
    import torch

    schedule = torch.profiler.schedule(wait=9, warmup=1, active=2, repeat=1)
    run(out, 20, {3: {"steps": 2}}, schedule=schedule)
    assert [("step-5", [5, 6]), (1, [10, 11])] == [(line["window"], line["steps"]) for line in manifest(out)]


def test_requests_of_other_threads_and_signal_handlers(out: Path) -> None:
    """A request may come at any moment; each is served by a window, and none is lost."""
    with instrument.profile(out, schedule="200") as prof:
        before = signal.signal(signal.SIGALRM, lambda *_: prof.trigger("alarm", steps=1))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        thread = threading.Thread(target=lambda: [prof.trigger(f"thread {i}", steps=1) for i in range(20)])

        def body(number: int) -> None:
            if number == 10:
                thread.start()
            if number == 100:
                thread.join()
                signal.pause() if signal.getitimer(signal.ITIMER_REAL)[0] else None

        try:
            train(160, prof.step, body)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    reasons = [reason for line in manifest(out) if line["status"] == "recorded" for reason in line["opened_by"]]
    assert {"alarm", *(f"thread {number}" for number in range(20))} == set(reasons)


def test_requests_for_some_ranks(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank records the requests that name it; the label of a window is the same on all ranks."""
    monkeypatch.setenv("RANK", "3")
    run(out, 20, {2: {"reason": "others", "ranks": [0, 1]}, 8: {"reason": "mine", "ranks": [3]}}, schedule="15")
    assert [("step-10", ["mine"]), (1, ["schedule"])] == [
        (line["window"], line["opened_by"]) for line in manifest(out)
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"reason": 3}, '"reason" must be a text: 3'),
        ({"steps": 0}, '"steps" must be an integer >= 1: 0'),
        ({"warmup": -1}, '"warmup" must be an integer >= 0: -1'),
        ({"ranks": 3}, '"ranks" must be several integers, such as [0]: 3'),
    ],
)
def test_wrong_arguments_raise_at_the_call(out: Path, arguments: dict[str, Any], text: str) -> None:
    """The message names the argument, the value and what is accepted."""
    prof = instrument.profile(out, schedule="1")
    with pytest.raises((TypeError, ValueError)) as error:
        prof.trigger(**arguments)
    assert text == str(error.value)


def test_loss_does_not_change(out: Path) -> None:
    """Requested windows change no bit of a training."""
    plain = train(12)
    with instrument.profile(out, schedule="1") as prof:
        assert plain == train(12, prof.step, lambda number: prof.trigger(steps=1) if number % 4 == 2 else None)


def test_equal_reasons_are_said_once() -> None:
    """Such as those of ranks that see the same file touched."""
    windows = RequestedWindows(instrument.schedule("50"))
    for _ in range(2):
        window = windows.add(WindowRequest("touched", 3, 1), 5)
    assert ["touched"] == windows.opened_by(window)
