"""`instrument compare`, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import instrument
from instrument.read.tables.trace import Device
from tests.replay.machine import Machine

from .recordings import command, written
from .test_parts import loop


def test_text(traces: tuple[Path, Path]) -> None:
    """The verdict, the numbers behind it and the parts are printed."""
    shown = command(*traces)
    assert (
        "Slower: a step takes 457 us instead of 357 us (+28.0 %; medians of 8 steps before and 8 after)." in shown
    )
    assert "+100 us between the median steps" in shown
    assert "a change of 0." in shown


def test_json(traces: tuple[Path, Path]) -> None:
    """The JSON has all parts, which add up."""
    data = json.loads(command(*traces, "--json"))
    assert data["verdict"] == "slower"
    assert sum(part["ns"] for part in data["parts"]) == data["delta_ns"] == 100_000
    assert sum(kind["ns"] for kind in data["kinds"].values()) == data["delta_ns"]


def test_fail_on(traces: tuple[Path, Path]) -> None:
    """The command fails if the program became slower by the limit or more, and only then."""
    assert "slower: +28.0 %; --fail-on allows less than 5 %" in command(*traces, "--fail-on", "slower=5%", code=1)
    command(*traces, "--fail-on", "slower=30%")
    command(*reversed(traces), "--fail-on", "slower=5%")
    command(traces[0], traces[0], "--fail-on", "slower=0%")
    for text in ("slower", "slower=5", "faster=5%", "slower=-5%"):
        assert f"--fail-on must be slower=N%, such as slower=5%: '{text}'" in command(
            *traces, "--fail-on", text, code=2
        )


def test_not_comparable(traces: tuple[Path, Path], tmp_path: Path) -> None:
    """Recordings with and without a GPU are refused, and --fail-on fails with code 2."""
    alone = tmp_path / "cpu.json"
    data = json.loads(traces[0].read_text())
    data["traceEvents"] = [
        event for event in data["traceEvents"] if event["cat"] not in ("kernel", "cuda_runtime")
    ]
    alone.write_text(json.dumps(data))
    assert "Not comparable: only the trace before the change has GPU work" in command(traces[0], alone)
    assert "not comparable: only the trace" in command(traces[0], alone, "--fail-on", "slower=5%", code=2)


def test_few_steps(tmp_path: Path) -> None:
    """With three steps, the program is never faster or slower."""
    few = written(tmp_path, "few", 300, steps=3), written(tmp_path, "slow", 900, steps=3)
    shown = command(*few)
    assert "Cannot tell whether it changed: a side has fewer than 4 steps" in shown
    assert "p =" not in shown
    limit = "--fail-on", "slower=5%"
    assert (
        "whether the steps are 5 % slower: a side has fewer than 4 steps; record 20 or more on each side"
        in command(*few, *limit, code=2)
    )


def test_steps_that_vary_too_much(tmp_path: Path) -> None:
    """A limit below what the steps can show fails, with how many would do; so many do."""
    noise = [0, 60, -50, 30, -20, 10, 45, -35]
    noisy = [written(tmp_path, name, 300, varying_us=noise) for name in ("one", "two")]
    shown = command(*noisy, "--fail-on", "slower=5%", code=2)
    assert "8 steps that vary so much show a change of" in shown
    needed = int(shown.partition("record about ")[2].split()[0].replace(",", ""))
    assert needed > 8
    more = [written(tmp_path, name, 300, needed, noise) for name in ("three", "four")]
    command(*more, "--fail-on", "slower=5%")
    command(*noisy, "--fail-on", "slower=0%")
    command(*noisy, "--fail-on", "slower=90%")


def test_files_that_cannot_be_read(traces: tuple[Path, Path], tmp_path: Path) -> None:
    """A missing file is reported in one line, and a trace without events on the CPU too."""
    assert "cannot read" in command(traces[0], tmp_path / "missing.json", code=1)
    empty = tmp_path / "gpu.json"
    empty.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "pid": 0, "tid": 7}]}'
    )
    assert "the trace has no events on the CPU" in command(empty, empty, code=2)


def test_inputs() -> None:
    """Traces and diagnoses are accepted; of diagnoses, only those from `diagnose`."""
    one, two = loop(kernels=3).trace(), loop(kernels=4).trace()
    change = instrument.compare(instrument.diagnose(one), two)
    assert change.verdict == "slower"
    assert change.delta_ns == instrument.compare(one, two).delta_ns
    with pytest.raises(ValueError, match="can be compared"):
        instrument.compare(replace(instrument.diagnose(one), facts=None), two)
    with pytest.raises(TypeError, match='"trace" must be a trace'):
        instrument.compare(one, 5)  # type: ignore[arg-type]


def test_stretched_recordings() -> None:
    """A profile that stretches one side much more than the other prevents a comparison."""
    one, two = (instrument.diagnose(loop(kernels=3).trace()) for _ in range(2))
    change = instrument.compare(replace(one, stretch=1.1), replace(two, stretch=2.0))
    assert change.reasons == ("recording made steps 1.10 and 2.00 times as long",)
    assert instrument.compare(replace(one, stretch=1.1), replace(two, stretch=1.2)).reasons == ()


def test_a_stretch_that_explains_no_change() -> None:
    """A change that is larger than recording can make it, or in the other direction, is said, with a note."""
    slow, fast = (instrument.diagnose(loop(kernels=count).trace()) for count in (6, 1))
    for ranges in (((1.8, 2.0), (0.9, 1.1)), ((0.9, 1.1), (1.8, 2.0))):
        one, two = (
            replace(each, stretch=sum(span) / 2, stretch_range=span)
            for each, span in zip((slow, fast), ranges, strict=True)
        )
        change = instrument.compare(one, two)
        assert (change.verdict, change.reasons) == ("faster", ())
        assert any("recording made steps" in note for note in change.notes)
    assert instrument.compare(replace(slow, stretch=9.0), replace(fast, stretch=1.0)).verdict == "not comparable"


def test_a_stretch_that_may_be_chance() -> None:
    """Two stretches whose ranges overlap prevent nothing."""
    one, two = (instrument.diagnose(loop(kernels=3).trace()) for _ in range(2))
    near, far = (
        replace(one, stretch=1.0, stretch_range=(0.6, 1.5)),
        replace(two, stretch=1.8, stretch_range=(1.4, 2)),
    )
    assert instrument.compare(near, far).verdict == "no change seen"


def test_opposite_directions() -> None:
    """If the mean step is longer but the median step is not, there is no verdict."""

    def program(lengths: list[int]) -> Machine:
        machine = Machine()
        for ns in lengths:
            with machine.step():
                machine.work(ns * 1000)
        return machine

    one, two = program([600, 1000] * 20), program([598, 598, 1400, 1400, 598] * 8)
    change = instrument.compare(one.trace(), two.trace())
    assert change.delta_ns < 0
    assert change.verdict == "no change seen"


def test_devices_with_other_numbers() -> None:
    """Devices are compared by name also where the work has other numbers than the list of devices."""
    made = loop(kernels=3).trace()
    traces = [replace(made, devices=[Device(5, name=name)]) for name in ("H100", "MI300X")]
    assert instrument.compare(*traces).reasons == ("the devices differ: H100 and MI300X",)


def test_versions() -> None:
    """Other versions of CUDA are named, and do not prevent a comparison."""
    one, two = Machine(), Machine()
    for machine in (one, two):
        for _ in range(6):
            with machine.step():
                machine.launch(1000)
    traces = [
        replace(made.trace(), metadata={"cuda_runtime_version": number}) for made, number in ((one, 1), (two, 2))
    ]
    change = instrument.compare(*traces)
    assert change.notes == ("the versions of the CUDA runtime differ: 1 and 2",)
    assert change.verdict == "no change seen"


def test_the_chosen_files(traces: tuple[Path, Path], tmp_path: Path) -> None:
    """Of folders with several traces, the files that are compared are named."""
    for number, path in enumerate(traces):
        for rank in range(2):
            out = tmp_path / str(number) / f"rank{rank}.json"
            out.parent.mkdir(exist_ok=True)
            out.write_bytes(path.read_bytes())
    shown = command(tmp_path / "0", tmp_path / "1", "--rank", "1")
    for number, name in enumerate(("before", "after")):
        assert f"Compared, {name}: " in shown
        assert f"{number}/rank1.json" in shown
    assert "Compared" not in command(*traces)
