"""Whatever fails, training goes on to the same bits, and the record gives the reason in words."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

import instrument
from instrument import gpu
from instrument.config import settings
from instrument.errors import CaptureError
from instrument.exporters.raw_trace import part
from instrument.exporters.torch_profiler import TorchProfilerCapture, TorchProfilerExporter
from instrument.guard import guard
from instrument.regions import dispatch
from instrument.windows.api import uncounted_profile

from ..support import programs
from .training import Recorder, Trained, manifest, nothing, recorded, statuses, steps, traces, train

pytestmark = pytest.mark.usefixtures("lenient")
COUNT = 10
EXPECTED = train(COUNT)
TWICE = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}


def run(out: Path, body: Callable[[int], object] = nothing, count: int = COUNT, **arguments: Any) -> Any:
    """Train with windows; check that training led to the same bits as without, and return the profile."""
    arguments.setdefault("schedule", instrument.schedule(**TWICE))
    with instrument.profile(out, **arguments) as prof:
        trained = train(count, prof.step, body)
    assert (EXPECTED if count == COUNT else train(count)) == trained
    return prof


def reasons(entries: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    """What came of each window, and why."""
    return [(entry["status"], entry["reason"]) for entry in entries]


@pytest.mark.parametrize("place", ["capture", "start", "step", "stop", "save"])
def test_an_exporter_that_fails(out: Path, place: str) -> None:
    """Each window is given up with what the exporter raised, and the next is tried all the same."""
    recorder = Recorder(place)
    run(out, exporter=recorder)
    expected = ("failed", f"OSError: {place} failed on purpose")
    assert [expected, expected] == reasons(manifest(out))
    assert 2 == recorder.count(place) or place == "stop"  # which is tried once more
    if place in ("start", "step"):
        assert recorder.count({"start": "discard", "step": "stop"}[place]) == 2
    assert guard.failures["exporter recorder"] >= 2


def test_an_exporter_that_fails_in_prepare(out: Path) -> None:
    """Preparing is for speed only: the windows are recorded all the same."""
    run(out, exporter=Recorder("prepare"))
    assert [("recorded", None)] * 2 == reasons(manifest(out))


def test_an_exporter_that_fails_when_discarding(out: Path) -> None:
    """A warm-up that leads to nothing may even fail to end."""
    run(out, exporter=Recorder("discard"), schedule=instrument.schedule(at=12, warmup=5))
    assert [("skipped", "the loop ended before step 10, in warm-up")] == reasons(manifest(out))


@pytest.mark.parametrize("place", ["prepare_trace", "start_trace", "stop_trace", "export_chrome_trace"])
def test_a_torch_profiler_that_fails(out: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Torch's own failure is contained, nothing is left on, and the next window is recorded."""
    original = getattr(torch.profiler.profile, place)
    failed = []

    def fail(self: Any, *args: Any) -> Any:
        if not failed:
            failed.append(place)
            raise RuntimeError("profiler error on purpose")
        return original(self, *args)

    monkeypatch.setattr(torch.profiler.profile, place, fail)
    run(out)
    first, second = manifest(out)
    assert ("failed", "RuntimeError: profiler error on purpose") == (first["status"], first["reason"])
    assert ("recorded", [6, 7]) == (second["status"], second["steps"])
    assert [[6, 7]] == recorded(out)


