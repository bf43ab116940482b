"""A profile with a black box opens a window after a slow step."""

from __future__ import annotations

import json
import time
from pathlib import Path

import instrument

from .training import manifest, traces, train


def slow_at(*numbers: int) -> object:
    """Return the body of steps that take 3 ms, and those in ``numbers`` 60 ms in data."""

    def body(number: int) -> None:
        if number in numbers:
            with instrument.annotate("data"):
                time.sleep(0.06)
        time.sleep(0.003)

    return body


def test_a_slow_step_opens_a_window(out: Path) -> None:
    """The window follows the slow step; its reason says how slow, and in which phase; the ring is beside it."""
    with instrument.profile(out, black_box=True, trigger_steps=2) as prof:
        train(150, prof.step, slow_at(110))  # type: ignore[arg-type]
    box = prof.black_box
    assert box is not None
    (line,) = [line for line in manifest(out) if any("step 110 took" in reason for reason in line["opened_by"])]
    assert [112, 113] == line["steps"]
    assert "of it in data" in line["opened_by"][0]
    (ring,) = (out / "window-step-112").glob("*.black_box.json")
    times = json.loads(ring.read_text())
    assert 110 in times["last_steps"]["step"]
    assert 110 == times["slow_steps"][-1]["step"]
    assert ring.name.split(".")[:2] == traces(out)[-1].name.split(".")[:2]


def test_recorded_steps_are_not_slow(out: Path) -> None:
    """The steps of a window, and its end, give no alarm."""
    with instrument.profile(out, black_box=True, schedule="60-64", with_stack=True) as prof:
        train(120, prof.step, slow_at())  # type: ignore[arg-type]
    assert prof.black_box is not None
    assert not [slow for slow in prof.black_box.slow_steps if 58 <= slow.step <= 66]


def test_loss_does_not_change(out: Path) -> None:
    """A black box changes no bit of a training, and is gone at its end."""
    plain = train(60)
    with instrument.profile(out, black_box=True) as prof:
        assert plain == train(60, prof.step, slow_at(50))  # type: ignore[arg-type]
    steps = prof.black_box and prof.black_box.step_num
    prof.step()
    assert steps == (prof.black_box and prof.black_box.step_num)


def test_steps_in_epochs(out: Path) -> None:
    """`steps` takes it too; the box counts on from epoch to epoch."""
    for _ in range(2):
        batches = instrument.steps(range(50), out, black_box=True)
        for _ in batches:
            time.sleep(0.001)
    assert batches.profile.black_box is not None
    assert 100 == batches.profile.black_box.step_num
    batches.profile.stop()
