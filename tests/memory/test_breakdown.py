"""What the peak is: all parts add up to it, and categories follow from stacks, passes and sizes."""

from __future__ import annotations

import pickle
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import instrument
from instrument.base.source_paths import is_library
from instrument.read.memory.breakdown import Breakdown, compare_peaks, compare_regions
from instrument.read.memory.categories import CATEGORIES, EVIDENCE
from instrument.read.memory.passes import FORWARD_PASS, OPTIMIZER_STEP

from ..support.shared_traces import shared
from .snapshots import block, event, segment, write
from .test_read import PEAKS

MODULE = "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py"
ROOT = {"name": "<module>", "filename": "/home/me/train.py", "line": 1}


def frames(*lines: tuple[str, str, int]) -> list[dict[str, Any]]:
    """Return a stack, the innermost frame first, that a script started."""
    return [*({"filename": file, "name": name, "line": line} for file, name, line in lines), ROOT]


FORWARD = frames(
    ("/home/me/model.py", "forward", 12), (MODULE, "_call_impl", 9), ("/home/me/train.py", "train", 40)
)
OPTIMIZER = frames(
    ("/usr/lib/python3.11/site-packages/torch/optim/adam.py", "step", 5), ("/home/me/train.py", "train", 42)
)
BATCH = frames(("/home/me/data.py", "load", 3))
STEP = [
    event("alloc", 1, 640, frames=BATCH),
    event("alloc", 2, 320, frames=FORWARD),  # an activation
    event("alloc", 3, 80, frames=FORWARD),  # freed in the forward pass
    event("free_completed", 3, 80, frames=FORWARD),
    event("alloc", 4, 70, frames=[]),  # freed in the backward pass
    event("free_completed", 2, 320, frames=[]),
    event("alloc", 5, 1000, frames=[]),  # the gradient of the parameter
    event("free_completed", 4, 70, frames=[]),
    event("alloc", 6, 1000, frames=OPTIMIZER),
    event("alloc", 7, 1000, frames=OPTIMIZER),
    event("alloc", 8, 90, frames=OPTIMIZER),
    event("free_completed", 8, 90, frames=OPTIMIZER),
]
OLDER = [segment([{**block(100, 1000), "frames": []}])]


def replayed(path: Path, device: int) -> tuple[int, Counter[tuple[str, int] | None]]:
    """Return the peak of a GPU, and the bytes of each line of the program then, by a loop over dictionaries."""
    data = pickle.loads(path.read_bytes())
    traces = data.get("device_traces") or [[]]
    events = traces[device] if device < len(traces) else []
    alive: dict[int, tuple[int, tuple[str, int] | None]] = {}
    first: dict[int, str] = {}
    for each in events:
        if each["action"] in ("alloc", "free_completed"):
            if each["addr"] not in first and each["action"] == "free_completed":
                alive[each["addr"]] = each["size"], None
            first.setdefault(each["addr"], each["action"])
    for part in data["segments"]:
        address = part["address"]
        for each in part["blocks"] if part["device"] == device else []:
            at = each.get("address", address)
            if each["state"].startswith("active") and at not in first:
                alive[at] = each["size"], line_of(each.get("frames", []))
            address += each["size"]
    used = most = sum(size for size, _ in alive.values())
    peak = dict(alive)
    for each in events:
        if each["action"] == "alloc":
            used += each["size"] - alive.get(each["addr"], (0, None))[0]
            alive[each["addr"]] = each["size"], line_of(each.get("frames", []))
        elif each["action"] == "free_completed" and each["addr"] in alive:
            used -= alive.pop(each["addr"])[0]
        if used > most:
            most, peak = used, dict(alive)
    lines = Counter[tuple[str, int] | None]()
    for size, line in peak.values():
        lines[line] += size
    return most, lines


def line_of(stack: list[dict[str, Any]]) -> tuple[str, int] | None:
    python = [each for each in stack if each["filename"].endswith(".py") or each["filename"].startswith("<")]
    own = [each for each in python if not is_library(each["filename"])]
    return next(((each["filename"], each["line"]) for each in own or python), None)