@pytest.mark.parametrize("place", ["stop_trace", "_disable_profiler"])
def test_a_stop_that_keeps_failing(out: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Each window gives torch's own error, none blames another profiler, and nothing stays on."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("cannot stop on purpose")

    owner: Any = torch.profiler.profile if place == "stop_trace" else torch.autograd.profiler
    with monkeypatch.context() as patch:
        patch.setattr(owner, place, fail)
        run(out)
    assert [("failed", "RuntimeError: cannot stop on purpose")] * 2 == reasons(manifest(out))
    assert not dispatch.recording
    assert not torch.autograd._profiler_enabled()
    run(out / "again")
    assert [[2, 3], [6, 7]] == recorded(out / "again")


def test_a_recording_that_cannot_be_taken_off(tmp_path: Path) -> None:
    """Where torch has no way to end it, later windows give that as the reason, until it can be ended."""
    code = """
import torch, instrument
from instrument import compat
from instrument.exporters import sessions, torch_profiler

def fail(*_):
    raise RuntimeError("cannot stop on purpose")

stop, leave = torch.autograd.profiler._disable_profiler, compat.leave_recording
torch.autograd.profiler._disable_profiler = fail
compat.leave_recording = torch_profiler.leave_recording = lambda: None
with instrument.profile("out", schedule="1,3,5") as prof:
    for number in range(7):
        if number == 4:
            torch.autograd.profiler._disable_profiler, compat.leave_recording = stop, leave
        prof.step()
print([window["reason"] for window in prof.windows])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=programs.environment({"INSTRUMENT_SUMMARY": "0"}),
        capture_output=True,
        text=True,
        check=True,
    )
    error = "cannot stop on purpose"
    stuck = f"the recording of an earlier window could not be stopped: RuntimeError({error!r})"
    assert str([f"RuntimeError: {error}", stuck, None]) == done.stdout.splitlines()[-1]


@pytest.mark.parametrize("inside", [True, False])
def test_a_step_in_the_backward_pass(out: Path, inside: bool) -> None:
    """What torch starts or stops there is undone at the pass's end: windows wait for a step outside of it."""
    x = torch.ones(3, requires_grad=True)
    with instrument.profile(out, schedule=instrument.schedule("1-2,5-6")) as prof:
        for number in range(8):
            y = x * 2
            if inside or number in (0, 2):
                y.register_hook(lambda grad: prof.step())
            y.sum().backward()
            if not (inside or number in (0, 2)):
                prof.step()
    if inside:
        assert [(1, "not reached"), (2, "not reached")] == statuses(manifest(out))
        assert "step() was called in the backward pass" in manifest(out)[0]["reason"]
    else:
        assert [[2], [5, 6]] == recorded(out)


def test_a_failing_window_of_torchs_schedule_does_not_end_the_others(out: Path) -> None:
    """A function of the step does not tell where its windows end: the next one is recorded all the same."""

    class Once(Recorder):
        def note(self, *call: Any) -> None:
            super().note(*call)
            self.failing = ()

    recorder = Once("prepare", "capture")
    recorder.failing = ("capture",)
    recorder.note = Recorder.note.__get__(recorder)  # type: ignore[method-assign]
    schedule = torch.profiler.schedule(**TWICE)

    def body(number: int) -> None:
        recorder.failing = ("capture",) if number < 3 else ()

    run(out, body, exporter=recorder, schedule=schedule)
    assert [(1, "failed"), (2, "recorded")] == statuses(manifest(out))
    assert [6, 7] == manifest(out)[1]["steps"]


def test_a_schedule_that_raises(out: Path) -> None:
    """A function that fails for one step is asked again for the next."""

    def schedule(step: int) -> int:
        if step == 3:
            raise KeyError("on purpose")
        return 3 if step in (5, 6) else 0

    run(out, schedule=schedule)
    assert [[5], [6]] == recorded(out)


def test_an_on_trace_ready_that_raises(out: Path) -> None:
    """The traces are there; the manifest tells of the failure."""

    def ready(prof: Any) -> None:
        raise ValueError("upload failed")

    run(out, on_trace_ready=ready)
    expected = ("recorded", "on_trace_ready failed: ValueError: upload failed")
    assert [expected, expected] == reasons(manifest(out))
    assert [[2, 3], [6, 7]] == recorded(out)


def unwritable(kind: str, folder: Path) -> Path:
    """A folder that cannot be written, for the reason in question."""
    if kind == "in no folder":
        return Path("/proc/x") if Path("/proc").is_dir() else pytest.skip("there is no /proc")
    if kind == "read-only":
        folder.mkdir(mode=0o500)
        return pytest.skip("root may write everywhere") if os.access(folder, os.W_OK) else folder / "runs"
    folder.write_text("")
    return folder if kind == "a file" else folder / "runs"


@pytest.mark.parametrize("kind", ["a file", "in a file", "in no folder", "read-only"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """One warning comes at the start, and a line for each window; the profile object has the reason."""
    out = unwritable(kind, tmp_path / "taken")
    begun: list[str] = []
    prof = run(out, lambda _: begun or begun.extend(caplog.messages))
    assert [(1, "failed"), (2, "failed")] == statuses(prof.windows)
    assert all("Error: [Errno" in entry["reason"] for entry in prof.windows)
    assert begun == caplog.messages[:1]
    assert f"cannot write to {out}: " in begun[0]
    assert ["window not recorded" in message for message in caplog.messages] == [False, True, True]
    assert not any(record.exc_info for record in caplog.records)


def test_a_folder_that_is_lost(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file takes the place of the folder in mid-run: a warning, and a line for each window from then on."""

    def lose(step: int) -> None:
        if step == 1:
            out.parent.mkdir()
            out.write_text("")

    prof = run(out, lose)
    assert [(1, "failed"), (2, "failed")] == statuses(prof.windows)
    said = sorted(message.partition(" (")[0] for message in caplog.messages)
    assert [
        f"instrument: cannot write to {out}: Not a directory",
        *["instrument: window not recorded"] * 2,
    ] == said
    assert not any(record.exc_info for record in caplog.records)


def test_a_folder_that_is_removed(out: Path) -> None:
    """It is made again for the next window."""
    run(out, lambda step: shutil.rmtree(out) if step == 5 else None)
    assert (2, "recorded") == statuses(manifest(out))[-1]


def test_looking_leaves_nothing(tmp_path: Path) -> None:
    """The folder is made for the first window, not at the start."""
    with instrument.profile(tmp_path / "runs" / "x", schedule=instrument.schedule("5")):
        assert [] == list(tmp_path.iterdir())


LIMITED = """
    import json, os, resource, sys
    import torch, instrument

    def train(step):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        for number in range(8):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            step()
        return loss.item().hex()

    with instrument.profile(sys.argv[1], schedule=instrument.schedule("2-3,5-6"), with_stack=True) as prof:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        loss = train(prof.step)
    left = [str(path) for path in os.listdir(sys.argv[1] + "/window-0001")]
    print(json.dumps([loss == train(lambda: None), prof.windows, left]))
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """Torch writes no trace then and says nothing; the manifest does, and no half a file is left."""
    pytest.importorskip("resource")
    script = programs.program(LIMITED, tmp_path)
    done = programs.run(programs.python(script, [str(tmp_path / "out")]), programs.environment())
    same, entries, left = json.loads(done.stdout.splitlines()[-1])
    assert same
    assert [(1, "failed"), (2, "failed")] == statuses(entries)
    assert all("torch could not write the trace to " in entry["reason"] for entry in entries)
    assert "Traceback" not in done.stderr
    assert [] == left


def obstruct(prof: Any) -> None:
    """Leave no room for the compressed trace of the last window."""
    part(prof._last.raw).mkdir()


def test_a_trace_that_cannot_be_compressed(out: Path) -> None:
    """It is kept as it is, which the manifest says."""
    run(out, on_trace_ready=obstruct)
    for entry in manifest(out):
        assert "recorded" == entry["status"]
        assert entry["reason"].startswith("not compressed: IsADirectoryError: [Errno 21] Is a directory: ")
    for path in out.rglob("*.part"):
        path.rmdir()
    for entry, path in zip(manifest(out), traces(out), strict=True):
        assert path.name.endswith(".pt.trace.json")
        assert [{"path": str(path.relative_to(out)), "bytes": path.stat().st_size}] == entry["files"]
    assert [[2, 3], [6, 7]] == [steps(path) for path in traces(out)]


@pytest.mark.parametrize("opened", [0, 1])
def test_another_torch_profiler_keeps_its_events(out: Path, opened: int) -> None:
    """A profiler of the user's, there before the warm-up or come in during it, is left alone."""
    other = torch.profiler.profile(activities=[ProfilerActivity.CPU])

    def body(number: int) -> None:
        if number == opened:
            other.start()
        if number == 4:
            other.stop()

    run(out, body)
    reason = ["another torch profiler is active", "another torch profiler began during warm-up"][opened]
    assert [("skipped", reason), ("recorded", None)] == reasons(manifest(out))
    assert [[6, 7]] == recorded(out)
    calls = [event for event in other.events() if event.name == "aten::addmm"]
    assert 4 - opened <= len(calls) <= 5 - opened


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 0, ["recorded", "recorded"]),
        (1, 1, ["recorded" if gpu.supported() else "another torch profiler began during warm-up", "recorded"]),
        (1, 3, ["another torch profiler began during warm-up", "recorded"]),
        (2, 2, ["another torch profiler began inside the window, which ended its recording", "recorded"]),
        (2, 4, ["another torch profiler began inside the window, which ended its recording", "recorded"]),
        (2, 9, ["another torch profiler began inside the window, which ended its recording",
                "another torch profiler is active"]),
    ],
)  # fmt: skip
def test_another_torch_profiler_around_a_window(
    out: Path, tmp_path: Path, begin: int, end: int, expected: list[str]
) -> None:
    """Wherever a profiler of the user's begins and ends, it keeps its events, and the process lives on.

    torch 2.13 ends with a segmentation fault where a profiler is stopped whose recording another one took over.
    With a GPU that is yet to be used, the window has no warm-up for another profiler to end.
    """
    other = torch.profiler.profile(activities=[ProfilerActivity.CPU])

    def body(number: int) -> None:
        if number == begin:
            other.start()
            torch.ones(3).prod()
        if number == end:
            other.stop()

    run(out, body)
    assert expected == [entry["reason"] or entry["status"] for entry in manifest(out)]
    other.export_chrome_trace(str(tmp_path / "other.json"))
    assert "aten::prod" in {event.name for event in other.events()}


@pytest.mark.parametrize("waits", [0, 1, 2, 3])
def test_a_torch_profiler_with_a_warm_up_of_its_own(out: Path, tmp_path: Path, waits: int) -> None:
    """Its warm-up, too, is left alone: it gets its trace, and every window of ours is accounted for."""
    copies = []

    def ready(prof: Any) -> None:
        copies.append(tmp_path / f"{prof.step_num}.json")
        prof.export_chrome_trace(str(copies[-1]))

    schedule = torch.profiler.schedule(wait=waits, warmup=1, active=1, repeat=1)
    other = torch.profiler.profile(activities=[ProfilerActivity.CPU], schedule=schedule, on_trace_ready=ready)
    prof = instrument.profile(out, schedule=instrument.schedule(**TWICE))
    with other, prof:
        trained = train(COUNT, lambda: (prof.step(), other.step()))
    assert EXPECTED == trained
    assert [[waits + 1]] == [steps(path) for path in copies]
    outcomes = [entry["reason"] or entry["status"] for entry in manifest(out)]
    assert all(outcome == "recorded" or outcome.startswith("another torch profiler") for outcome in outcomes)


def test_a_torch_profiler_on_another_thread(tmp_path: Path) -> None:
    """Its recording, too, ends ours; nothing of it is touched, and the next window is recorded."""
    done = programs.run(
        programs.python(programs.program(OTHER_THREAD, tmp_path), [str(tmp_path / "out")]), programs.environment()
    )
    events, entries = json.loads(done.stdout.splitlines()[-1])
    assert events
    reason = "another torch profiler began on another thread inside the window, which ended its recording"
    assert [("skipped", reason), ("recorded", None)] == reasons(entries)


OTHER_THREAD = """
    import json, sys, threading
    import torch, instrument
    from torch.profiler import ProfilerActivity, profile

    events = []

    def other():
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            torch.ones(3).prod()
        events.extend(event.name for event in prof.events())

    with instrument.profile(sys.argv[1], schedule=instrument.schedule("1-2,4")) as prof:
        for number in range(6):
            torch.ones(3).sum()
            if number == 1:
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
            prof.step()
    print(json.dumps(["aten::prod" in events, prof.windows]))
"""


@pytest.mark.parametrize(
    ("count", "schedule", "expected"),
    [
        (3, {"at": 5, "warmup": 3}, ("skipped", "the loop ended before step 3, in warm-up")),
        (3, {"steps": "1-6"}, ("partial", "the loop ended before step 3")),
        (3, {"at": 50}, ("not reached", "the loop ended before step 3")),
    ],
)
def test_a_loop_that_ends_too_early(
    out: Path, count: int, schedule: dict[str, Any], expected: tuple[str, str]
) -> None:
    """In warm-up, in a window, before any: each is told, and only an open window leaves a trace."""
    run(out, count=count, schedule=instrument.schedule(**schedule))
    assert [expected] == reasons(manifest(out))
    assert (expected[0] == "partial") == bool(traces(out))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("mine"), SystemExit(3)])
