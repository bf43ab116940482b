"""A profile with a black box opens a window after a slow step."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.base.config import settings
from instrument.base.run_folder import traces_in
from instrument.record.slow_steps import step_clock
from instrument.show.sections.diagnosis import overview_section

from ..support import programs, warm
from .training import manifest, traces, train

pytestmark = pytest.mark.process


@pytest.fixture
def slow_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[int], None]]:
    """Return the body of steps that take 3 ms, and those in given ones 60 ms in data, by a clock of the test."""
    now_ns = [1]
    monkeypatch.setattr(step_clock, "perf_counter_ns", lambda: now_ns[0])

    def made(*numbers: int) -> Callable[[int], None]:
        def body(number: int) -> None:
            if number in numbers:
                with instrument.annotate("data"):
                    now_ns[0] += 60_000_000
            now_ns[0] += 3_000_000

        return body

    return made


def test_a_slow_step_opens_a_window(out: Path, slow_at: Callable[..., Any]) -> None:
    """The window follows the slow step; its reason says how slow, and in which phase; the ring is beside it."""
    with instrument.profile(out, black_box=True, trigger_steps=2) as prof:
        train(150, prof.step, slow_at(110))
    box = prof.black_box
    assert box is not None
    (line,) = manifest(out)
    assert ["step 110 took 63.0 ms, 60.0 ms more than usual: 60.0 ms of it in data"] == line["opened_by"]
    assert [112, 113] == line["steps"]
    (ring,) = (out / "window-step-112").glob("*.black_box.json")
    times = json.loads(ring.read_text())
    assert 110 in times["last_steps"]["step"]
    assert 110 == times["slow_steps"][-1]["step"]
    assert ring.name.split(".")[:2] == traces(out)[-1].name.split(".")[:2]
    assert {"path": str(ring.relative_to(out)), "bytes": ring.stat().st_size} == line["files"][1]
    assert [traces(out)[-1]] == [trace for trace, _ in traces_in(out)]


@pytest.mark.parametrize("records", [True, False])
def test_the_summary_names_the_slowest_steps(
    out: Path,
    slow_at: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    records: bool,
) -> None:
    """The summary has the slowest steps with their phase, also those that opened no window."""
    monkeypatch.setattr(settings, "summary", True)
    exporter = "torch_profiler" if records else "none"
    with instrument.profile(out, black_box=True, trigger_steps=2, exporter=exporter) as prof:
        train(150, prof.step, slow_at(110, 120, 149))
    said = " ".join(capfd.readouterr().err.split())
    assert "lowest steps (the first 32 are not judged) step 110 took 63.0 ms" in said
    assert "step 110 took 63.0 ms, 60.0 ms more than usual: 60.0 ms of it in data" in said
    assert "step 120 took 63.0 ms" in said
    assert "step 149 took 63.0 ms" in said  # the last


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (150, "150 steps, 3.00 ms each as a rule; a step is slow from "),
        (20, "20 steps: too few to know what is usual"),
    ],
)
def test_a_run_without_a_slow_step(
    out: Path,
    slow_at: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    steps: int,
    said: str,
) -> None:
    """The end of the run says that the box watched."""
    monkeypatch.setattr(settings, "summary", True)
    with instrument.profile(out, black_box=True) as prof:
        train(steps, prof.step, slow_at())
    assert f"instrument: {said}" in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_a_worse_stall_while_a_window_is_open(out: Path, slow_at: Callable[..., Any], behind: int) -> None:
    """A worse stall directly behind a stall, in warm-up or recorded, is noted and is a reason of a window."""
    body = slow_at(110, 110 + behind)

    def much_slower(number: int) -> None:
        for _ in range(1 + 19 * (number == 110 + behind)):
            body(number)

    with instrument.profile(out, black_box=True, trigger_steps=2) as prof:
        train(150, prof.step, much_slower)
    opened_by = [reason.partition(",")[0] for line in manifest(out) for reason in line["opened_by"]]
    assert ["step 110 took 63.0 ms", f"step {110 + behind} took 1.26 s"] == opened_by
    assert prof.black_box is not None
    assert [110 + behind, 110] == [slow.step for slow in prof.black_box.worst]


@pytest.mark.parametrize(("active", "recorded"), [(1, [54, 54]), (2, [53, 54]), (3, [53, 55])])
def test_a_stall_that_recurs_is_recorded(
    out: Path, slow_at: Callable[..., Any], active: int, recorded: list[int]
) -> None:
    """Once its period is known, the next stall gets a window of its own, with a usual step before it; once."""
    with instrument.profile(out, black_box=True, trigger_steps=active) as prof:
        train(150, prof.step, slow_at(*range(0, 150, 6)))
    first, second = manifest(out)
    assert ["step 36 took 63.0 ms, 60.0 ms more than usual: 60.0 ms of it in data"] == first["opened_by"]
    (reason,) = second["opened_by"]
    assert reason.startswith("one step in 6 is slow: step 48 took 63.0 ms")
    assert recorded == second["steps"]
    assert not second["requested"]


def test_a_diagnosis_says_why_its_window_opened(out: Path, slow_at: Callable[..., Any]) -> None:
    """The first line has the reason, from the trace itself; a planned window has no such line."""
    with instrument.profile(out, black_box=True, schedule="3", trigger_steps=2, diagnose=True) as prof:
        train(150, prof.step, slow_at(110))
    reason = "step 110 took 63.0 ms, 60.0 ms more than usual: 60.0 ms of it in data"
    (trace,) = (out / "window-step-112").glob("*.pt.trace.json.gz")
    found = instrument.diagnose(trace.rename(out / "x.json.gz"))
    assert (reason, f"Opened by: {reason}.") == (found.opened_by, found.opened_text)
    assert " ".join(str(found).splitlines()).startswith(f"Opened by: {reason}. {found.verdict[:20]}")
    assert found.to_markdown().startswith(f"Opened by: {reason}.\n\n**")
    assert reason == json.loads(found.to_json())["opened_by"]
    (data,) = (out / "window-step-112").glob("*.diagnosis.json")  # written before the line of the manifest
    assert reason == json.loads(data.read_text())["opened_by"]
    assert f"Opened by: {reason}." == overview_section(found)["notes"][0]
    planned = instrument.diagnose(out / "window-0001")
    assert ("schedule", "") == (planned.opened_by, planned.opened_text)
    assert str(planned).startswith(planned.verdict[:20])


def test_recorded_steps_are_not_slow(out: Path, slow_at: Callable[..., Any]) -> None:
    """The steps of a window, and its end, give no alarm."""
    with instrument.profile(out, black_box=True, schedule="60-64", with_stack=True) as prof:
        train(120, prof.step, slow_at())
    assert prof.black_box is not None
    assert not [slow for slow in prof.black_box.slow_steps if 58 <= slow.step <= 66]


def test_loss_does_not_change(out: Path, slow_at: Callable[..., Any]) -> None:
    """A black box changes no bit of a training, and is gone at its end."""
    plain = train(60)
    with instrument.profile(out, black_box=True) as prof:
        assert plain == train(60, prof.step, slow_at(50))
    steps = prof.black_box and prof.black_box.step_num
    prof.step()
    assert steps == (prof.black_box and prof.black_box.step_num)


def test_steps_in_epochs(out: Path) -> None:
    """`steps` takes it too; the box counts on from epoch to epoch, without what runs in between."""
    for _ in range(2):
        batches = instrument.steps(range(50), out, black_box=True)
        for _ in batches:
            time.sleep(0.001)
        time.sleep(0.5)  # an evaluation
    box = batches.profile.black_box
    assert box is not None
    assert 100 == box.step_num
    assert [] == [slow for slow in box.worst if slow.duration_ns > 400_000_000]
    batches.profile.stop()


def test_the_options_of_run(tmp_path: Path) -> None:
    """`instrument run --black-box --diagnose` opens a window after a stall, diagnoses it and names the stall."""
    code = """
        import time, torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(90):
            time.sleep(2 if number == 60 else 0.005)
            model(torch.ones(2)).sum().backward()
            optimizer.step()
    """
    script = programs.program(code, tmp_path)
    line = ["instrument", "run", "--black-box", "--diagnose", "-o", "out", "--", sys.executable, str(script)]
    done = warm.run(programs.python(Path("-m"), line), programs.environment(), cwd=tmp_path, check=True)
    (line_of_stall,) = (
        line for line in manifest(tmp_path / "out") if any("step 60 took 2." in each for each in line["opened_by"])
    )
    assert [Path(file["path"]).suffix for file in line_of_stall["diagnosis"]] == [".json", ".html"]
    said = done.stdout + done.stderr
    assert "The slowest steps (the first 32 are not judged)\n  step 60 took 2." in said
    assert "What is slow in the last window" in said
