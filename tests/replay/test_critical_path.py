"""The critical path and the slack of simulated programs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from instrument.explain.replay.critical_path import add_critical_path, critical_path
from instrument.explain.replay.replay import Change, Replayer
from instrument.explain.replay.requests import Request
from instrument.explain.replay.what_if import what_if
from instrument.read.kineto.kineto import read_kineto
from tests.support.loops import Loop

from .machine import Machine
from .test_exact import CASES, MS, NCCL, US, run


def test_gpu_bound() -> None:
    """In a loop that the GPU bounds, its kernels are the path, and the CPU is not."""
    replayer = Replayer(run(CASES["a faster kernel"], changed=False, before=0).trace())
    classes = critical_path(replayer).by_class()
    assert classes == {"compute": 8 * MS, "latency": 104 * US}
    assert critical_path(replayer).off_path == ()
    assert not critical_path(replayer).slack_ns.any()


def test_cpu_bound() -> None:
    """In a loop that the CPU bounds, the path is its work, by region, and kernels have slack."""
    replayer = Replayer(run(CASES["a sleep"], changed=False, before=0).trace())
    path = critical_path(replayer)
    by_region = path.by_region()
    assert by_region[("sleep",), "overhead"] == 5 * 300 * US
    assert (
        path.by_class()["overhead"] == (4 * (300 + 10 * 12) + 300 + 10) * US
    )  # the GPU bounds the end of the last step
    assert sum(path.by_class().values()) == path.total_ns
    assert (path.slack_ns[:-10] > 0).all()


def test_slack() -> None:
    """A kernel may end later by its slack, and no more."""
    case = CASES["a faster kernel that nothing waits for"]
    machine = run(case, changed=False, before=0)
    replayer = Replayer(machine.trace())
    (work,) = critical_path(replayer).off_path
    assert (work.name, work.duration_ns) == ("softmax", 5 * 200 * US)
    names = replayer.trace.gpu.text("name")
    for longer, steps_are in ((work.slack_ns, machine.ends[-1]), (work.slack_ns + 1, machine.ends[-1] + 1)):
        factor = -longer / (200 * US)
        last = max(row for row, name in enumerate(names) if name == "softmax")
        saved = [factor if row == last else 0.0 for row in range(len(names))]
        path = critical_path(replayer, Change(saved=np.array(saved)))
        assert path.total_ns == steps_are - (machine.start or 0)


def test_communication() -> None:
    """Exposed communication is on the path by its own class."""
    path = critical_path(Replayer(run(CASES["overlapped communication"], changed=False, before=0).trace()))
    assert path.by_class()["communication"] == 5 * 300 * US
    changed = Replayer(run(CASES["overlapped communication"], changed=False, before=0).trace())
    overlapped = critical_path(changed, Change(overlapped=changed.communication))
    assert {part.name for part in overlapped.segments if part.kind == "communication"} <= {NCCL}


def test_path_without_a_region() -> None:
    """The path of the steps without a region has no work of this region, and adds up."""
    for name, region in (("a sleep", "sleep"), ("a sleep without a GPU", "sleep")):
        replayer = Replayer(run(CASES[name], changed=False, before=0).trace())
        path = what_if(replayer, Request(without=f"region:{region}")).critical_path
        assert path is not None
        assert {part.region for part in path.segments if part.kind == "overhead"} == {()}
        assert sum(part.duration_ns for part in path.segments) == path.total_ns


def test_synchronization() -> None:
    """The return of a call that waited is a part of the path."""
    machine = Machine()
    for _ in range(3):
        with machine.step():
            machine.launch(100 * US)
            machine.synchronize()
            machine.work(50 * US)
    path = critical_path(Replayer(machine.trace()))
    assert path.by_class() == {"compute": 300 * US, "synchronization": (9 + 150) * US, "latency": 15 * US}


def test_lane_in_a_copy(tmp_path: Path) -> None:
    """A copy of the trace has the path as a lane, and reads like the original."""
    loop = Loop()
    for number in range(3):
        with loop.step(number):
            loop.work(50)
            loop.launch(100)
            loop.synchronize()
    trace = loop.trace(tmp_path)
    out = tmp_path / "with_path.json"
    replayer = Replayer(trace)
    count = add_critical_path(trace, critical_path(replayer), out)
    events = [event for event in json.loads(out.read_text())["traceEvents"] if event.get("cat") == "critical_path"]
    assert len(events) == count == len(critical_path(replayer).segments)
    ends = [event["ts"] + event["dur"] for event in events]
    assert all(end <= event["ts"] + 1e-6 for end, event in zip(ends, events[1:], strict=False))
    assert {event["name"] for event in events} >= {"overhead", "volta_sgemm_128x64_tn"}
    copied = read_kineto(out)
    assert (len(copied.gpu), len(copied.runtime)) == (len(trace.gpu), len(trace.runtime))
