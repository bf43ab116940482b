"""Traces that the program exports itself are compressed, summarized and diagnosed in another process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from instrument.integrations.torchtitan import process_trace
from instrument.record.handover.finishing_process import finish


def export(path: Path) -> Path:
    """Export a trace of two steps as a program does."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        for _ in range(2):
            torch.ones(3).sum()
            prof.step()
    prof.export_chrome_trace(str(path))
    return path


@pytest.mark.parametrize("name", ["rank0_trace.json.gz", "rank0_trace.json"])
def test_a_trace_gets_its_summary_and_diagnosis(tmp_path: Path, name: str) -> None:
    """The files are beside the trace, which is gzipped afterwards in any case."""
    process_trace(str(export(tmp_path / name)))
    finish()
    expected = [f"rank0_trace{end}" for end in (".diagnosis.html", ".diagnosis.json", ".json.gz", ".summary.txt")]
    assert expected == sorted(path.name for path in tmp_path.iterdir())
    assert json.loads((tmp_path / "rank0_trace.diagnosis.json").read_text())["verdict"]
    assert "aten::ones" in (tmp_path / "rank0_trace.summary.txt").read_text()


def test_a_trace_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The failure is logged and the next trace is processed."""
    broken = tmp_path / "a.json.gz"
    broken.write_bytes(b"no trace")
    process_trace(broken)
    process_trace(export(tmp_path / "b.json.gz"))
    finish()
    assert "processing a trace failed" in caplog.text
    assert (tmp_path / "b.diagnosis.json").exists()
    assert not (tmp_path / "a.diagnosis.json").exists()
