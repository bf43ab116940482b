"""The parts of a difference add up to it, and name what appeared, changed and is gone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

import instrument
from instrument.explain.comparison.step_parts import step_parts
from instrument.explain.rules.trace_facts import TraceFacts
from tests.diagnosis.small_traces import kernel, memcpy, on_cpu, trace_of
from tests.replay.machine import Machine
from tests.replay.test_properties import actions, record

US = 1_000
NCCL = "ncclDevKernel_AllReduce_Sum_f32"


@settings(max_examples=20, deadline=None)
@given(actions, actions)
def test_parts_add_up(one: list[tuple[str, int, int]], two: list[tuple[str, int, int]]) -> None:
    """The parts of any two programs add up to the difference of their lower medians."""
    before, after = record(one), record(two)
    change = instrument.compare(before.trace(), after.trace())
    assert change.before_ns == sorted(before.lengths)[1]
    assert change.after_ns == sorted(after.lengths)[1]
    assert sum(part.ns for part in change.parts) == change.delta_ns == change.after_ns - change.before_ns
    assert sum(part.before_ns for part in change.parts) == change.before_ns
    assert sum(change.by_kind().values()) == sum(change.by_region().values()) == change.delta_ns


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 90), st.integers(0, 40), st.sampled_from(["gemm", NCCL, "Memcpy HtoD"])),
        max_size=12,
    ),
    st.integers(0, 50),
    st.integers(51, 130),
)
def test_any_interval_is_divided(works: list[tuple[int, int, str]], start: int, end: int) -> None:
    """Any interval is divided exactly, whatever overlaps in it; compute comes before communication and copies."""
    rows = [
        (memcpy if name.startswith("Memcpy") else kernel)(name, begin, begin + length, stream=number)
        for number, (begin, length, name) in sorted(enumerate(works), key=lambda item: item[1][0])
    ]
    facts = TraceFacts(trace_of(operators=[on_cpu("aten::mm", 0, 130)], **({"gpu": rows} if rows else {})))
    parts = step_parts(facts, start, end)
    assert sum(part.ns for part in parts.values()) == end - start
    assert all(part.ns >= 0 for part in parts.values())
    compute = set[int]()
    for begin, length, name in works:
        if name == "gemm":
            compute |= set(range(max(begin, start), min(begin + length, end)))
    assert sum(part.ns for key, part in parts.items() if key.kind == "compute") == len(compute)


def loop(*, kernels: int, extra: str = "", sleep: int = 0, steps: int = 8) -> Machine:
    machine = Machine()
    for _ in range(steps):
        with machine.step():
            with machine.region("forward"):
                for _ in range(kernels):
                    machine.launch(100 * US)
                if extra:
                    machine.launch(250 * US, name=extra)
            with machine.region("log"):
                machine.work(10 * US + sleep)
            machine.synchronize()
    return machine


def test_a_kernel_that_appeared() -> None:
    """A kernel that only the second program runs is a part of its own, with its region."""
    change = instrument.compare(loop(kernels=5).trace(), loop(kernels=5, extra="softmax").trace())
    (new,) = [part for part in change.parts if part.change == "appeared"]
    assert (new.kind, new.kernel, new.region, new.ns, new.after_calls) == (
        "compute",
        "softmax",
        ("forward",),
        250 * US,
        1,
    )
    assert change.verdict == "slower"
    assert (change.delta_ns, change.p_value is not None) == (251 * US, True)
    back = instrument.compare(loop(kernels=5, extra="softmax").trace(), loop(kernels=5).trace())
    assert back.verdict == "faster"
    assert [part.change for part in back.parts if part.kernel == "softmax"] == ["gone"]


def test_fewer_calls() -> None:
    """A kernel that runs less often is one part with the numbers of its calls."""
    change = instrument.compare(loop(kernels=5).trace(), loop(kernels=3).trace())
    (part,) = [part for part in change.parts if part.kernel]
    assert (part.ns, part.before_calls, part.after_calls) == (-200 * US, 5, 3)


def test_time_on_the_cpu() -> None:
    """In programs without a GPU, the parts are regions and operators."""

    def program(ns: int) -> Machine:
        machine = Machine()
        for _ in range(6):
            with machine.step():
                machine.work(100 * US, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
                with machine.region("train"):
                    machine.work(ns, "aten::mm")
        return machine

    change = instrument.compare(program(500 * US).trace(), program(700 * US).trace())
    assert change.by_kind() == {"cpu": 200 * US, "input": 0}
    assert [(part.region, part.operator) for part in change.parts if part.ns] == [(("train",), "aten::mm")]


def test_equal_recordings() -> None:
    """A recording does not differ from itself."""
    trace = loop(kernels=4).trace()
    change = instrument.compare(trace, trace)
    assert (change.verdict, change.delta_ns, change.p_value) == ("no change seen", 0, 1.0)
    assert not any(part.ns for part in change.parts)
    assert (change.gone, change.new) == ((), ())