def test_an_exception_in_the_loop(out: Path, error: BaseException) -> None:
    """It passes through as it is, and the open window is saved."""

    def body(number: int) -> None:
        if number == 3:
            raise error

    with pytest.raises(type(error)) as caught:
        run(out, body)
    assert error is caught.value
    assert [("partial", "the loop ended in step 3")] == reasons(manifest(out)[:1])
    assert [[2, 3]] == recorded(out)


@pytest.mark.parametrize("place", ["_prepare_profiler", "_enable_profiler", "_disable_profiler"])
def test_a_keyboard_interrupt_while_torch_starts_or_stops(
    out: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stays on: the next run records, and annotations are idle in between."""
    from torch.autograd import profiler

    real = getattr(profiler, place)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        monkeypatch.undo()
        raise KeyboardInterrupt(result)

    monkeypatch.setattr(profiler, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(out)
    assert "failed" == manifest(out)[0]["status"]
    assert not dispatch.recording
    assert not torch.autograd._profiler_enabled()
    run(out / "again")
    assert [[2, 3], [6, 7]] == recorded(out / "again")


def test_stepping_in_on_trace_ready(out: Path) -> None:
    """A handler that calls step() skips steps, and neither closes the window again nor leaves one open."""
    run(out, count=8, schedule=instrument.schedule("1-2,5"), on_trace_ready=lambda prof: prof.step())
    assert [(1, "recorded"), (2, "recorded")] == statuses(manifest(out))


def test_a_broken_pipe_for_the_summary(tmp_path: Path) -> None:
    """With nobody reading stderr any more, the program ends as without us."""
    code = """
import os, instrument, torch
for _ in instrument.steps(range(3), "out", at=1):
    torch.ones(3) + 1
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 2)
for _ in instrument.steps(range(3), "out", at=1):
    torch.ones(3) + 1
