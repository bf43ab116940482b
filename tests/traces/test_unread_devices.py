"""Events of devices that the library does not know are counted, never silently missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from instrument.read.jobs.read import read_trace
from instrument.read.tables.trace import Trace, UnreadDevice
from instrument.start.cli import app
from tests.support.shared_traces import shared

Event = dict[str, Any]


def process(pid: int | str, **about: str) -> list[Event]:
    """Return the metadata of a process: its ``name``, its ``labels`` or both."""
    return [
        {"ph": "M", "name": f"process_{kind}", "pid": pid, "tid": 0, "args": {kind: text}}
        for kind, text in about.items()
    ]


def work(pid: int | str, start: int, end: int, category: str | None = None, name: str = "k") -> Event:
    """Return a complete event; times in us."""
    event = {"ph": "X", "name": name, "pid": pid, "tid": 1, "ts": start, "dur": end - start}
    return event | ({"cat": category} if category else {})


OPERATOR = work(1, 0, 50, "cpu_op", "aten::mm")


def read(tmp_path: Path, *events: Event) -> Trace:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return read_trace(path)


@pytest.mark.parametrize("named", ["name", "labels"])
def test_unknown_device(tmp_path: Path, named: str) -> None:
    """A device is known by its label, else by its name; overlapping events count once in the time."""
    events = [work(7, 10, 30, "fancy_kernel"), work(7, 20, 40), work(7, 60, 70, "fancy_copy")]
    about = process(7, **{named: "FancyNPU 0"})
    trace = read(tmp_path, *process(1, name="python", labels="CPU"), *about, OPERATOR, *events)
    assert trace.unread_devices == {"FancyNPU 0": UnreadDevice(3, 40_000)}
    assert (len(trace.gpu), len(trace.others)) == (0, 3)


def test_label_before_name(tmp_path: Path) -> None:
    """The label of a process says more than its name, in any order."""
    for about in (process(7, name="python", labels="NPU 1"), process(7, labels="NPU 1", name="python")):
        assert [*read(tmp_path, *about, OPERATOR, work(7, 0, 1)).unread_devices] == ["NPU 1"]


def test_known_device(tmp_path: Path) -> None:
    """A GPU whose events are read has none left out; other events of its process are."""
    events = [*process(0, labels="GPU 0"), OPERATOR, work(0, 10, 20, "kernel")]
    assert read(tmp_path, *events).unread_devices == {}
    assert read(tmp_path, *events, work(0, 30, 35, "new")).unread_devices == {"GPU 0": UnreadDevice(1, 5_000)}


def test_unknown_events_of_the_cpu(tmp_path: Path) -> None:
    """Unknown events of the CPU beside known ones are no device; alone, they are regions."""
    host = [*process("h", name="my profiler"), work("h", 0, 10), work("x", 20, 25)]
    assert read(tmp_path, OPERATOR, *host).unread_devices == {}
    alone = read(tmp_path, *host)
    assert (alone.unread_devices, len(alone.regions), len(alone.others)) == ({}, 2, 0)


def test_odd_metadata(tmp_path: Path) -> None:
    """Metadata of another type is no name."""
    odd = {"ph": "M", "name": "process_labels", "pid": 7, "tid": 0, "args": {"labels": [1]}}
    trace = read(tmp_path, odd, *process(7, name="TPU"), OPERATOR, work(7, 0, 1))
    assert trace.unread_devices == {"TPU": UnreadDevice(1, 1_000)}


def test_command(tmp_path: Path) -> None:
    """The summary ends with what was left out, and the JSON has it."""
    read(tmp_path, *process(7, labels="FancyNPU 0"), OPERATOR, work(7, 10, 30))
    run = CliRunner().invoke
    shown = run(app, ["summarize", str(tmp_path / "trace.json")]).output
    assert "Left out: 1 event of FancyNPU 0, 20.0 us, as their categories are unknown." in shown
    numbers = json.loads(run(app, ["summarize", str(tmp_path / "trace.json"), "--json"]).output)
    assert numbers["unread_devices"] == {"FancyNPU 0": {"events": 1, "busy_ns": 20_000}}


@pytest.mark.parametrize(
    "name", ["hta_mtia_rank0", "tl_h100_owlv2", "tl_mi300_resnet_actckpt", "kineto_tb_resnet50_nw0_v100"]
)
def test_real_traces(name: str) -> None:
    """The devices of these traces are read completely."""
    assert read_trace(shared(f"{name}.json.gz")).unread_devices == {}
