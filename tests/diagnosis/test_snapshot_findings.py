"""What rules find in a memory snapshot: alone, beside a trace, and in the folder of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.base.findings import Finding, Site
from instrument.explain.diagnosis.diagnose import Diagnosis, diagnosis_of
from instrument.explain.rules.trace_facts import TraceFacts
from instrument.show.sections.diagnosis import page_of

from ..memory.snapshots import block, event, segment, write
from ..memory.test_breakdown import BATCH, FORWARD, OLDER, OPTIMIZER, STEP, frames
from ..support.shared_traces import shared
from ..traces.test_page import sections
from .made_loops import MadeLoop
from .shown import SHOWN, named

MB = 1 << 20
CLEARED = frames(
    ("/usr/lib/python3.11/site-packages/torch/cuda/memory.py", "empty_cache", 9),
    ("/home/me/train.py", "train", 50),
)
GROWING = [
    each
    for step in range(4)
    for each in (event("alloc", 10 + step, 70, frames=BATCH), event("alloc", 2, 1, frames=OPTIMIZER))
]
RETURNED = event("segment_free", 1, 10, frames=CLEARED)
EVENTS: Mapping[str, list[dict[str, Any]]] = {
    "failed-allocation": [{**event("oom", 0, 9000, frames=FORWARD), "device_free": 5}],
    "returned-memory": [RETURNED, STEP[0], RETURNED],
    "activation-memory": [event("alloc", 2, 5000, frames=FORWARD)],
    "optimizer-temporaries": [
        *STEP[:-2],
        event("alloc", 8, 900, frames=OPTIMIZER),
        event("free_completed", 8, 900, frames=OPTIMIZER),
    ],
    "kept-gradients": [*STEP, event("alloc", 20, 3000, frames=FORWARD), event("alloc", 21, 30, frames=FORWARD)],
    "memory-growth": GROWING,
    "fragmented-memory": [event("segment_alloc", 1 << 40, 2_000_000_000), STEP[0]],
    "memory-nearly-full": [
        event("segment_alloc", 1 << 40, 50 * MB),
        {**event("oom", 0, 90 * MB), "device_free": 5},
    ],
}
"""Events that show what a rule finds, of one GPU with a parameter."""


def diagnosed(path: Path, rule: str) -> Diagnosis:
    return of_events(path, EVENTS[rule])


def of_events(path: Path, given: list[dict[str, Any]]) -> Diagnosis:
    """Diagnose a snapshot of these events, of one GPU with a parameter and the segments that were taken."""
    events = [dict(each) for each in given]
    taken = [each for each in events if each["action"] == "segment_alloc"]
    parts = [
        {**segment([block(each["addr"], each["size"], "inactive")]), "address": each["addr"]} for each in taken
    ]
    return instrument.diagnose(write(path / "a.pickle", [events], [*OLDER, *parts]))


@pytest.mark.parametrize("rule", EVENTS)
def test_rule_fires(tmp_path: Path, rule: str) -> None:
    """The rule finds what the events show, with evidence, and nothing without them."""
    found = named(diagnosed(tmp_path, rule))
    assert rule in found, list(found)
    assert found[rule].evidence
    assert found[rule].fix
    nothing = instrument.diagnose(write(tmp_path / "b.pickle", [STEP], OLDER))
    assert ((), {}) == (nothing.findings, nothing.failed)


def test_what_is_found(tmp_path: Path) -> None:
    """Findings have the line, what they can free, and why."""
    failed = one(diagnosed(tmp_path, "failed-allocation"), "failed-allocation")
    assert "Out of memory: an allocation of 9.00 kB failed; too little memory is free" in failed.title
    assert Site("/home/me/model.py", 12, "forward") == failed.where.site
    returned = one(diagnosed(tmp_path, "returned-memory"), "returned-memory")
    assert "Memory goes back to the driver 2 times: the program called empty_cache" == returned.title
    assert 210 == one(diagnosed(tmp_path, "memory-growth"), "memory-growth").win_bytes
    assert 900 == one(diagnosed(tmp_path, "optimizer-temporaries"), "optimizer-temporaries").win_bytes
    assert 1000 == one(diagnosed(tmp_path, "kept-gradients"), "kept-gradients").win_bytes
    assert 5000 == one(diagnosed(tmp_path, "activation-memory"), "activation-memory").win_bytes


@pytest.mark.parametrize(
    ("rule", "events"),
    [
        ("returned-memory", [RETURNED, STEP[0]]),
        ("returned-memory", [RETURNED, STEP[0], RETURNED, *STEP[1:], event("alloc", 9, 8)]),  # in the first step
        ("activation-memory", [event("alloc", 2, 600, frames=FORWARD)]),
        ("optimizer-temporaries", STEP),
        ("kept-gradients", [*STEP, event("alloc", 21, 30, frames=FORWARD)]),
        ("memory-growth", GROWING[:4]),
        ("fragmented-memory", [event("segment_alloc", 1 << 40, 999_000_000), STEP[0]]),
        ("memory-nearly-full", [{**event("oom", 0, 90 * MB), "device_free": 5000}]),
    ],
)
def test_rule_does_not_fire(tmp_path: Path, rule: str, events: list[dict[str, Any]]) -> None:
    """With a little less than its threshold, a rule finds nothing, and does not fail."""
    diagnosis = of_events(tmp_path, events)
    assert {} == diagnosis.failed
    assert rule not in named(diagnosis)


def test_another_gpu(tmp_path: Path) -> None:
    """What failed on a GPU that is not the fullest is found too."""
    failed = {**event("oom", 0, 9000, frames=FORWARD), "device_free": 5}
    path = write(
        tmp_path / "a.pickle", [[event("alloc", 2, 70_000)], [failed, RETURNED, dict(STEP[0]), dict(RETURNED)]]
    )
    found = named(instrument.diagnose(path))
    assert "(GPU 1)" in found["failed-allocation"].title
    assert "2 times (GPU 1)" in found["returned-memory"].title


def test_expandable_segments_are_on(tmp_path: Path) -> None:
    """Then another fix is named."""
    parts = [{**segment([block(1 << 40, 2_000_000_000, "inactive")]), "address": 1 << 40, "is_expandable": True}]
    found = named(instrument.diagnose(write(tmp_path / "a.pickle", [[STEP[0]]], parts)))["fragmented-memory"]
    assert found.fix is not None
    assert "expandable" not in found.fix.text


def test_without_history(tmp_path: Path) -> None:
    """Rules on the history abstain without one."""
    abstained = instrument.diagnose(write(tmp_path / "a.pickle", [[]], OLDER)).abstained
    assert {"failed-allocation", "returned-memory", "activation-memory", "memory-growth"} < abstained.keys()


def test_the_trace_shows_growth(tmp_path: Path) -> None:
    """A snapshot without steps does not hide what the trace shows."""
    folder = run_folder(tmp_path, ("a", True))
    loop = SHOWN["memory-growth"]()
    facts = TraceFacts(loop.trace(), snapshot=instrument.diagnose(folder).snapshot)
    assert facts.snapshot is not None
    assert "memory-growth" in {each.rule for each in diagnosis_of(facts).findings}


def one(diagnosis: Diagnosis, rule: str) -> Finding:
    return named(diagnosis)[rule]


def test_a_snapshot_alone(tmp_path: Path) -> None:
    """The verdict is the peak; rules that need times abstain; texts and JSON are whole."""
    diagnosis = diagnosed(tmp_path, "optimizer-temporaries")
    assert diagnosis.verdict.startswith("Memory of GPU 0 at its peak: 5.54 kB in use: optimizer state 2.00 kB")
    assert (None, {}) == (diagnosis.bound, diagnosis.parts)
    text = str(diagnosis)
    assert 1 == text.count("at its peak")
    assert "To win: at most 900 B of memory" in text
    found = json.loads(diagnosis.to_json())
    assert 5540 == found["memory_snapshot"]["peak_bytes"]
    assert [900] == [each["win_bytes"] for each in found["findings"]]
    assert "at most 900 B of memory" in diagnosis.to_markdown()


def test_page(tmp_path: Path) -> None:
    """The page has the findings and the memory panel; that of a trace has the panel too."""
    alone = page_sections(diagnosed(tmp_path, "optimizer-temporaries"))
    assert ["findings", "summary", "memory", "peak", "inferred", "largest"] == alone
    both = page_sections(instrument.diagnose(run_folder(tmp_path / "run", ("a", True))))
    assert {"overview", "findings", "timeline", "memory", "peak"} < set(both)
    assert len(both) == len(set(both))


def page_sections(diagnosis: Diagnosis) -> list[str]:
    """Return the ids of the sections of the page."""
    return [section["id"] for section in sections(page_of(diagnosis))]


def test_real_snapshots() -> None:
    """A program that leaks 40 MiB a step, and one whose peak is activations."""
    leaking = named(instrument.diagnose(shared("memory/npu_expandable.pickle")))
    assert ["memory-growth", "optimizer-temporaries"] == sorted(leaking)
    assert "memory_leaks_demo.py:12" in str(leaking["memory-growth"].where)
    kept = instrument.diagnose(shared("memory/python_stacks_ctx128.pickle"))
    assert ["activation-memory"] == [each.rule for each in kept.findings]
    mixed = instrument.diagnose(shared("memory/ctx128_forward_mixed.pickle"))  # whose casts are no activations
    assert () == mixed.findings


def run_folder(path: Path, *windows: tuple[str, bool]) -> Path:
    """Write a run with these windows, each with its run and whether it has a snapshot; return its folder."""
    lines = []
    for number, (run, has_snapshot) in enumerate(windows):
        folder = path / f"window-{number}"
        folder.mkdir(parents=True)
        names = ["rank0.pt.trace.json"]
        shutil.copy(TRACE, folder / names[0])
        if has_snapshot:
            names.append(f"rank0.{number}.memory.pickle")
            write(folder / names[1], [[event("alloc", 2, 5000 + number, frames=FORWARD)]], OLDER)
        files = [{"path": f"{folder.name}/{name}"} for name in names]
        lines.append({"run": run, "rank": 0, "steps": [number, number], "end_ns": number, "files": files})
    (path / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


TRACE = Path(__file__).parent.parent / "data" / "gpu_two_steps.json"


def test_trace_and_snapshot(tmp_path: Path) -> None:
    """The folder of a run has findings of both; the snapshot is that of the last window until then."""
    diagnosis = instrument.diagnose(run_folder(tmp_path, ("a", True), ("a", True), ("a", False)))
    assert {"activation-memory"} < set(named(diagnosis))
    assert diagnosis.snapshot is not None
    assert tmp_path / "window-1" / "rank0.1.memory.pickle" == diagnosis.snapshot.path
    assert "Memory of GPU 0 at its peak: 6.00 kB in use" in str(diagnosis)
    first = instrument.diagnose(tmp_path / "window-0" / "rank0.pt.trace.json")
    assert first.snapshot is not None
    assert 6000 == first.snapshot.peak().bytes


def test_a_run_without_traces(tmp_path: Path) -> None:
    """Of a run that recorded memory alone, a snapshot is diagnosed: the lowest rank's, or that of ``rank``."""
    folder = tmp_path / "window-1"
    folder.mkdir()
    paths = [
        write(folder / f"rank{rank}.7.memory.pickle", [[event("alloc", 2, size, frames=FORWARD)]], OLDER)
        for rank, size in ((2, 5000), (3, 6000))
    ]
    lines = [{"end_ns": 9, "files": [{"path": f"window-1/{path.name}"}]} for path in paths]
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    diagnosis = instrument.diagnose(tmp_path)
    other = f"1 file left out, {paths[1]}: rank 3, which rank=3 or --rank 3 diagnoses."
    assert (2, f"Diagnosed: {paths[0]}.", other) == (diagnosis.rank, *diagnosis.source_texts)
    older = shutil.copy(paths[1], folder / "rank3-pid77.6.memory.pickle")
    third = instrument.diagnose(tmp_path, rank=3)
    assert (3, 6000 + 1000) == (third.rank, third.snapshot and third.snapshot.peak().bytes)
    assert {
        str(paths[0]): "rank 2, which rank=2 or --rank 2 diagnoses",
        str(older): "an older snapshot of rank 3",
    } == third.left_out
    with pytest.raises(ValueError, match="must be one of 2, 3"):
        instrument.diagnose(tmp_path, rank=0)
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(instrument.TraceError, match="no file that ends in"):
        instrument.diagnose(tmp_path)