print("the result")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=programs.environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert "the result\n" == done.stdout


def test_a_torch_profiler_that_warms_up_already(tmp_path: Path) -> None:
    """One that prepared before there was a window of ours keeps its recording; ours is skipped."""
    code = """
import torch, instrument
from torch.profiler import ProfilerActivity, profile
theirs = profile(activities=[ProfilerActivity.CPU])
theirs.prepare_trace()
with instrument.profile("out", schedule="0-1") as prof:
    prof.step()
    theirs.start_trace()
    torch.ones(3) + 1
    theirs.stop_trace()
assert {"aten::add"} <= {event.name for event in theirs.events()}
assert [entry["reason"] for entry in prof.windows] == ["another torch profiler is active"], prof.windows
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=programs.environment(), check=True)


def test_a_trace_that_torch_cut_off(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without an end, as torch leaves it on a full disk, is no trace and does not stay."""

    def cut(self: object, path: str, **_: object) -> None:
        Path(path).write_bytes(b'{"traceEvents": [')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", cut)
    run(out)
    assert [("failed", [])] == [(entry["status"], entry["files"]) for entry in manifest(out)[:1]]
    assert [] == [path for path in out.rglob("*") if path.is_file() and path.name != "manifest.jsonl"]


def test_a_logging_handler_that_raises(out: Path, lenient: None) -> None:
    """What the application's own handlers raise does not reach the loop."""
    handler = logging.Handler()
    handler.emit = lambda record: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    logging.getLogger("instrument").addHandler(handler)
    try:
        run(out, on_trace_ready=lambda prof: 1 / 0)
    finally:
        logging.getLogger("instrument").removeHandler(handler)
    assert "recorded" == manifest(out)[0]["status"]