def lines_of(found: Breakdown) -> Counter[tuple[str, int] | None]:
    lines = Counter[tuple[str, int] | None]()
    for use in found.uses:
        lines[use.place and (use.place.file, use.place.line)] += use.bytes
    return lines


@pytest.mark.parametrize("name", PEAKS)
def test_lines_of_real_snapshots(name: str) -> None:
    """Bytes by line are those of a replay of the events; all but 5 % has a line or evidence."""
    path = shared(f"memory/{name}.pickle")
    found = instrument.read_memory(path).break_down()
    most, lines = replayed(path, 0)
    assert (most, lines) == (found.peak.bytes, lines_of(found))
    assert found.unknown_bytes <= 0.05 * most
    assert most == sum(use.bytes for use in found.uses) == sum(map(sum, found.by_category().values()))


addresses = st.integers(1, 6)
events = st.lists(
    st.builds(
        event, st.sampled_from(["alloc", "free_requested", "free_completed", "oom"]), addresses,
        st.integers(1, 1000), frames=st.sampled_from([FORWARD, OPTIMIZER, BATCH, []]),
    ),
    max_size=40,
)  # fmt: skip


@given(events)
def test_every_byte_is_in_one_part(
    tmp_path_factory: pytest.TempPathFactory, recorded: list[dict[str, Any]]
) -> None:
    """Whatever the events are, the parts add up, and each has a category and evidence that are described."""
    sizes: dict[int, int] = {}
    for each in recorded:  # a free has the size of its allocation
        each["size"] = sizes[each["addr"]] = (
            each["size"] if each["action"] == "alloc" else sizes.get(each["addr"], each["size"])
        )
    found = instrument.read_memory(
        write(tmp_path_factory.mktemp("made") / "a.pickle", [recorded], OLDER)
    ).break_down()
    assert found.peak.bytes == sum(use.bytes for use in found.uses)
    assert found.peak.bytes == found.known_bytes + found.inferred_bytes + found.unknown_bytes
    assert {use.category for use in found.uses} <= CATEGORIES.keys()
    assert {use.evidence for use in found.uses} <= EVIDENCE.keys()


def test_a_step(tmp_path: Path) -> None:
    """Each part of a step has its category; those without a line are inferred, with the evidence."""
    found = instrument.read_memory(write(tmp_path / "a.pickle", [STEP], OLDER)).break_down()
    sizes = {name: sum(both) for name, both in found.by_category().items() if any(both)}
    assert {
        "parameters": 1000,
        "gradients": 1000,
        "optimizer_state": 2000,
        "temporaries": 90,
        "other": 640,
    } == sizes
    assert {("parameters", "older parameter"): (1000, 1), ("gradients", "sized gradient"): (1000, 1)} == (
        found.by_evidence()
    )
    known = {(place.line, category): number for (place, category), (number, _) in found.by_line().items()}
    assert {(42, "optimizer_state"): 2000, (42, "temporaries"): 90, (3, "other"): 640} == known
    (gradients,) = [part.name for part in compare_peaks(found, found) if part.category == "gradients"]
    assert "inferred: sized gradient" == gradients


@pytest.mark.parametrize("count", [4, 12])
def test_an_earlier_snapshot_ends_no_pass(tmp_path: Path, count: int) -> None:
    """The event of a snapshot, which has no stack, is not one of autograd, wherever it is."""
    taken = {"action": "snapshot", "addr": 0, "size": 5, "stream": 0}
    found = [
        instrument.read_memory(write(tmp_path / "a.pickle", [events], OLDER)).break_down().by_category()
        for events in (STEP[:count], *([*STEP[:at], taken, *STEP[at:count]] for at in range(count + 1)))
    ]
    assert [found[0]] * len(found) == found


def test_the_peak_of_a_forward_pass(tmp_path: Path) -> None:
    """Activations have the line that allocates them, and those that call the modules around it."""
    found = instrument.read_memory(write(tmp_path / "a.pickle", [STEP[:6]], OLDER)).break_down()
    (use,) = (use for use in found.uses if use.category == "activations")
    assert ("me/model.py:12", 320, 1) == (str(use.place), use.bytes, use.blocks)
    assert ["me/train.py:40"] == [str(place) for place in use.modules]


