"""Tests of the rules on what recurs: workers that start at each epoch, and other slow steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import instrument
from instrument.base.findings import Finding
from instrument.base.run_lengths import RunLengths
from instrument.explain.rules.recurring import recurring_slow_steps, restarted_workers
from instrument.explain.rules.rule import RULES
from instrument.explain.rules.trace_facts import MissingEvidenceError, TraceFacts
from instrument.read.measures.timing import Timing
from instrument.start import cli

from .made_loops import MadeLoop
from .test_diagnose import write

LOADER = "enumerate(DataLoader)#_{}DataLoaderIter.__next__"
MS = 1_000_000


def epochs(
    first_ms: float,
    *,
    kind: str = "MultiProcessing",
    wait_ms: float = 0.1,
    end_ms: float = 0.1,
    later: bool = True,
    steps: range = range(24),
    timing: Timing | None = None,
) -> TraceFacts:
    """Return the facts of an `epoch_loop`."""
    loop = epoch_loop(first_ms, kind=kind, wait_ms=wait_ms, end_ms=end_ms, later=later, steps=steps)
    return TraceFacts(loop.trace(), timing=timing)


def epoch_loop(
    first_ms: float,
    *,
    kind: str = "MultiProcessing",
    wait_ms: float = 0.1,
    end_ms: float = 0.1,
    later: bool = True,
    steps: range = range(24),
) -> MadeLoop:
    """Return epochs of 6 steps of 25 ms, which wait ``first_ms`` for their first batches and end in ``end_ms``.

    Without ``later``, only the first epoch does.
    """
    loop, now, name = MadeLoop(steps=0, busy=False), 0.0, LOADER.format(kind)
    for step in steps:
        begin = now
        if step and step % 6 == 0:  # the call that returns no batch
            loop.region(name, now, now + 1_000 * end_ms)
            now += 1_000 * end_ms + 100
        waited = 1_000 * (first_ms if step % 6 == 0 and (later or not step) else wait_ms)
        loop.region(name, now, now + waited).operator("aten::mm", now + waited + 10, now + waited + 25_000)
        now += waited + 25_010
        loop.region(f"ProfilerStep#{step}", begin, now)
    return loop


def found(rule: str, facts: TraceFacts) -> list[Finding]:
    return [finding for finding, hidden in RULES[rule].findings(facts, {}) if not hidden]


def test_workers_that_start_anew() -> None:
    """The waits for the first batches of later epochs can be won; the workers keep up otherwise."""
    facts = epochs(500)
    (finding,) = found("restarted-workers", facts)
    assert "comes 500 ms late, 3 times in 24 steps" in finding.title
    assert facts.per_step(3 * 500 * MS) == finding.win_ns
    assert finding.fix is not None
    assert "persistent_workers=True" in (finding.fix.after or "")
    assert [] == found("input-wait", facts)


def test_workers_that_also_end_slowly() -> None:
    """Workers that stay save the end of those before as well; a loop counts once."""
    facts = epochs(300, end_ms=200)
    (finding,) = found("restarted-workers", facts)
    assert "comes 500 ms late, 3 times in 24 steps" in finding.title
    assert facts.per_step(3 * 500 * MS) == finding.win_ns


@pytest.mark.parametrize(
    "facts",
    [
        epochs(1),  # workers that stay
        epochs(500, later=False),  # they start once
        epochs(60, wait_ms=60),  # they never keep up
        epochs(500, kind="SingleProcess"),
    ],
    ids=["stay", "once", "slow", "none"],
)
def test_workers_that_do_not_start_anew(facts: TraceFacts) -> None:
    """Late batches have other causes."""
    assert [] == found("restarted-workers", facts)


@pytest.mark.parametrize(("every", "rule"), [(6, "restarted-workers"), (7, "input-wait")])
def test_one_start_in_a_window(every: int, rule: str) -> None:
    """A window with one such step is enough, if the lengths of the run say that it recurs."""
    facts = epochs(500, steps=range(11, 14), timing=stalls(12, every=every))
    assert [rule] == [name for name in ("restarted-workers", "input-wait") if found(name, facts)]


def test_whatif_knows_the_lengths_of_the_run(tmp_path: Path) -> None:
    """What `diagnose` names as the change, `instrument whatif` accepts: it reads the same facts."""
    lengths = stalls(12, every=6).lengths
    assert lengths is not None
    path = write(tmp_path / "window-0001/rank0.pt.trace.json", epoch_loop(500, steps=range(11, 14)))
    timing = {"run_steps": 60, "run_ns": lengths.typical_ns + lengths.slow_ns, "lengths": lengths.as_json()}
    entry = {"window": 1, "rank": 0, "files": [{"path": "window-0001/rank0.pt.trace.json"}], "timing": timing}
    (tmp_path / "manifest.jsonl").write_text(json.dumps(entry) + "\n")
    (finding,) = [each for each in instrument.diagnose(path).findings if each.rule == "restarted-workers"]
    assert finding.change == "--fix restarted-workers"
    done = CliRunner().invoke(cli.app, ["whatif", str(path), *finding.change.split(), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["win_ns"] == pytest.approx(finding.win_ns, rel=0.01)


def test_the_trace_shows_where_epochs_begin() -> None:
    """The title says that slow steps begin epochs, if the trace shows that and the run does not say it."""
    facts = epochs(500, steps=range(11, 14), timing=stalls(12, every=6))
    (finding,) = recurring_slow_steps(facts)
    assert finding.title.startswith("Every 6th step, the first of each epoch, takes 5.00 ms instead of 1.00 ms")
    (other,) = recurring_slow_steps(epochs(500, steps=range(11, 14), timing=stalls(13, every=13)))
    assert other.title.startswith("Every 13th step takes")


def test_slow_workers_are_still_found() -> None:
    """A loop that waits in every step waits for its workers, whatever happens at an epoch."""
    assert [1] == [len(found("input-wait", epochs(60, wait_ms=60)))]


def stalls(*steps: int, every: int = 10) -> Timing:
    """Return the timing of a run of 60 steps of 1 ms, of which every tenth takes 5 ms."""
    slow = tuple((number, 5 * MS) for number in range(every, 60, every))
    return Timing(
        lengths=RunLengths(MS, 60 - len(slow), (60 - len(slow)) * MS, len(slow), 5 * MS * len(slow), slow, steps)
    )


def window(first: int, cause: str = "") -> MadeLoop:
    """Return three steps of 1 ms, the second of which takes 5 ms, 4 of them with ``cause``."""
    loop = MadeLoop(steps=0, busy=False)
    for number, (begin, end) in enumerate(((0, 1_000), (1_000, 6_000), (6_000, 7_000)), first):
        loop.region(f"ProfilerStep#{number}", begin, end).operator("aten::mm", begin + 10, begin + 900)
    if cause.startswith("cuda"):
        loop.call(cause, 2_000, 5_900)
    elif cause:
        loop.region(cause, 2_000, 5_900)
    return loop


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (LOADER.format("MultiProcessing"), "as the loop waits for a batch"),
        ("entire_frame_compile (dynamo_timed)", "as torch.compile compiles"),
        ("gc.collect", "as Python collects garbage"),
        ("cudaMalloc", "as the driver allocates or frees memory"),
        ("train/evaluation", "as it evaluates"),
        ("checkpoint", "as it saves a checkpoint"),
    ],
)
def test_the_cause_of_a_slow_step(cause: str, words: str) -> None:
    """What takes most of the delay in the window is the cause."""
    (finding,) = recurring_slow_steps(TraceFacts(window(29, cause).trace(), timing=stalls(30)))
    assert (
        f"Every 10th step takes 5.00 ms instead of 1.00 ms, {words}: 25.0 % of the time of the loop"
        == finding.title
    )
    assert 30 == finding.where.step


@pytest.mark.parametrize(
    ("inside", "words"), [(True, "short of memory and gives its cache back"), (False, "frees memory")]
)
def test_retries_of_the_allocator(inside: bool, words: str) -> None:
    """Memory that is freed inside an operator is given back for lack of room, else by ``empty_cache()``."""
    loop = window(29).call("cudaFree", 2_000, 5_000).call("cudaMalloc", 5_000, 5_900)
    if inside:
        loop.operator("aten::empty", 1_990, 5_910)
    (finding,) = recurring_slow_steps(TraceFacts(loop.trace(), timing=stalls(30)))
    assert words in finding.title


def test_an_unknown_cause() -> None:
    """Without evidence no cause is named."""
    (finding,) = recurring_slow_steps(TraceFacts(window(29).trace(), timing=stalls(30)))
    assert "instead of 1.00 ms: 25.0 %" in finding.title


def test_a_window_without_a_slow_step() -> None:
    """The finding says which steps to record."""
    (finding,) = recurring_slow_steps(TraceFacts(window(2, "gc.collect").trace(), timing=stalls()))
    assert finding.title.endswith("none of them is in this window")
    assert finding.fix is not None
    assert "Record one, with --steps 29-31." == finding.fix.text


def test_evidence_is_needed() -> None:
    """Without the lengths of the run, or ranges of a DataLoader, the rules abstain; an even run has no finding."""
    trace = window(29).trace()
    for rule, facts in ((recurring_slow_steps, TraceFacts(trace)), (restarted_workers, TraceFacts(trace))):
        with pytest.raises(MissingEvidenceError):
            list(rule(facts))
    even = Timing(lengths=RunLengths(MS, 60, 60 * MS))
    assert [] == list(recurring_slow_steps(TraceFacts(trace, timing=even)))
