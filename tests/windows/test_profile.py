"""A profile saves the traces that its schedule plans, and makes no calls outside windows."""

from __future__ import annotations

import inspect
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerAction, ProfilerActivity

import instrument
from instrument.base.compat import gpu
from instrument.base.config import settings as instrument_settings
from instrument.base.errors import CaptureError
from instrument.record.planning.schedule import Schedule, StepAction
from instrument.record.windows.api import TorchProfilerOptions

from ..support.torch_versions import has_a_timeout, names_activities
from .training import (
    Recorder,
    content,
    do_nothing,
    manifest,
    names,
    planned,
    recorded,
    statuses,
    steps,
    traces,
    train,
)

NONE, WARMUP, RECORD, SAVE = (
    ProfilerAction.NONE,
    ProfilerAction.WARMUP,
    ProfilerAction.RECORD,
    ProfilerAction.RECORD_AND_SAVE,
)


def plan(**arguments: Any) -> Schedule:
    return instrument.schedule(**arguments)


def run(out: Path, count: int, body: Callable[[int], object] = do_nothing, **arguments: Any) -> Any:
    """Train for ``count`` steps under a profile; return the profile."""
    with instrument.profile(out, **arguments) as prof:
        train(count, prof.step, body)
    return prof


def test_each_window_is_one_trace_of_the_planned_steps(out: Path) -> None:
    """Two cycles give two gzipped traces, each with its own two steps and their regions."""
    run(out, 10, schedule=plan(wait=1, warmup=1, active=2, repeat=2))
    first, second = traces(out)
    assert ["window-0001", "window-0002"] == [first.parent.name, second.parent.name]
    for path in (first, second):
        assert re.fullmatch(r"rank0\.\d{19}\.pt\.trace\.json\.gz", path.name)
        assert b"\x1f\x8b" == path.read_bytes()[:2]
    assert [[2, 3], [6, 7]] == [steps(first), steps(second)]
    assert ["batch 6", "forward", "batch 7", "forward"] == [
        name for name in names(second) if name.startswith(("batch", "forward"))
    ]
    assert {"manifest.jsonl", "window-0001", "window-0002"} == {path.name for path in out.iterdir()}


def test_traces_have_the_format_of_chrome_and_perfetto(out: Path) -> None:
    """Complete events have name, start and duration; regions are user annotations within their step."""
    run(out, 3, schedule=plan(at=1))
    trace = content(traces(out)[0])
    events = trace["traceEvents"]
    assert "ms" == trace["displayTimeUnit"]
    complete = [event for event in events if event["ph"] == "X"]
    assert complete
    assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in complete)
    annotated = {event["name"]: event for event in complete if event.get("cat") == "user_annotation"}
    step, region = annotated["ProfilerStep#1"], annotated["forward"]
    assert step["ts"] <= region["ts"]
    assert region["ts"] + region["dur"] <= step["ts"] + step["dur"]
    assert "aten::addmm" in {event["name"] for event in complete if event.get("cat") == "cpu_op"}


def test_adjacent_windows_lose_no_step(out: Path) -> None:
    """With neither wait nor warm-up every step is in exactly one window."""
    run(out, 6, schedule=plan(active=2, repeat=3))
    assert [[0, 1], [2, 3], [4, 5]] == recorded(out)


def test_warm_up_is_discarded(out: Path) -> None:
    """The trace has no events of warm-up steps."""
    run(out, 6, schedule=plan(warmup=3, active=2, repeat=1))
    assert ["batch 3", "batch 4"] == [name for name in names(traces(out)[0]) if name.startswith("batch")]


def test_no_schedule_is_one_window_of_everything(out: Path) -> None:
    """Without a schedule the whole block is recorded, as with a bare torch.profiler.profile."""
    prof = run(out, 3)
    (path,) = traces(out)
    assert ["batch 0", "batch 1", "batch 2"] == [name for name in names(path) if name.startswith("batch")]
    assert [1, 2, 3] == steps(path)  # the steps that `step` announced
    assert [(1, "recorded")] == statuses(prof.windows)
    assert [0, None] == prof.windows[0]["planned_steps"]


def test_without_schedule_and_steps_no_step_is_marked(out: Path) -> None:
    """A block without steps records the same operators as torch's own profiler."""
    options: dict[str, Any] = {"activities": [ProfilerActivity.CPU]}
    with torch.profiler.profile(**options) as torch_prof:
        torch.ones(3) + 1
    with instrument.profile(out, **options) as prof:
        torch.ones(3) + 1
    assert [row.key for row in torch_prof.key_averages()] == [row.key for row in prof.key_averages()]


