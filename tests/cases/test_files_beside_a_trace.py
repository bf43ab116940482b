"""Files that the library writes beside a trace are no traces, whatever their size."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import instrument
from instrument.base.errors import TraceError
from instrument.record.slow_steps.box import BlackBox
from instrument.start import cli
from tests.support.loops import Loop


@pytest.fixture
def window(tmp_path: Path) -> Path:
    """Return the folder of a window with a trace and, each of more than 64 KiB, two files beside it."""
    made, folder = Loop(), tmp_path / "window-0001"
    folder.mkdir()
    for number in range(5):
        with made.step(number):
            made.work(1000)
    made.trace(folder)
    trace = (folder / "trace.json").rename(folder / "rank0.1.pt.trace.json")
    box = BlackBox(6000)
    box.start()
    for _ in range(6000):
        box.end_step()
    box.stop()
    for name, text in (("black_box", box.to_json()), ("diagnosis", instrument.diagnose(trace).to_json())):
        path = folder / f"rank0.1.{name}.json"
        path.write_text(text + " " * (1 << 16))
    return folder


def test_a_folder_with_files_beside_a_trace(window: Path) -> None:
    """The folder holds one trace, and no file of it is broken."""
    traces = instrument.read_traces(window)
    assert [path.name for path in (traces[0].path,)] == ["rank0.1.pt.trace.json"]
    assert (traces.failed, traces.left_out) == ({}, {})
    for command in ("summarize", "diagnose"):
        shown = CliRunner().invoke(cli.app, [command, str(window)])
        assert shown.exit_code == 0, shown.output
        assert "rank0.1.black_box.json" not in shown.output
        assert "damaged" not in shown.output


@pytest.mark.parametrize(("name", "said"), [("black_box", "that a black box wrote"), ("diagnosis", "a diagnosis")])
def test_a_file_beside_a_trace_is_named(window: Path, name: str, said: str) -> None:
    """Such a file alone, under any name, is refused with what it is."""
    path = (window / f"rank0.1.{name}.json").rename(window.parent / "renamed.json")
    with pytest.raises(TraceError, match=said):
        instrument.read_trace(path)