def test_generated_code(tmp_path: Path) -> None:
    """Memory that code of torch.compile allocates has the line of the program that calls it."""
    generated = f"/tmp/torchinductor_me/z3/c{'z3vcpgktv5' * 5}.py"
    stack = frames((generated, "call", 3843), ("/home/me/train.py", "train", 40))
    path = write(tmp_path / "a.pickle", [[event("alloc", 1, 8, frames=stack)]])
    assert ["me/train.py:40"] == [str(place) for place, _ in instrument.read_memory(path).break_down().by_line()]


def test_regions(tmp_path: Path) -> None:
    """The region is the innermost range that was open, or what the program set as metadata."""
    timed = [{**each, "time_us": at} for at, each in enumerate(STEP[:2])]
    timed.append({**event("alloc", 9, 5, frames=BATCH), "time_us": 2, "user_metadata": "mine"})
    marks = [("START", "outer", 0), ("START", "inner", 1), ("END", "inner", 1), ("END", "outer", 2)]
    given = [{"stage": stage, "name": name, "device": 0, "time_us": at} for stage, name, at in marks]
    found = instrument.read_memory(write(tmp_path / "a.pickle", [timed], external_annotations=given)).break_down()
    assert {"outer": (960, 2), "mine": (5, 1)} == found.by_region()


def test_older_memory_has_no_region(tmp_path: Path) -> None:
    """Ranges whose time is unknown say nothing of it, also where no event is recorded."""
    marks = [{"stage": "START", "name": "outer", "device": 0}]
    for events in ([], [event("alloc", 7, 5, frames=BATCH)]):
        path = write(tmp_path / "a.pickle", [events], OLDER, external_annotations=marks)
        found = instrument.read_memory(path).break_down()
        assert {""} == {use.region for use in found.uses if use.place is None}


def test_changes_add_up() -> None:
    """The changes of the parts are the difference of the peaks, also by category."""
    before, after = (
        instrument.read_memory(shared(f"memory/{name}.pickle")).break_down()
        for name in ("ctx128_forward", "ctx128_forward_mixed")
    )
    parts = compare_peaks(before, after)
    assert after.peak.bytes - before.peak.bytes == sum(part.change_bytes for part in parts)
    assert ("casts", 6_762_086_400) == (parts[0].category, parts[0].change_bytes)


def test_changes_by_region(tmp_path: Path) -> None:
    """What a region allocates more adds up, too; memory outside of regions has none."""
    events = [event("alloc", 1, 10, frames=BATCH, user_metadata="data"), event("alloc", 2, 5, frames=BATCH)]
    larger = [{**events[0], "size": 30}, events[1]]
    before, after = (
        instrument.read_memory(write(tmp_path / f"{name}.pickle", [each])).break_down()
        for name, each in (("before", events), ("after", larger))
    )
    parts = compare_regions(before, after)
    assert [("data", 10, 30), ("", 5, 5)] == [(part.name, *part[2:]) for part in parts]


def test_state(tmp_path: Path) -> None:
    """Reserved and used memory, and the largest hole across blocks that touch."""
    parts = [
        segment([block(0, 8), block(8, 16, "inactive"), block(24, 4, "inactive"), block(28, 1)]),
        {**segment([block(40, 19, "inactive")]), "address": 40},
        segment([block(100, 500, "inactive")], device=1),
    ]
    state = instrument.read_memory(write(tmp_path / "a.pickle", [], parts)).state()
    assert (48, 9, 20) == (state.reserved_bytes, state.used_bytes, state.largest_hole_bytes)


def test_nothing_is_known(tmp_path: Path) -> None:
    """Memory without a stack, a pass or a size that says anything is unknown."""
    events = [event("alloc", 1, 8, frames=[]), event("free_completed", 2, 4, frames=[])]
    found = instrument.read_memory(write(tmp_path / "a.pickle", [events])).break_down()
    assert (12, 0, 0, 12) == (found.peak.bytes, found.known_bytes, found.inferred_bytes, found.unknown_bytes)
    assert ["unknown"] == [part.name for part in compare_peaks(found, found)]