CYCLES = [
    {"wait": 0, "warmup": 0, "active": 2}, {"wait": 0, "warmup": 1, "active": 1},
    {"wait": 1, "warmup": 1, "active": 1}, {"wait": 2, "warmup": 0, "active": 1},
    {"wait": 0, "warmup": 0, "active": 2, "repeat": 2},
]  # fmt: skip


@pytest.mark.corpus
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about no warm-up
@pytest.mark.parametrize("cycle", CYCLES)
@pytest.mark.parametrize(("rounds", "each"), [(3, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("as_function", [False, True])
def test_a_profile_entered_again_calls_the_handler_when_torch_does(
    out: Path, cycle: dict[str, int], rounds: int, each: int, as_function: bool
) -> None:
    """A window that is open when the block is left continues in the next block."""

    def calls(make: Callable[..., Any]) -> list[int]:
        called: list[int] = []
        prof = make(activities=[ProfilerActivity.CPU], on_trace_ready=lambda prof: called.append(prof.step_num))
        for _ in range(rounds):
            with prof:
                for _ in range(each):
                    prof.step()
        return called

    torch_schedule = torch.profiler.schedule(**cycle)
    schedule = torch_schedule if as_function else plan(**cycle)
    expected = calls(lambda **options: torch.profiler.profile(schedule=torch_schedule, **options))
    assert expected == calls(lambda **options: instrument.profile(out, schedule=schedule, **options))


def test_acc_events_accumulates_events(out: Path) -> None:
    """With acc_events, a window's events include those of earlier windows, as in torch."""

    def counts(make: Callable[..., Any], schedule: Any) -> list[int]:
        found: list[int] = []

        def ready(prof: Any) -> None:
            found.append(sum(event.name == "aten::cos" for event in prof.events()))

        options = {"activities": [ProfilerActivity.CPU], "acc_events": True}
        with make(schedule=schedule, on_trace_ready=ready, **options) as prof:
            for _ in range(6):
                torch.ones(3).cos()
                prof.step()
        return found

    torch_schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
    expected = counts(torch.profiler.profile, torch_schedule)
    assert [1, 2, 3] == expected == counts(lambda **given: instrument.profile(out, **given), torch_schedule)


@pytest.mark.parametrize("daemon", ["1", ""])
def test_kineto_counts_the_steps_for_its_daemon(out: Path, monkeypatch: pytest.MonkeyPatch, daemon: str) -> None:
    """Under KINETO_USE_DAEMON, `step` advances Kineto's step count where torch's `step` does."""
    monkeypatch.setenv("KINETO_USE_DAEMON", daemon)
    tracker = torch.autograd.profiler.KinetoStepTracker

    def count(prof: Any) -> int:
        before = tracker.current_step()
        with prof:
            for _ in range(3):
                prof.step()
        return tracker.current_step() - before

    prof = torch.profiler.profile(activities=[ProfilerActivity.CPU], schedule=lambda step: NONE)
    expected = count(prof) if daemon else 0  # torch 2.6 counts without a daemon as well
    assert 3 * bool(daemon) == expected == count(instrument.profile(out, schedule="50"))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (instrument.schedule("1,4-5"), [[1], [4, 5]]),
        (instrument.schedule(at=[1, 6], active=2), [[1, 2], [6, 7]]),
        (instrument.schedule(every=5, warmup=1, active=2), [[5, 6], [10, 11]]),
        (torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2), [[2, 3], [6, 7]]),
        (torch.profiler.schedule(wait=1, warmup=1, active=1, skip_first=3), [[5], [8], [11]]),
        (lambda step: SAVE if step in (2, 3, 9) else NONE, [[2], [3], [9]]),
        (lambda step: [NONE, WARMUP, RECORD, SAVE][step % 4], [[2, 3], [6, 7], [10, 11]]),
        (lambda step: RECORD if 3 <= step < 5 else NONE, [[3, 4]]),
        (lambda step: {2: RECORD, 3: WARMUP, 4: SAVE}.get(step, NONE), [[2], [4]]),
        (lambda step: 3 if step == 2 else 0, [[2]]),
    ],
)
def test_every_kind_of_schedule_is_followed(out: Path, schedule: Any, expected: list[list[int]]) -> None:
    """Named steps, periods, torch's schedules and any function of the step give their windows."""
    run(out, 12, schedule=schedule)
    assert expected == recorded(out)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (instrument.schedule(wait=1, warmup=1, active=2, repeat=2), [[102, 103], [106, 107]]),
        (torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2), [[102, 103], [106, 107]]),
        (instrument.schedule("3,101-102,108"), [[101, 102], [108]]),
        (instrument.schedule(every=50, active=2, repeat=3), [[100, 101]]),
        (None, [list(range(101, 111))]),
    ],
)
def test_a_resumed_run_counts_from_its_first_step(out: Path, schedule: Any, expected: list[list[int]]) -> None:
    """Cycles begin at first_step, named steps and periods keep their numbers; traces have the run's numbers."""
    prof = run(out, 10, schedule=schedule, first_step=100)
    assert expected == recorded(out)
    assert 110 == prof.step_num


