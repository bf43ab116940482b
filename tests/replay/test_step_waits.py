"""What a step waits for: the bound is what a program is shortest without, and the parts hold what is won."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from instrument.explain.diagnosis.diagnose import diagnose
from instrument.explain.replay.critical_path import CriticalPath, critical_path
from instrument.explain.replay.replay import Change, Replayer, SavedWork, mean_ns
from instrument.explain.replay.step_waits import StepWaits, removals, step_waits
from instrument.show.text.diagnosis import evidence_texts
from tests.support.shared_traces import shared

from .machine import Costs, Machine

US = 1_000
Action = tuple[str, int]
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"
durations = st.integers(1, 400).map(lambda us: us * US)
actions = st.lists(
    st.tuples(st.sampled_from(["work", "launch", "launch", "reduce", "sync", "batch"]), durations),
    min_size=1,
    max_size=20,
)


def record(program: list[Action], without: str = "", *, marked: bool = True) -> Machine:
    """Run three steps of a program in which one class of work costs nothing; ``marked`` says where they are."""
    instant = {"compute": "compute", "communication": "nccl"}.get(without, "-")
    costs = Costs(call=0) if without == "overhead" else Costs()
    machine = Machine(costs, faster=lambda name: 1e12 if name.startswith(instant) else 1)
    machine.launch(10 * US, 7)
    machine.synchronize()
    for _ in range(3):
        with machine.step() if marked else nullcontext():
            for action, ns in program:
                if action == "work":
                    machine.work(0 if without == "overhead" else ns)
                elif action == "launch":
                    machine.launch(ns)
                elif action == "reduce":
                    machine.launch(ns, name=NCCL)
                elif action == "batch":
                    with machine.region(LOADER):
                        machine.work(0 if without == "input" else ns)
                elif without != "synchronization":
                    machine.synchronize()
            machine.work(0 if without == "overhead" else 30 * US)
    return machine


def waits_of(program: list[Action]) -> tuple[StepWaits, float]:
    replayer = Replayer(record(program).trace())
    assert replayer.abstained is None
    return step_waits(replayer), mean_ns(replayer.recorded_ns)


@settings(max_examples=60, deadline=None)
@given(actions, st.sampled_from(["compute", "communication", "input", "synchronization", "overhead"]))
def test_a_program_without_a_class(program: list[Action], name: str) -> None:
    """What a step wins in the replay is what the program wins when it runs without that class."""
    waits, step_ns = waits_of(program)
    lengths = record(program, without=name).lengths
    won = step_ns - sum(lengths) / len(lengths)
    began = max(lengths[0] - sum(lengths[1:]) / 2, 0) / 3  # the program begins when the GPU has nothing to do
    calls = sum(action == "sync" for action, _ in program) * Costs().returned if name == "synchronization" else 0
    assert waits.wins.get(name, 0) == pytest.approx(won, abs=calls + began + 0.1 * US)


@settings(max_examples=60, deadline=None)
@given(actions)
def test_the_parts_hold_what_is_won(program: list[Action]) -> None:
    """The parts add up to the step, and a class wins no more than its own.

    A wait for the GPU also delays what follows it: the CPU's work, the wait for a batch, and the next launch.
    """
    waits, step_ns = waits_of(program)
    check_parts(waits, step_ns)


@settings(max_examples=30, deadline=None)
@given(actions)
def test_programs_without_steps(program: list[Action]) -> None:
    """A recording without steps has one length, which its parts add up to, and one critical path."""
    trace = record(program, marked=False).trace()
    found = diagnose(trace)
    assert found.waits is not None
    assert found.replayer is not None
    assert found.step_ns == trace.gpu.end_ns.max() - trace.runtime.start_ns.min() == found.what_if().before_ns
    check_parts(found.waits, found.step_ns)
    check_one_path(found.replayer, Change())
    check_one_path(found.replayer, CHEAPER_CPU)


def check_parts(waits: StepWaits, step_ns: float) -> None:
    parts = dict(waits.parts)
    assert sum(parts.values()) == pytest.approx(step_ns, abs=len(parts))
    late = parts["synchronization"]
    parts["synchronization"] += parts["overhead"] + parts["input"] + parts["latency"]
    parts["overhead"] += late
    for name, won in waits.wins.items():
        # the path of three steps begins with the first: what the GPU does at the end of a step is on it twice
        assert -1 <= won <= 1.5 * parts[name] + 0.01 * step_ns, name


@settings(max_examples=30, deadline=None)
@given(actions)
def test_the_bound_wins_most(program: list[Action]) -> None:
    """What bounds a step is what it is shortest without, or as short within 5 %; nothing if all win less."""
    assume(any(action in ("launch", "reduce") for action, _ in program))
    found = diagnose(record(program).trace())
    assert found.waits is not None
    most = max(found.waits.wins.values())
    if found.bound is None and most >= 0.05 * found.step_ns:
        assert found.verdict.startswith("Bound by kernels")
    elif found.bound is None:
        assert found.verdict.startswith("No single bound")
    else:
        won = found.waits.wins["compute" if found.bound == "memory" else found.bound]
        assert won >= most - 0.05 * found.step_ns


def test_a_gpu_that_is_busy_at_first() -> None:
    """A recording without steps begins when the GPU has done what was launched before, recorded or not."""
    machine = Machine()
    for _ in range(6):
        machine.launch(4_000 * US)
    for table in ("gpu", "runtime"):
        del machine.rows[table][0]
    found = diagnose(machine.trace())
    assert found.step_ns == 4 * (4_000 * US + Costs().stream)
    assert (found.waits is not None, found.what_if().before_ns) == (True, found.step_ns)
    assert found.parts["overhead"] == 0


def test_a_loader_is_named_before_busy_kernels() -> None:
    """Kernels busy for most of a step bound nothing while the loop waits for its batches, as in a real ResNet."""
    found = diagnose(shared("kineto_tb_resnet50_nw0_v100.json.gz"))
    assert found.parts["compute"] > 0.5 * found.step_ns
    assert found.bound == "overhead"
    assert found.waits is not None
    assert found.waits.wins["input"] == pytest.approx(0.33 * found.step_ns, rel=0.02)
    assert found.waits.wins["compute"] < 0.05 * found.step_ns
    balanced = diagnose(shared("tl_h100_qwen05b.json.gz"))
    assert (balanced.bound, balanced.parts["compute"] > 0.9 * balanced.step_ns) == (None, True)


def check_one_path(replayer: Replayer, change: Change) -> None:
    """Check that the critical path that `whatif` shows has the parts that the diagnosis names, after a change."""
    check_path(critical_path(replayer, change), step_waits(replayer, change))


def check_path(path: CriticalPath, waits: StepWaits) -> None:
    """Check that the parts of a critical path are those of the steps."""
    classes, whole = path.by_class(), max(sum(waits.parts.values()), 1)
    assert sum(classes.values()) == path.total_ns
    for name, ns in waits.parts.items():
        assert classes.get(name, 0) / max(path.total_ns, 1) == pytest.approx(ns / whole, abs=0.003), name


CHEAPER_CPU = Change(work_saved=(SavedWork(0.9),))


@settings(max_examples=30, deadline=None)
@given(actions)
def test_one_critical_path(program: list[Action]) -> None:
    """The parts of a step are those of its critical path, as recorded and after a change."""
    replayer = Replayer(record(program).trace())
    for change in (Change(), CHEAPER_CPU, removals(replayer)["input"]):
        check_one_path(replayer, change)


def test_regions_of_python_between_operators() -> None:
    """Work that no operator covers is named by the innermost region; launches and waits in it do not count."""
    machine = Machine(Costs())
    for _ in range(3):
        with machine.step(), machine.region("train"):
            machine.python(100 * US)
            with machine.region("augment"):
                machine.python(700 * US)
                machine.launch(10 * US)
            with machine.region(LOADER):
                machine.python(300 * US)
    waits = step_waits(Replayer(machine.trace()))
    assert list(waits.regions) == ["augment", "train"]
    assert waits.regions["augment"] == pytest.approx(700 * US, rel=0.02)
    assert waits.regions["train"] == pytest.approx(100 * US, rel=0.05)
    assert sum(waits.regions.values()) <= waits.work["between_operators"]
    (sentence,) = [text for text in evidence_texts(diagnose(machine.trace())) if "overhead is" in text]
    assert sentence == (
        "The overhead is 800 us while Python or other code runs between operators "
        "(700 us in augment, 100 us in train)."
    )