def test_largest_blocks(tmp_path: Path) -> None:
    """The largest blocks at the peak, of which those alike are one."""
    found = instrument.read_memory(write(tmp_path / "a.pickle", [STEP], OLDER)).largest_blocks(0, 3)
    shown = [(use.category, use.bytes, use.blocks) for use in found]
    assert [("parameters", 1000, 1), ("gradients", 1000, 1), ("optimizer_state", 2000, 2)] == shown


def test_cached(tmp_path: Path) -> None:
    """What is reserved at the peak follows from what is reserved at the end and the segments taken since."""
    recorded = [
        event("segment_alloc", 0, 100), event("alloc", 0, 60), event("segment_free", 200, 30),
        event("free_completed", 0, 60), event("segment_map", 300, 7),
    ]  # fmt: skip
    parts = [segment([block(0, 100, "inactive")]), {**segment([block(300, 7, "inactive")]), "address": 300}]
    found = instrument.read_memory(write(tmp_path / "a.pickle", [recorded], parts)).break_down()
    assert (60, 130, 70) == (found.peak.bytes, found.reserved_bytes, found.cached_bytes)


def test_a_transformer() -> None:
    """Each parameter of a real step has one gradient, and two states of AdamW of its size."""
    found = instrument.read_memory(shared("memory/ctx128_fullstep.pickle")).break_down()
    assert 291 == found.by_evidence()["parameters", "older parameter"][1]
    number, blocks = found.by_evidence()["gradients", "sized gradient"]
    assert (291, 2 * number) == (blocks, found.by_category()["optimizer_state"][0])


def test_growth(tmp_path: Path) -> None:
    """A line grows if memory of two steps stays; what one step leaves does not."""
    recorded = []
    for step in range(4):
        base = 100 * step
        recorded += [
            event("alloc", base + 1, 7, frames=BATCH),  # stays
            event("alloc", base + 2, 50, frames=FORWARD),
            event("alloc", base + 3, 9, frames=OPTIMIZER),
            event("free_completed", base + 2, 50, frames=[]),
        ]
        if step:  # of the first one, it stays
            recorded.append(event("free_completed", base + 3, 9, frames=OPTIMIZER))
    recorded.append(event("alloc", 1000, 7, frames=FORWARD))  # of a step that is not complete
    found = instrument.read_memory(write(tmp_path / "a.pickle", [recorded])).growth()
    ((place, growth),) = found
    assert ("me/data.py:3", 4, 28, 4) == (str(place), growth.steps, growth.bytes, growth.blocks)


def leaking(steps: int, optimizer: bool = False) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return timed events of steps that leave 7 bytes behind each, and the marks of a profiler or an optimizer."""
    events, marks = [], []
    name = "Optimizer.step#SGD.step" if optimizer else "ProfilerStep#{}"
    for step in range(steps):
        kept, reused = event("alloc", 100 + step, 7, frames=BATCH), event("alloc", 2, 9, frames=FORWARD)
        events += [{**kept, "time_us": 1000 * (step + 1)}, {**reused, "time_us": 1000 * (step + 1) + 1}]
        for stage, late in (("START", 500), ("END", 600)):
            at = 1000 * (step + 1) + late
            marks.append({"stage": stage, "name": name.format(step), "device": 0, "time_us": at})
    return events, marks


@pytest.mark.parametrize("optimizer", [False, True])
def test_growth_without_an_optimizer_that_allocates(tmp_path: Path, optimizer: bool) -> None:
    """The steps are those that a profiler marks or, without these, torch's marks of the optimizer."""
    events, marks = leaking(4, optimizer)
    found = instrument.read_memory(write(tmp_path / "a.pickle", [events], external_annotations=marks))
    ((place, growth),) = found.growth()
    assert ("me/data.py:3", 4, 28, 4) == (str(place), growth.steps, growth.bytes, found.complete_steps())