def test_a_restarted_profile_continues(out: Path) -> None:
    """A second start continues the count of steps: the first window is not recorded again, the second one is."""
    prof = instrument.profile(out, schedule=plan(at=[1, 5]))
    prof.start()
    train(3, prof.step)
    prof.stop()
    train(1, do_nothing)
    prof.start()
    train(5, prof.step)
    prof.stop()
    prof.stop()
    assert [[1], [5]] == recorded(out)
    last = {entry["window"]: entry["status"] for entry in manifest(out)}
    assert {1: "recorded", 2: "recorded"} == last


def test_a_second_run_into_the_same_folder_overwrites_nothing(out: Path) -> None:
    """Both traces stay, and the manifest has both lines."""
    run(out, 3, schedule=plan(at=1))
    before = {path: path.read_bytes() for path in traces(out)}
    run(out, 3, schedule=plan(at=1))
    assert 2 == len(traces(out))
    assert before == {path: path.read_bytes() for path in before}
    assert [(1, "recorded")] * 2 == statuses(manifest(out))


@pytest.mark.parametrize(("ranks", "files"), [(None, 1), ([3], 1), ([0, 3], 1), ({0, 1}, 0)])
def test_only_the_chosen_ranks_record(out: Path, monkeypatch: pytest.MonkeyPatch, ranks: Any, files: int) -> None:
    """The launcher's RANK variable decides and names the file; other ranks write nothing at all."""
    monkeypatch.setenv("RANK", "3")
    prof = run(out, 3, schedule=plan(at=1), ranks=ranks)
    assert files == len(traces(out))
    assert files == len(prof.windows)
    assert all(path.name.startswith("rank3.") for path in traces(out))
    assert all(entry["rank"] == 3 for entry in prof.windows)
    assert bool(files) == out.exists()
    assert 3 == prof.step_num