def test_a_keyboard_interrupt_in_on_trace_ready(out: Path) -> None:
    """It stops the program, as it should; the trace is there."""

    def ready(prof: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(out, on_trace_ready=ready)
    assert [[2, 3]] == recorded(out)
    assert [(1, "recorded"), (2, "not reached")] == statuses(manifest(out))


def in_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_step_on_another_thread(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is counted; the window stays open until the thread that opened it steps again."""
    with instrument.profile(out, schedule=instrument.schedule("2-3")) as prof:
        trained = train(COUNT, lambda: in_a_thread(prof.step) if prof.step_num in (2, 3) else prof.step())
    assert EXPECTED == trained
    assert COUNT == prof.step_num
    (entry,) = manifest(out)
    assert "partial" == entry["status"]
    assert "steps ended on another thread than the one that opened the window" == entry["reason"]
    assert [2] == steps(traces(out)[0])
    assert 1 == caplog.text.count("on another thread than the one that opened the window")


STOPPED_ELSEWHERE = """
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
    """Torch cannot be stopped from there, so the loop's next step does that; the manifest has the reason."""
    script = programs.program(STOPPED_ELSEWHERE, tmp_path)
    done = programs.run(programs.python(script, [str(tmp_path / "out")]), programs.environment())
    entries = json.loads(done.stdout.splitlines()[-1])
    assert [(1, "skipped"), (2, "not reached"), (1, "recorded")] == statuses(entries)
    assert "the loop ended on another thread than the one that opened the window" == entries[0]["reason"]


FORKED = """
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
                os._exit(5)  # as multiprocessing does; after sys.exit, torch's profiler hangs by itself
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            for number in range(4):
                prof.step()
        return total, statuses, prof.windows

    if __name__ == "__main__":
        print(json.dumps(main()))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_in_a_window(tmp_path: Path) -> None:
    """Workers and children end as they do without us and write no line; the parent's windows are recorded."""
    script = programs.program(FORKED, tmp_path)
    done = programs.run(programs.python(script, [str(tmp_path / "out")]), programs.environment(), timeout=120)
    total, codes, entries = json.loads(done.stdout.splitlines()[-1])
    assert 56.0 == total
    assert [5] == codes
    assert [(1, "recorded"), (2, "recorded")] == statuses(entries)
    assert entries == manifest(tmp_path / "out")
    assert [[2, 3], [6, 7]] == recorded(tmp_path / "out")


def test_a_summary_that_fails(
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The windows are recorded without it."""
    monkeypatch.setattr(settings, "summary", True)
    run(out, on_trace_ready=lambda prof: prof._last.raw.write_text("unreadable"))
    assert [("recorded", None)] * 2 == reasons(manifest(out))
    assert "" == capsys.readouterr().err
    assert "the summary failed and was skipped; training goes on" in caplog.text


def test_a_summary_goes_to_stderr_once(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the regions and the files, and leaves stdout to the program."""
    monkeypatch.setattr(settings, "summary", True)
    run(out)
    printed = capsys.readouterr()
    assert "" == printed.out
    assert 1 == printed.err.count("Where the step went")
    assert "forward" in printed.err
    assert ".pt.trace.json.gz" in printed.err


def test_internal_errors_are_raised_under_strict_settings(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tests see them, those of the process that finishes windows as well."""
    monkeypatch.setattr(settings, "strict", True)
    with pytest.raises(OSError, match="save failed on purpose"):
        run(out, exporter=Recorder("save"))
    with pytest.raises(CaptureError, match="Is a directory"):
        run(out, on_trace_ready=obstruct)


def test_windows_leave_training_as_it_is(out: Path) -> None:
    """With every option on, losses and parameters are the same to the last bit."""
    trained: Trained
    options = {"record_shapes": True, "with_stack": True, "profile_memory": True, "with_flops": True}
    with instrument.profile(out, schedule=instrument.schedule(active=2), **options) as prof:
        trained = train(COUNT, prof.step)
    assert EXPECTED == trained


def test_the_capture_is_torchs_alone() -> None:
    """The exporter makes a fresh profiler for each window: one that is started again loses traces."""
    exporter = TorchProfilerExporter({})
    first = exporter.capture()
    first.start()  # on a machine with a GPU that is yet to be used, it is made only then
    first.discard()
    second = exporter.capture()
    second.start()
    second.discard()
    assert isinstance(first, TorchProfilerCapture)
    assert first.profiler is not second.profiler


def test_a_profile_that_could_not_be_made_takes_every_call() -> None:
    """What stands for it has the same attributes, and does nothing."""
    prof = uncounted_profile()
    with prof:
        prof.add_metadata("key", "value")
        prof.step()
    assert (1, [], Path()) == (prof.step_num, prof.windows, prof.out)


def test_a_fork_that_abandons_a_profile_leaves_its_parents_windows(out: Path) -> None:
    """The windows are the parent's: it alone writes their lines."""
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