def test_what_does_not_grow(tmp_path: Path) -> None:
    """A queue of batches, of which the last ones are in use, and state that is made in several steps, do not."""
    events, marks = leaking(9)
    freed = [{**event("free_completed", 100 + step, 7), "time_us": 1000 * (step + 4) - 1} for step in range(6)]
    made = [event("alloc", 300 + step, 8, frames=OPTIMIZER) for step in range(9)]
    state = [{**each, "time_us": 1000 * (step + 1) + 550} for step, each in enumerate(made)]
    ordered = sorted([*events, *freed, *state], key=lambda each: each["time_us"])
    found = instrument.read_memory(write(tmp_path / "a.pickle", [ordered], external_annotations=marks))
    assert (9, []) == (found.complete_steps(), found.growth())


def test_a_script_without_a_suffix(tmp_path: Path) -> None:
    """Its lines are of the program; headers of C++ without a suffix are not."""
    header = {"filename": "/usr/include/c++/11/functional", "name": "operator()", "line": 7}
    stack = [header, {"filename": "/home/me/bin/train", "name": "main", "line": 3}]
    path = write(tmp_path / "a.pickle", [[event("alloc", 1, 8, frames=stack)]])
    ((use,),) = [instrument.read_memory(path).break_down().uses]
    assert "bin/train:3 main" in use.source


def test_a_queue_and_a_leaking_constructor(tmp_path: Path) -> None:
    """The last two batches of three or four steps are no growth; what a constructor leaves in each step is."""
    record = frames(("/home/me/records.py", "__init__", 7), ("/home/me/train.py", "train", 41))
    for steps in (3, 4):
        events, marks = leaking(steps)
        freed = [event("free_completed", 100 + step, 7) for step in range(steps - 2)]
        timed = [{**each, "time_us": 1000 * (step + 3) + 2} for step, each in enumerate(freed)]
        made = [
            {**event("alloc", 300 + step, 8, frames=record), "time_us": 1000 * step + 1003}
            for step in range(steps)
        ]
        ordered = sorted([*events, *timed, *made], key=lambda each: each["time_us"])
        found = instrument.read_memory(
            write(tmp_path / "a.pickle", [ordered], external_annotations=marks)
        ).growth()
        assert [("me/records.py:7", steps)] == [(str(place), growth.steps) for place, growth in found]


STEP_MARK = "Optimizer.step#AdamW.step"


def test_an_optimizer_that_allocates_in_its_first_step(tmp_path: Path) -> None:
    """The steps of a fused optimizer are known from torch's marks, once it has its state."""
    events, marks = leaking(4, optimizer=True)
    state = {**event("alloc", 300, 8, frames=OPTIMIZER), "time_us": 1550}
    ordered = sorted([*events, state], key=lambda each: each["time_us"])
    found = instrument.read_memory(write(tmp_path / "a.pickle", [ordered], external_annotations=marks))
    ((place, growth),) = found.growth()
    assert ("me/data.py:3", 4, 4) == (str(place), growth.steps, found.complete_steps())


@pytest.mark.parametrize("marked", [False, True])
def test_a_closure(tmp_path: Path, marked: bool) -> None:
    """The forward and backward pass that an optimizer calls, as those of Lightning do, are not its own."""
    loss = event("alloc", 12, 3000, frames=frames(("/home/me/train.py", "closure", 50)))
    plain = [*STEP[:4], loss, *STEP[4:7], event("free_completed", 12, 3000, frames=[]), *STEP[7:]]
    inside = [each if each["frames"] in ([], OPTIMIZER) else
              {**each, "frames": [*each["frames"][:-1], *OPTIMIZER]} for each in plain[1:]]  # fmt: skip
    timed = [{**each, "time_us": 10 + at} for at, each in enumerate([plain[0], *inside])]
    marks = [
        {"stage": stage, "name": STEP_MARK, "device": 0, "time_us": at}
        for stage, at in (("START", 11), ("END", 99))
    ]
    given = {"external_annotations": marks} if marked else {}
    expected = instrument.read_memory(write(tmp_path / "plain.pickle", [plain], OLDER)).break_down()
    found = instrument.read_memory(write(tmp_path / "a.pickle", [timed], OLDER, **given)).break_down()
    assert expected.by_category()["activations"] == (3000, 0)
    assert expected.by_category() == found.by_category()


