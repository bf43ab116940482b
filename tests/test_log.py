"""Events in the log: each has a name and fields, as a sentence or as a JSON object."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import instrument
from instrument.base import log
from instrument.base.config import Settings

from .support import programs, warm
from .windows.training import Recorder, manifest, run

pytestmark = pytest.mark.process

PROGRAM = """
import instrument
with instrument.profile("out", schedule="1-2,9") as prof:
    for _ in range(4):
        prof.step()
"""


@pytest.fixture(autouse=True)
def format_of_the_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(log.output, "format", "quiet")
    yield


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the names of the logged events."""
    return [record.__dict__["event"] for record in caplog.records]


def without_kineto(text: str) -> list[str]:
    """Return the lines of standard error but those of Kineto."""
    of_kineto = ("Profiler", "gpuGetDeviceCount failed")  # the latter by a CUDA build without a GPU
    return [line for line in text.splitlines() if not any(each in line for each in of_kineto)]


def stderr_of(tmp_path: Path, program: str = PROGRAM, **variables: str) -> list[str]:
    """Run a program that records a window; return the lines of its standard error but those of Kineto."""
    env = programs.environment({"INSTRUMENT_SUMMARY": "0", **variables})
    done = warm.run([sys.executable, "-c", program], env, cwd=tmp_path, check=True)
    return without_kineto(done.stderr)


def test_each_window_is_a_line_when_it_opens_and_when_it_closes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The records say at which step, on which rank, why it opened, how long it was and how large its trace is."""
    caplog.set_level(logging.INFO, "instrument")
    run(tmp_path / "out")
    assert ["window.opened", "window.closed"] * 2 == events(caplog)
    opened, closed = (record.__dict__ for record in caplog.records[:2])
    assert (1, 1, 0, ["schedule"]) == tuple(opened[name] for name in ("window", "step", "rank", "opened_by"))
    line = manifest(tmp_path / "out")[0]
    same = ("window", "rank", "opened_by", "steps")  # names, types and values
    assert [line[name] for name in same] == [closed[name] for name in same]
    assert (4, [2, 3]) == (closed["step"], closed["steps"])
    assert closed["seconds"] == (line["end_ns"] - line["start_ns"]) / 1e9
    assert closed["stall_s"] == line["cost"]["stall_s"]
    assert closed["bytes"] > line["files"][0]["bytes"]  # before compression
    assert closed["message"].startswith(
        "instrument: window.closed (window=1, step=4, rank=0, opened_by=schedule, "
    )


@pytest.mark.usefixtures("lenient")
def test_a_window_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The record has the reason of the manifest."""
    run(tmp_path / "out", exporter=Recorder("start"), schedule="2")
    record = next(record for record in caplog.records if record.__dict__["event"] == "window.failed")
    assert ("WARNING", 1, 2) == (record.levelname, record.__dict__["window"], record.__dict__["step"])
    assert record.__dict__["reason"] == manifest(tmp_path / "out")[0]["reason"]


def test_windows_are_not_shown_by_default(tmp_path: Path) -> None:
    """A program without logging shows no line for a recorded window."""
    assert [] == stderr_of(tmp_path)


def test_the_console(tmp_path: Path) -> None:
    """`INSTRUMENT_LOG=console` shows a sentence for each event."""
    names = [line.partition(" (")[0] for line in stderr_of(tmp_path, INSTRUMENT_LOG="console")]
    assert ["instrument: window.opened", "instrument: window.closed"] == names


def test_json_for_log_collectors(tmp_path: Path) -> None:
    """`INSTRUMENT_LOG=json` makes each event a JSON object on a line of its own."""
    lines = [json.loads(line) for line in stderr_of(tmp_path, INSTRUMENT_LOG="json")]
    assert ["window.opened", "window.closed"] == [line["event"] for line in lines]
    assert {"timestamp", "level", "window", "step", "rank", "seconds", "bytes"} <= lines[1].keys()


def test_the_summary_in_json(tmp_path: Path) -> None:
    """With `INSTRUMENT_LOG=json` the summary is an event too: nothing on standard error is not JSON."""
    program = """
import instrument, torch
with instrument.profile("out", schedule="1-2,4", keep=instrument.keep(windows=1), diagnose=True) as prof:
    for _ in range(6):
        with instrument.annotate("forward"):
            torch.ones(3).sum()
        prof.step()
"""
    printed = stderr_of(tmp_path, program, INSTRUMENT_LOG="json", INSTRUMENT_SUMMARY="1")
    lines = [json.loads(line) for line in printed]
    (summary,) = [line for line in lines if line["event"] == "summary"]
    (trace,) = (tmp_path / "out").glob("window-*/*.gz")
    assert ([str(trace.relative_to(tmp_path))], 1) == (summary["files"], summary["removed_files"])
    assert [1, 2, 4] == summary["step_numbers"]
    (region,) = [region for region in summary["regions"] if region["path"] == ["forward"]]
    assert (3, 3) == (region["calls"], region["steps"])
    assert region["cpu_ns"] <= sum(summary["step_times_ns"]) == summary["step_ns"]
    assert summary["diagnosis"] == instrument.diagnose(trace).verdict
    assert summary["operators"]


def test_json_has_the_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """An error is a part of the object, so that it stays on one line."""
    instrument.configure(log="json")
    try:
        raise OSError("on purpose")
    except OSError as error:
        log.warning("a feature failed", exc_info=error, path=Path("x"))
    (record,) = caplog.records
    line = json.loads(record.getMessage())
    assert (None, "x", "warning") == (record.exc_info, line["path"], line["level"])
    assert line["exception"].endswith("OSError: on purpose")


