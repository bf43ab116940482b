"""A slim trace has the same metrics and findings as its source, of recorded and real traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import instrument
from instrument import cli
from instrument.diagnosis.diagnose import Diagnosis, diagnose
from instrument.diagnosis.serialize import as_dict
from instrument.errors import TraceError
from tests.support.shared_traces import shared

SAMPLE = Path(__file__).parents[1] / "data" / "gpu_two_steps.json"
REAL = (
    "tl_h100_bert_small.json.gz", "kineto_tb_resnet50_nw0_v100.json.gz", "hta_nccl_data.json.gz",
    "hta_alexnet_cudasync.json.gz", "param_dlrm_8rank_r0.json.gz", "tl_mi300_bert_small.json.gz",
)  # fmt: skip


def shown(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return all that a diagnosis says, but for the name of the file."""
    return as_dict(diagnosis) | {"path": ""}


def test_recorded_trace(tmp_path: Path) -> None:
    """The diagnosis of the slim trace is that of its source, number by number."""
    slimmed = instrument.slim(SAMPLE, tmp_path / "small.json.gz")
    assert (slimmed.changed, slimmed.steps) == ((), None)
    assert shown(diagnose(slimmed.path)) == shown(diagnose(SAMPLE))
    assert slimmed.bytes == slimmed.path.stat().st_size < slimmed.source_bytes == SAMPLE.stat().st_size


@pytest.mark.parametrize("name", REAL)
def test_real_trace(name: str, tmp_path: Path) -> None:
    """A real trace becomes at least twice as small, gzip to gzip, and all metrics stay, bit by bit."""
    source = shared(name)
    slimmed = instrument.slim(source, tmp_path / "small.json.gz")
    assert slimmed.changed == ()
    before, after = (instrument.metrics(instrument.read_trace(path)) for path in (source, slimmed.path))
    assert dict(before) == dict(after)
    assert len(gzip.compress(gzip.decompress(source.read_bytes()), 9)) >= 2 * slimmed.bytes
    again = instrument.slim(slimmed.path, tmp_path / "again.json.gz")
    assert again.bytes <= slimmed.bytes


def test_valid_for_viewers(tmp_path: Path) -> None:
    """The file is JSON, and each event has what a viewer reads: phase, place, time and, if it lasts, a length."""
    slimmed = instrument.slim(SAMPLE, tmp_path / "small.json")
    events = json.loads(slimmed.path.read_text())["traceEvents"]
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert named <= {event["tid"] for event in events if event["ph"] == "X"}


def test_fewer_steps(tmp_path: Path) -> None:
    """The numbers of a trace with fewer steps are those of these steps, as the file and the diagnosis say."""
    slimmed = instrument.slim(SAMPLE, tmp_path / "small.json.gz", steps=1)
    assert slimmed.steps == (1, 2)
    found = diagnose(slimmed.path)
    assert found.steps == 1
    assert any("1 of" in finding.title for finding in found.findings)


def test_stand_ins(tmp_path: Path) -> None:
    """Names that identify somebody are gone from the file; those of torch, and all numbers, stay."""
    data = json.loads(SAMPLE.read_text())
    secret = (
        "/home/mallory/secret_project/train.py(12): secret_step",
        "C:\\Users\\mallory\\x.py",
        "mallory@host-7",
    )
    first = next(event for event in data["traceEvents"] if event.get("cat") == "cpu_op")
    for number, name in enumerate(secret):
        data["traceEvents"].append(
            first | {"cat": "user_annotation", "name": name, "args": {"path": secret[number]}}
        )
    source = tmp_path / "trace.json"
    source.write_text(json.dumps(data))
    slimmed = instrument.slim(source, anonymise=True)
    text = gzip.decompress(slimmed.path.read_bytes()).decode()
    for word in ("mallory", "secret", "host-7", "Users"):
        assert word not in text
    before, after = diagnose(source), diagnose(slimmed.path)
    assert (before.step_ns, before.parts) == (after.step_ns, after.parts)
    assert (
        instrument.slim(source, tmp_path / "again.json.gz", anonymise=True).path.read_bytes()[10:]
        == (slimmed.path.read_bytes()[10:])
    )


def test_refused(tmp_path: Path) -> None:
    """The source itself, other formats and wrong numbers are refused; nothing is left behind."""
    copy = tmp_path / "trace.json"
    copy.write_bytes(SAMPLE.read_bytes())
    with pytest.raises(ValueError, match="trace"):
        instrument.slim(copy, copy)
    with pytest.raises(ValueError, match="steps"):
        instrument.slim(copy, steps=0)
    with pytest.raises(TypeError, match="steps"):
        instrument.slim(copy, steps="2")  # type: ignore[arg-type]
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    with pytest.raises(TraceError):
        instrument.slim(damaged)
    with pytest.raises(OSError):
        instrument.slim(copy, tmp_path / "missing" / "small.json.gz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged.json", "trace.json"]


def test_command(tmp_path: Path) -> None:
    """The command says what it kept, and writes beside the trace."""
    copy = tmp_path / "trace.json"
    copy.write_bytes(SAMPLE.read_bytes())
    result = CliRunner().invoke(cli.app, ["slim", str(copy)])
    assert result.exit_code == 0
    assert "Metrics and findings are the same" in " ".join(result.output.split())
    assert (tmp_path / "trace.slim.json.gz").exists()
    assert CliRunner().invoke(cli.app, ["slim", str(tmp_path / "none.json")]).exit_code == 1
    assert CliRunner().invoke(cli.app, ["slim", str(copy), "--out", str(copy)]).exit_code == 2