def test_closures_and_optimizers_of_torch(tmp_path: Path) -> None:
    """Of the stacks of real programs, a closure's are not the optimizer's; those of an own optimizer are."""
    stacks: dict[str, list[dict[str, Any]]] = {}

    def keep(name: str) -> None:
        found = reversed(traceback.extract_stack()[:-1])
        stacks[name] = [{"filename": each.filename, "name": each.name, "line": each.lineno} for each in found]

    class Layer(torch.nn.Linear):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            keep("layer")
            return super().forward(given)

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            keep("own optimizer")

    layer = Layer(2, 2)

    def closure() -> torch.Tensor:
        loss = layer(torch.ones(2)).sum()
        keep("loss")
        return loss

    for kind in (torch.optim.Adam, torch.optim.LBFGS):
        kind(layer.parameters()).step(closure)
        events = [event("alloc", at, 8, frames=stacks[name]) for at, name in enumerate(("layer", "loss"), 1)]
        found = instrument.read_memory(write(tmp_path / "a.pickle", [events])).passes.kind
        assert [FORWARD_PASS, FORWARD_PASS] == found.tolist()
    Own(layer.parameters()).step()
    own = event("alloc", 1, 8, frames=stacks["own optimizer"])
    assert [OPTIMIZER_STEP] == instrument.read_memory(write(tmp_path / "a.pickle", [[own]])).passes.kind.tolist()


@pytest.mark.parametrize("cut", [0, 1])
def test_marks_alone(tmp_path: Path, cut: int) -> None:
    """Without stacks, torch's marks tell the optimizer's step, also if the first mark is lost."""
    sizes = [
        ("alloc", 1, 5, 20),
        ("alloc", 2, 9, 32),
        ("alloc", 3, 6, 45),
        ("alloc", 4, 7, 52),
        ("alloc", 5, 4, 70),
    ]
    events = [{**event(kind, at, size, frames=[]), "time_us": time} for kind, at, size, time in sizes]
    marks = [
        {"stage": stage, "name": STEP_MARK, "device": 0, "time_us": at}
        for stage, at in (("START", 30), ("END", 40), ("START", 50), ("END", 60))
    ][cut:]
    found = instrument.read_memory(write(tmp_path / "a.pickle", [events], external_annotations=marks))
    optimizer = [1, 3] if not cut else [3]  # where that step began is not known
    assert optimizer == np.flatnonzero(found.passes.kind == OPTIMIZER_STEP).tolist()
    assert 2 == found.complete_steps()


def test_marks_without_events(tmp_path: Path) -> None:
    """A history without events has no complete step."""
    marks = leaking(2)[1]
    assert (
        0
        == instrument.read_memory(
            write(tmp_path / "a.pickle", [[]], OLDER, external_annotations=marks)
        ).complete_steps()
    )


def test_a_leak_of_a_real_program() -> None:
    """A program that leaks 40 MiB in each step."""
    ((place, growth),) = instrument.read_memory(shared("memory/npu_expandable.pickle")).growth()
    assert ("test/memory_leaks_demo.py:12", 40 * 2**20) == (str(place), growth.bytes // growth.steps)


def test_modules_without_an_end(tmp_path: Path) -> None:
    """A stack of 20,000 calls of modules, which 40 kB can name, takes one look at each."""
    calls = frames(("/home/me/model.py", "forward", 7), *[(MODULE, "_call_impl", 9)] * 20_000)
    path = write(tmp_path / "a.pickle", [[event("alloc", 1, 8, frames=calls)]])
    ((lines, number),) = instrument.read_memory(path).break_down().by_module().items()
    assert (20_000, {"me/train.py:1"}, (8, 1)) == (len(lines), set(map(str, lines)), number)