STRUCTLOG = """
import structlog
structlog.configure(
    processors=[structlog.contextvars.merge_contextvars, structlog.processors.JSONRenderer()],
    wrapper_class=getattr(structlog.stdlib, "WRAPPER"),
    logger_factory=structlog.stdlib.LoggerFactory() if FILE else structlog.PrintLoggerFactory(),
)
import logging
logging.basicConfig(level=logging.INFO, format="> %(name)s %(message)s")
structlog.contextvars.bind_contextvars(job=7)
"""


@pytest.mark.parametrize("wrapper", ["BoundLogger", "AsyncBoundLogger"])
@pytest.mark.parametrize("file", [True, False])
def test_a_program_that_configured_structlog(tmp_path: Path, wrapper: str, file: bool) -> None:
    """Events go through its own processors, with its context variables, to where it wants them."""
    program = STRUCTLOG.replace("WRAPPER", wrapper).replace("FILE", str(file)) + PROGRAM
    env = programs.environment({"INSTRUMENT_SUMMARY": "0", "INSTRUMENT_LOG": "console"})
    done = warm.run([sys.executable, "-c", program], env, cwd=tmp_path, check=True)
    assert "never awaited" not in done.stderr
    lines = without_kineto(done.stderr if file else done.stdout)
    assert [line[:2] for line in lines] == (["> "] * 2 if file else ['{"'] * 2)
    events = [json.loads(line.removeprefix("> instrument ")) for line in lines]
    assert ["window.opened", "window.closed"] == [event["event"] for event in events]
    assert [7, 7] == [event["job"] for event in events]
    assert [1, 2] == events[1]["steps"]


def test_an_import_of_structlog_is_not_a_configuration(tmp_path: Path) -> None:
    """A program that only imports structlog has the events in the standard logger."""
    program = "import structlog\nstructlog.contextvars.bind_contextvars(name=7)\n" + PROGRAM
    lines = stderr_of(tmp_path, program, INSTRUMENT_LOG="console")
    assert ["instrument: window.opened", "instrument: window.closed"] == [
        line.partition(" (")[0] for line in lines
    ]


@pytest.mark.parametrize("format", ["quiet", "json"])
@pytest.mark.parametrize("level", ["info", "warning"])
def test_records_name_the_place_that_logged(caplog: pytest.LogCaptureFixture, format: str, level: str) -> None:
    """The file and the function of a record are those of the event, not of structlog."""
    instrument.configure(log=format)  # type: ignore[arg-type]
    caplog.set_level(logging.INFO, "instrument")
    getattr(log, level)("an event", window=3)
    (record,) = caplog.records
    assert (__file__, "test_records_name_the_place_that_logged") == (record.pathname, record.funcName)
    assert (level.upper(), 3) == (record.levelname, record.__dict__["window"])


SEEN = """
import random, sys
random.seed(5)
before = random.getstate()
from instrument.base import log
log.info("nobody sees this")
print("structlog" in sys.modules)
log.warning("an event", window=3)
print("structlog" in sys.modules, before == random.getstate())
"""


def test_the_import_of_structlog(tmp_path: Path) -> None:
    """The first event that somebody sees imports structlog, and leaves random numbers alone."""
    done = programs.run([sys.executable, "-c", SEEN], programs.environment())
    assert "False\nTrue True\n" == done.stdout
    assert "instrument: an event (window=3)\n" == done.stderr


def test_a_module_of_the_program_named_structlog(tmp_path: Path) -> None:
    """A warning is shown nevertheless, with its fields."""
    (tmp_path / "structlog.py").touch()
    (tmp_path / "program.py").write_text(SEEN)
    done = programs.run([sys.executable, tmp_path / "program.py"], programs.environment())
    assert done.stderr.startswith("instrument: an event (window=3): AttributeError(")


def test_the_level_of_the_program_counts(tmp_path: Path) -> None:
    """The level of the logger, and the handlers of a program, are those that the program chose."""
    quiet = "import logging\nlogging.getLogger('instrument').setLevel(logging.ERROR)\n"
    assert [] == stderr_of(tmp_path, quiet + PROGRAM, INSTRUMENT_LOG="json")
    configured = "import logging\nlogging.basicConfig(level=logging.INFO, format='> %(message)s')\n"
    lines = stderr_of(tmp_path, configured + PROGRAM, INSTRUMENT_LOG="json")
    assert ["> {"] * 2 == [line[:3] for line in lines]


def test_formats_that_are_not_accepted(caplog: pytest.LogCaptureFixture) -> None:
    """`configure` raises; a wrong variable is ignored with a warning."""
    with pytest.raises(ValueError, match="\"log\" must be one of quiet, console, json: 'xml'"):
        instrument.configure(log="xml")  # type: ignore[arg-type]
    Settings({"INSTRUMENT_LOG": "xml"})
    assert ["INSTRUMENT_LOG is ignored"] == events(caplog)
    assert "quiet" == log.output.format


def test_no_lock_without_handlers(tmp_path: Path) -> None:
    """An event takes no lock of `logging`, which a signal handler that raises could leave locked."""
    code = """
        import logging
        from instrument.base import log

        class Lock:
            def acquire(self, *_):
                print("locked")

            __enter__ = acquire

            def release(self, *_):
                pass

            __exit__ = release

        log.warning("first")
        logging._lock = Lock()
        log.warning("second")
        print("the end")
    """
    script = programs.program(code, tmp_path)
    done = subprocess.run(
        [sys.executable, script], env=programs.environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("the end\n")  # then the interpreter ends and locks
    assert "instrument: second\n" in done.stderr
