"""How much longer recording makes a step is said with its range, and not at all where it may be chance."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import instrument
from instrument.read.measures.summary import summarize
from instrument.read.measures.timing import Stretch, Timing
from instrument.show.terminal.steps import describe_steps
from tests.support.loops import Loop

MS = 1_000_000


def around(*lengths_ms: float) -> Timing:
    """Return the timing of a window with these steps around it."""
    each = tuple(int(ms * MS) for ms in lengths_ms)
    middle = sorted(each)[len(each) // 2]
    return Timing((middle,), ((0, len(each) - 1),), 100, 1_000 * MS, around_each_ns=each)


def test_the_range() -> None:
    """The range holds what the variation of the recorded steps, and of as many others in a row, allows."""
    found = Stretch.of([20 * MS, 22 * MS, 21 * MS], around(*[10, 10, 9, 11] * 5), None)
    assert found is not None
    assert found.ratio == 2.1
    assert (found.low, found.high) == (20 / 10, 22 / 10)
    assert f"{found:.2f}" == "2.00 to 2.20"
    assert found.differs


def test_chance_is_no_stretch() -> None:
    """Three steps out of a loop whose steps vary by a factor of two are hardly ever said to be stretched."""
    random, differing = Random(3), 0
    for _ in range(300):
        steps = [int(10 * MS * random.lognormvariate(0, 0.5)) for _ in range(23)]
        found = Stretch.of(steps[20:], around(*(ns / MS for ns in steps[:20])), None)
        differing += found is not None and found.differs
    assert differing < 15


def test_a_real_stretch_is_seen() -> None:
    """Recording that doubles steps which vary by a tenth is always said."""
    random = Random(4)
    for _ in range(100):
        steps = [int(10 * MS * random.lognormvariate(0, 0.1)) for _ in range(23)]
        found = Stretch.of([2 * ns for ns in steps[20:]], around(*(ns / MS for ns in steps[:20])), None)
        assert found is not None
        assert found.differs


def test_few_steps_outside() -> None:
    """With two steps outside the window, and without steps, nothing is said."""
    assert Stretch.of([20 * MS], around(10, 10), None) is None
    assert Stretch.of([], around(10, 10, 10), None) is None
    assert Stretch.of([20 * MS], None, None) is None


def test_one_judgement(tmp_path: Path) -> None:
    """The summary of a run and the diagnosis agree on whether recording made the steps longer."""
    for name, steps_ms, others in (("chance", (4, 20, 21), [5, 20, 5, 6, 5, 19]), ("real", (20, 21, 22), [5] * 6)):
        made, path = Loop(), tmp_path / name / "window-0001" / "trace.json"
        for number, ms in enumerate(steps_ms):
            with made.step(number):
                made.work(1000 * ms)
        path.parent.mkdir(parents=True)
        made.trace(path.parent)
        timing = around(*others)
        line = {
            "run": "r", "rank": 0, "window": 1, "status": "recorded", "steps": [7, 9],
            "files": [{"path": f"window-0001/{path.name}"}],
            "timing": {
                "run_steps": 10, "run_ns": 1_000 * MS, "around_ns": timing.around_ns[0],
                "around_each_ns": timing.around_each_ns, "around_steps": [[1, 6]], "own_ns": 0,
            },
        }  # fmt: skip
        (tmp_path / name / "manifest.jsonl").write_text(f"{json.dumps(line)}\n")
        diagnosed = instrument.diagnose(path)
        said = " ".join(describe_steps(summarize(instrument.read_trace(path), timing)))
        assert ("Recording made a step" in diagnosed.verdict) == (name == "real")
        assert ("stretched-window" in [each.rule for each in diagnosed.findings]) == (name == "real")
        assert ("may be due to the recording" in said) == (name == "real")
        assert ("to say whether that is typical" in said) == (name == "chance")
        low, high = json.loads(diagnosed.to_json())["stretch_range"]
        assert low < diagnosed.stretch < high or name == "real"