def test_a_rank_that_is_not_a_number_counts_as_0(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A RANK variable that holds text does not stop the loop."""
    monkeypatch.setenv("RANK", "first")
    run(out, 3, schedule=plan(at=1))
    assert traces(out)[0].name.startswith("rank0.")


def test_a_disabled_profile_writes_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With INSTRUMENT=0 the profile only counts its steps."""
    monkeypatch.setattr(instrument_settings, "enabled", False)
    prof = run(out, 3, schedule=plan(at=1))
    assert [] == prof.windows
    assert not out.exists()
    assert 3 == prof.step_num


# Methods of torch's profiler that an on_trace_ready handler calls.


def test_the_tensorboard_handler_of_torch_works(out: Path, tmp_path: Path) -> None:
    """torch.profiler.tensorboard_trace_handler writes its own copies besides the traces of the profile."""
    folder = tmp_path / "tensorboard"
    handler = torch.profiler.tensorboard_trace_handler(str(folder), worker_name="w")
    run(out, 6, schedule=plan(active=1, wait=1, repeat=2), on_trace_ready=handler)
    copies = sorted(folder.glob("w.*.pt.trace.json"))
    assert [[1], [3]] == [steps(path) for path in copies] == recorded(out)
    zipped = torch.profiler.tensorboard_trace_handler(str(tmp_path / "zipped"), use_gzip=True)
    run(out, 3, schedule=plan(at=1), on_trace_ready=zipped)
    assert [1] == steps(next((tmp_path / "zipped").glob("*.pt.trace.json.gz")))


def test_the_idioms_of_on_trace_ready_work(out: Path, tmp_path: Path) -> None:
    """A handler can export traces and stacks, and read tables, events and the step's number."""
    seen: list[Any] = []

    def ready(prof: Any) -> None:
        prof.export_chrome_trace(tmp_path / f"{prof.step_num}.json")
        prof.export_chrome_trace(str(tmp_path / f"{prof.step_num}.json.gz"))
        prof.export_stacks(str(tmp_path / "stacks.txt"), "self_cpu_time_total")
        seen.append(prof.key_averages(group_by_input_shape=True).table(sort_by="cpu_time_total", row_limit=-1))
        seen.append({event.name for event in prof.events()})

    run(out, 4, schedule=plan(at="1-2"), on_trace_ready=ready, with_stack=True, record_shapes=True)
    assert [1, 2] == steps(tmp_path / "3.json") == steps(tmp_path / "3.json.gz")
    assert content(tmp_path / "3.json") == content(traces(out)[0])
    table, events = seen
    assert "aten::addmm" in table
    assert {"forward", "ProfilerStep*", "aten::addmm"} <= events  # torch's name for any step
    assert (tmp_path / "stacks.txt").exists()


@pytest.mark.parametrize("name", ["export_chrome_trace", "export_stacks", "key_averages", "events"])
def test_results_before_the_first_window(out: Path, name: str) -> None:
    """Before the first window, methods that need a trace raise an error that says so."""
    prof = instrument.profile(out)
    arguments = ["x.json"] if name.startswith("export") else []
    with pytest.raises(CaptureError, match=f"{name}: no window was recorded by torch.profiler so far"):
        getattr(prof, name)(*arguments)


def test_on_trace_ready_may_stop_the_profile(out: Path) -> None:
    """A handler that stops the profile keeps the window; the manifest has the windows not reached."""
    prof = run(out, 6, schedule=plan(at=[1, 3]), on_trace_ready=lambda prof: prof.stop())
    assert [[1]] == recorded(out)
    assert {1: "recorded", 2: "not reached"} == dict(statuses(prof.windows))


def test_metadata_is_in_the_trace(out: Path) -> None:
    """Metadata added before or during a window is in its trace; unsupported characters are replaced."""
    prof = instrument.profile(out, schedule=plan(at="1-2"))
    prof.add_metadata("model", "tiny")
    prof.add_metadata('a "key"', 'C:\\new "dir"\nü')
    with prof:
        train(4, prof.step, lambda number: prof.add_metadata("last", str(number)))
    trace = content(traces(out)[0])
    assert "tiny" == trace["model"]
    assert "C:/new 'dir' u" == trace["a 'key'"]
    assert "2" == trace["last"]


def test_options_reach_torchs_profiler(out: Path) -> None:
    """Shapes, stacks and memory are in the trace when requested."""
    options = {"record_shapes": True, "with_stack": True, "profile_memory": True}
    run(out, 3, schedule=plan(at=1), activities=[ProfilerActivity.CPU], **options)
    trace = content(traces(out)[0])
    assert [1, 1, 1] == [trace["record_shapes"], trace["with_stack"], trace["profile_memory"]]
    product = next(event for event in trace["traceEvents"] if event["name"] == "aten::addmm")
    assert [[3], [5, 4], [4, 3]] == product["args"]["Input Dims"][:3]
    assert any("training.py" in event["name"] for event in trace["traceEvents"])
    assert any(event["name"] == "[memory]" for event in trace["traceEvents"])


@pytest.mark.skipif(not names_activities(), reason="this version of torch takes no names of activities")
def test_names_of_activities_that_only_a_recording_checks(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a build for a GPU that is not in use yet, a wrong name is the reason why there is no window."""
    monkeypatch.setattr(gpu, "supported", lambda: True)
    with instrument.profile(out, schedule="1", activities=[{ProfilerActivity.CPU: ["NONE"]}]) as prof:
        for _ in range(3):
            prof.step()
    (window,) = prof.windows
    assert ("skipped", True) == (window["status"], "activity type name: 'NONE'" in window["reason"])


def test_options_are_checked_without_a_warning(out: Path) -> None:
    """An option that torch deprecates gives torch's warning when a window opens, and none at the call."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        instrument.profile(out, with_modules=True)


def test_declared_options_include_all_of_torchs() -> None:
    """`TorchProfilerOptions` declares every option of torch's profiler, except the deprecated `use_cuda`."""
    accepted = set(inspect.signature(torch.profiler.profile).parameters)
    declared = set(TorchProfilerOptions.__annotations__)
    assert accepted - {"schedule", "on_trace_ready", "use_cuda"} <= declared


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (TypeError, {"out": None}, '"out" must be the path of a folder: None'),
        (TypeError, {"out": 3}, '"out" must be the path of a folder: 3'),
        (TypeError, {"schedule": 5}, '"schedule" must be an instrument.schedule(...) or a function'),
        (TypeError, {"on_trace_ready": "x"}, "\"on_trace_ready\" must be a function: 'x'"),
        (TypeError, {"ranks": 0}, '"ranks" must be several integers, such as [0]: 0'),
        (ValueError, {"ranks": []}, '"ranks" must hold integers >= 0: []'),
        (ValueError, {"ranks": [-1]}, '"ranks" must hold integers >= 0: [-1]'),
        (ValueError, {"ranks": ["01"]}, "\"ranks\" must hold integers >= 0: ['01']"),
        (ValueError, {"ranks": "a"}, '"ranks" must be ranks such as "0,7"'),
        (ValueError, {"first_step": -1}, '"first_step" must be an integer >= 0: -1'),
        (TypeError, {"first_step": 1.5}, '"first_step" must be an integer >= 0: 1.5'),
        (
            ValueError,
            {"exporter": "perfetto"},
            '"auto", one of torch_profiler, nsight_systems, nsight_compute, rocprof, vtune, none, or',
        ),
        (TypeError, {"exporter": 3}, '"exporter" must be a name or an object with a method "capture": 3'),
        (
            TypeError,
            {"recrod_shapes": True},
            'unknown option "recrod_shapes" (value True); did you mean "record_shapes"?',
        ),
        (
            TypeError,
            {"out": instrument.schedule(active=1)},
            "must be the path of a folder: Schedule('0,1,2,...', warmup=0); the schedule goes into \"schedule\": "
            'profile("runs/x", schedule=...)',
        ),
        (
            TypeError,
            {"out": torch.profiler.schedule(wait=0, warmup=1, active=1)},
            'the schedule goes into "schedule"',
        ),
        (ValueError, {"activities": ["cpu"]}, "torch.profiler refuses activities=['cpu']: "),
        pytest.param(
            ValueError,
            {"activities": [{ProfilerActivity.CPU: ["NONE"]}]},
            "activity type name: 'NONE'" if names_activities() else "torch.profiler refuses activities=[{<Prof",
            marks=pytest.mark.skipif(
                names_activities() and gpu.supported(), reason="a build for a GPU checks the names in the window"
            ),
        ),
        pytest.param(
            ValueError,
            {"post_processing_timeout_s": -1},
            "refuses post_processing_timeout_s=-1: ",
            marks=has_a_timeout,
        ),
        pytest.param(
            TypeError,
            {"post_processing_timeout_s": "1"},
            '"post_processing_timeout_s" must be a number of seconds',
            marks=has_a_timeout,
        ),
        (TypeError, {"with_stack": "no"}, "\"with_stack\" must be True or False: 'no'"),
        (TypeError, {"acc_events": None}, '"acc_events" must be True or False: None'),
        (ValueError, {"experimental_config": {}}, "torch.profiler refuses experimental_config={}: "),
        (TypeError, {"custom_profiler_config": 3}, '"custom_profiler_config" must be a dict, or a string: 3'),
        (
            ValueError,
            {"custom_profiler_config": {"backend": "x"}, "experimental_config": {}},
            '"custom_profiler_config" goes into "experimental_config" where both are given',
        ),
        (TypeError, {"execution_trace_observer": 3}, '"execution_trace_observer" must have the methods start'),
        (TypeError, {"custom_trace_id_callback": "x"}, '"custom_trace_id_callback" must be a function'),
        (ValueError, {"activities": []}, "torch.profiler refuses activities=[]: "),
        (
            ValueError,
            {"activities": [ProfilerActivity.CPU, ProfilerActivity.MTIA]},
            ": Legacy MTIA profiling is not",
        ),
    ],
)
def test_wrong_arguments_fail_at_the_call(
    out: Path, error: type[Exception], arguments: dict[str, Any], message: str
) -> None:
    """The error names the argument, its value and what is accepted, and no folder is created."""
    with pytest.raises(error, match=re.escape(message)):
        instrument.profile(**{"out": out, **arguments})
    assert not out.exists()


