"""Phases that follow each other in a loop are one step together, not the longest of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import pytest

from instrument.explain.diagnosis.diagnose import diagnose
from instrument.read.measures.region_steps import steps_found
from instrument.read.tables.trace import Trace
from tests.diagnosis.small_traces import Row, on_cpu, trace_of

PHASES = {"reader": 37, "backbone": 177, "find_centers": 677, "transformer": 201, "post_processing": 162}
GAP = 1


def trace(names: Iterable[str], lengths: dict[str, int] = PHASES, elsewhere: Iterable[Row] = ()) -> Trace:
    """Return the trace of regions that follow each other; each has a region inside."""
    at, regions = 0, []
    for name in names:
        length = lengths.get(name, 10)
        regions += [on_cpu(name, at, at + length), on_cpu("inside", at + 1, at + length - 1)]
        at += length + GAP
    return trace_of(regions=sorted([*regions, *elsewhere], key=lambda row: row["start_ns"]))


def lengths(trace: Trace) -> list[int]:
    found: list[int] = steps_found(trace).steps.duration_ns.tolist()
    return found


ROUND = sum(PHASES.values()) + 5 * GAP


def test_phases() -> None:
    """A step is the whole round, from the start of the first phase to the next, and its parts are those of it."""
    found = steps_found(trace([*PHASES] * 12))
    assert found.steps.duration_ns.tolist() == [ROUND] * 11 + [ROUND - GAP]
    assert found.steps_from == "reader -> backbone -> find_centers -> transformer -> post_processing"
    text = str(diagnose(trace([*PHASES] * 12)))
    assert "A step is one round of the regions reader -> backbone" in " ".join(text.split())


def test_a_recording_that_begins_and_ends_within_a_round() -> None:
    """Rounds that the recording has only in part are no steps."""
    names = [*PHASES] * 6
    assert len(lengths(trace(names[2:-1]))) in (4, 5)
    assert {*lengths(trace(names[2:-1]))} <= {ROUND, ROUND - GAP}


def test_micro_batches() -> None:
    """A round ends with the update, however many micro-batches come before it."""
    rounds = [["forward", "backward"] * count + ["optimizer"] for count in (2, 4, 3, 1)]
    found = steps_found(trace(chain.from_iterable(rounds), {"forward": 20, "backward": 40, "optimizer": 5}))
    assert found.steps_from == "forward -> backward -> optimizer"
    assert found.steps.duration_ns.tolist() == [62 * count + 6 for count in (2, 4, 3)] + [62 + 5]


def test_torchs_own_regions_are_phases() -> None:
    """Torch's own ranges of loaders and optimizers are phases beside regions of the program."""
    one = ["enumerate(DataLoader)#X.__next__", "forward", "backward", "Optimizer.step#SGD.step"]
    assert lengths(trace(one * 4)) == [44, 44, 44, 43]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_evaluation_in_between(every: int) -> None:
    """Evaluations and checkpoints between the rounds are in no step."""
    names: list[str] = []
    for number in range(12):
        names += ["data", "train"]
        if number % every == 0:
            names += ["evaluate", "save_checkpoint"]
    assert {*lengths(trace(names, {"data": 20, "train": 300, "evaluate": 90}))} <= {322, 321}
    assert len(lengths(trace(names, {"data": 20, "train": 300, "evaluate": 90}))) == 12


def test_regions_of_other_threads() -> None:
    """What other threads do meanwhile changes no round."""
    other = [on_cpu("prefetch", 100 * place, 100 * place + 60, thread=1) for place in range(100)]
    assert lengths(trace([*PHASES] * 12, elsewhere=other)) == [ROUND] * 11 + [ROUND - GAP]


@pytest.mark.parametrize(
    "names",
    [
        ["a", "b"] * 2,
        ["enumerate(DataLoader)#X.__next__", "Optimizer.step#SGD.step"] * 5,
        ["a", "b", "c", "d", "a", "a", "d", "b", "c", "c"],
        [f"{letter}{letter}" for letter in "abcdefghijklmnop"],
    ],
)
def test_no_cycle(names: list[str]) -> None:
    """Too few rounds, torch's own regions alone, or regions in no order are no steps."""
    made = trace(names)
    assert steps_found(made) is made


def test_one_region_that_takes_most_of_the_time() -> None:
    """A region beside others that come now and then is the step by itself."""
    assert steps_found(
        trace(["load", "train", "train", "report", "train", "train"], {"train": 100})
    ).steps_from == ("train")