def test_another_run(tmp_path: Path) -> None:
    """The snapshot of another run in the same folder is left alone."""
    assert instrument.diagnose(run_folder(tmp_path, ("a", True), ("b", False))).snapshot is None


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    """A line of the manifest that no system could have written for a file does not end the diagnosis."""
    folder = run_folder(tmp_path, ("a", True), ("a", False))
    first, last = (folder / "manifest.jsonl").read_text().splitlines()
    names = [f"window-0/{'x' * 300}{end}" for end in (".memory.pickle", ".pt.trace.json")]
    wrong = json.dumps({**json.loads(first), "files": [{"path": name} for name in names]})
    (folder / "manifest.jsonl").write_text("\n".join((first, wrong, last)) + "\n")
    found = instrument.diagnose(folder).snapshot
    assert found is not None
    assert folder / "window-0" / "rank0.0.memory.pickle" == found.path


def test_a_damaged_snapshot(tmp_path: Path) -> None:
    """The trace is diagnosed, and what cannot be read is said."""
    folder = run_folder(tmp_path, ("a", True))
    (folder / "window-0" / "rank0.0.memory.pickle").write_bytes(b"\x80\x04nothing")
    diagnosis = instrument.diagnose(folder)
    assert diagnosis.snapshot is None
    assert "rank0.0.memory.pickle" in " ".join(diagnosis.left_out)
    with pytest.raises(instrument.TraceError, match="damaged"):
        instrument.diagnose(folder / "window-0" / "rank0.0.memory.pickle")


def test_without_a_snapshot() -> None:
    """Rules that need one abstain, and say how to record it."""
    assert 'memory="snapshot" records one' in instrument.diagnose(MadeLoop().trace()).abstained["kept-gradients"]