# Any schedule, with an exporter that only records the calls on it.

small = st.integers(0, 4)
plans = st.one_of(
    st.builds(
        instrument.schedule,
        wait=small,
        warmup=small,
        active=st.integers(1, 4),
        repeat=small,
        skip_first=small,
    ),
    st.builds(
        lambda at, active, warmup: instrument.schedule(at=[4 * n for n in at], active=active, warmup=warmup),
        st.lists(small, min_size=1, unique=True),
        st.integers(1, 4),
        small,
    ),
    st.builds(
        lambda gap, active, warmup: instrument.schedule(every=gap + active + warmup, active=active, warmup=warmup),
        small,
        st.integers(1, 3),
        small,
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans, length=st.integers(0, 30), first=st.integers(0, 12), as_function=st.booleans())
def test_any_schedule_is_followed_exactly(plan: Schedule, length: int, first: int, as_function: bool) -> None:
    """Exactly the active steps are captured, captures balance, and outside windows no call is made."""
    shifted = plan.starting(first)
    recorder = Recorder()
    given: Any = plan
    if as_function:  # the same plan as a function, in torch's actions

        def given(step: int) -> int:
            action, window = shifted.at(step + first)
            if action is StepAction.ACTIVE:
                return 3 if step + first == window.stop - 1 else 2
            return 1 if action is StepAction.WARMUP else 0

    actions = [shifted.at(step)[0] for step in range(first, first + length + 1)]
    with tempfile.TemporaryDirectory() as folder:
        prof = instrument.profile(folder, schedule=given, exporter=recorder, first_step=first)
        with prof:
            for before, after in pairwise(actions):
                calls = len(recorder.calls)
                prof.step()
                if before is after is StepAction.WAIT:
                    assert [] == recorder.calls[calls:]
        entries = prof.windows
        assert entries == (manifest(Path(folder)) if entries else [])

    active = [first + offset for offset, action in enumerate(actions) if action is StepAction.ACTIVE]
    assert active == recorder.captured()
    announced = first + length  # announced by the last step(), and never run
    if length and announced in active:
        active.remove(announced)
    assert recorder.count("start") == recorder.count("stop")
    assert recorder.count("capture") == recorder.count("start") + recorder.count("discard")
    assert recorder.count("stop") == recorder.count("save")
    assert recorder.count("prepare") <= 1

    recorded_steps = [entry["steps"] for entry in entries if entry["steps"]]
    assert active == sorted(step for first, last in recorded_steps for step in range(first, last + 1))
    assert {"recorded", "partial"} >= {entry["status"] for entry in entries if entry["steps"]}
    assert len(entries) == len({entry["window"] for entry in entries})
    if not as_function and plan.finite:
        passed = [window for window in shifted.windows() if window.stop <= first]
        due = planned(shifted.windows())[len(passed) :]
        assert due == [
            tuple(entry["planned_steps"]) for entry in sorted(entries, key=lambda entry: entry["window"])
        ]


def list_names(folder: str) -> list[str]:
    return [path.name for path in Path(folder).iterdir()]


@pytest.mark.process
def test_many_windows_leak_nothing(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 200 windows no thread, open file or temporary file is left, and memory is about flat."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    run(out, 20, schedule=plan(active=1))
    threads, files = threading.active_count(), list_names("/proc/self/fd")
    bytes_before = resident()
    run(out, 200, schedule=plan(active=1, repeat=200))
    assert threads == threading.active_count()
    assert len(files) == len(list_names("/proc/self/fd"))
    assert [] == list_names(str(temporary))
    assert resident() - bytes_before < 60e6
    assert {".gz"} == {path.suffix for path in traces(out)}
    assert 20 + 1 + 200 == len(traces(out))


def test_results_after_the_block(out: Path) -> None:
    """As with torch.profiler, the last window's table and trace are available after the block."""
    with instrument.profile(out, activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        torch.ones(3) + 1
    assert "aten::add" in prof.key_averages().table()
    assert "aten::add" in {event.name for event in prof.events()}
    prof.export_chrome_trace(str(out / "again.json"))
    assert content(out / "again.json") == content(traces(out)[0])


def test_repr(tmp_path: Path) -> None:
    """A profile says where it records to and which step is the current one."""
    with instrument.profile(tmp_path, schedule="9") as prof:
        prof.step()
        assert repr(prof) == f"<instrument.profile of {str(tmp_path)!r}, at step 1>"
