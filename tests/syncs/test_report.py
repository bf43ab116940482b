"""`SyncReport`: counts, failures, and its text in a terminal."""

from __future__ import annotations

import json
import linecache
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from instrument.base.findings import NOT_COVERED, Site
from instrument.base.printable import printable
from instrument.explain.waits.events import SyncEvent
from instrument.explain.waits.report import SyncReport, render

from .reports import finding, findings_of, report, script


def shown(report: SyncReport, width: int = 80, **more: Any) -> str:
    out = StringIO()
    render(report, console=Console(file=out, width=width, **more))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def test_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text has the findings with their code, worst first, then allowed and not covered ones."""
    path = script(tmp_path)
    monkeypatch.chdir(tmp_path)
    via = Site("/v/site-packages/torch/nn/utils/clip_grad.py", 97, "clip")
    found = report(
        finding("to", 2, path, (0, 1), cause="copies to the GPU", direction="H2D", bytes=8),
        finding("item", 3, path, (0, 1), blocked_ns=6_000_000, idle_ns=500, region=("train", "forward")),
        finding("bool", 4, path, (1, None), via=via, backward="MulBackward0", thread="autograd"),
        finding("print", 5, path, (0,), allowed="shown once"),
        finding(NOT_COVERED, 6, path, (0,), cause="torch.compile'd function, run eagerly"),
        steps=2,
        source="live",
        coverage=["CUDA code of libraries is not seen"],
    )
    assert (
        shown(found)
        == """\
3 lines make the CPU wait for the GPU: 2 synchronizations in most steps, up to 3
in others (live, 2 steps)

high    train.py:3 in step
    item: reads a value back from the GPU
    in every step; the CPU waited 12.0 ms in all, 6.00 ms each time, which left
    the GPU without work for 1.00 us
    region train/forward
      1 | def step(model, batch):
      2 |     loss = model(batch)
    > 3 |     total = loss.item()
      4 |     rows = batch[batch > 0]
      5 |     loss.backward()
    Fix: Keep the numbers on the GPU and read them only every so many steps.
      - total += loss.item()
      + total += loss.detach()

medium  train.py:2 in step
    to: copies to the GPU (H2D, 16 bytes in all)
    in every step; how long is unknown: the start or end of the wait was not
    seen
      1 | def step(model, batch):
    > 2 |     loss = model(batch)
      3 |     total = loss.item()
      4 |     rows = batch[batch > 0]
    Fix: Let the DataLoader pin its batches (pin_memory=True), and copy without
    blocking. Data that stays the same, such as a model, belongs before the
    loop.
      - batch = batch.to("cuda")
      + batch = batch.pin_memory()  # better: DataLoader(..., pin_memory=True)
      + batch = batch.to("cuda", non_blocking=True)

low     train.py:4 in step
    bool: reads a value back from the GPU
    in 1 of 2 steps; once outside the steps; how long is unknown: the start or
    end of the wait was not seen
    via torch/nn/utils/clip_grad.py:97 in clip, backward of MulBackward0, thread
    autograd
      2 | loss = model(batch)
      3 | total = loss.item()
    > 4 | rows = batch[batch > 0]
      5 | loss.backward()
      6 | return total, rows
    Fix: Leave out the check: a norm that is not finite shows in the loss, and a
    GradScaler skips the step.
      - torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
      + torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

Allowed:
  - train.py:5 in step: print, in 1 of 2 steps: shown once

Not covered:
  - train.py:6 in step: torch.compile'd function, run eagerly (in 1 of 2 steps)

Coverage:
  - CUDA code of libraries is not seen
"""
    )


def test_no_findings() -> None:
    """A report without findings is one line, with the way it was made."""
    assert (
        shown(report(steps=3), width=100)
        == "No line makes the CPU wait for the GPU (dry run without a GPU, no timings; 3 steps)\n"
    )
    assert "(trace)" in shown(report(steps=0, source="trace"))
    assert (
        shown(report(steps=0, source="live", unavailable_reason="no GPU"))
        == "Nothing could be checked (live): no GPU\n"
    )


def test_str() -> None:
    """`str` gives the same text, without colors."""
    text = str(report(finding()))
    assert text.startswith("1 line makes the CPU wait for the GPU: 1 synchronization in the step")
    assert "\x1b" not in text


@pytest.mark.parametrize("name", ["[/]", "[bold]x[/bold]", ":smile:", "a\nb\x1b[2J", "\udcff", "long" * 50])
def test_unprintable_names(name: str) -> None:
    """Names are shown without markup or control characters, and every name can be encoded."""
    found = finding(name, 1, f"/x/{name}.py", region=(name,), cause=name, thread=name, backward=name)
    again = finding("item", 2, name, allowed=name)
    unseen = finding(NOT_COVERED, 3, name, cause=name)
    text = shown(report(found, again, unseen, coverage=[name]), force_terminal=True, color_system="truecolor")
    assert text.count(printable(name)) >= 7
    assert "\x1b[2J" not in text
    assert text.encode()


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_width(tmp_path: Path, width: int) -> None:
    """Prose and code fit the terminal; paths are never broken."""
    path = script(
        tmp_path,
        code="def step():\n    x = " + "1 + " * 100 + "1\n    " + "\N{HIRAGANA LETTER A}" * 90 + " = 1\n",
    )
    text = shown(report(finding("item", 2, path, cause="word " * 60)), width=width)
    own = [line for line in text.splitlines() if " | " in line or "word" in line]
    assert len(own) > 3
    assert max(map(cell_len, own)) <= max(width, 30)
    assert f"{path}:2" in text


def test_colors() -> None:
    """The text has colors in a terminal and none in a pipe."""
    assert "\x1b[" in shown(report(finding()), force_terminal=True, color_system="standard")
    assert "\x1b" not in shown(report(finding()))


def test_unreadable_code() -> None:
    """A finding without a readable file has a place, but no code."""
    for site in (
        Site("<stdin>", 3, "f"),
        Site("/gone.py", 3, "f"),
        Site(__file__, 10**6, "f"),
        Site(__file__, 0, "f"),
        None,
    ):
        text = shown(report(finding(site=site, thread="loader")))
        assert " | " not in text
        assert str(site) in text if site else "no line of Python, thread loader" in text


def test_many_findings() -> None:
    """The worst findings are shown in full, the others in one line each."""
    text = shown(report(*(finding(line=line, file="/x/gone.py") for line in range(1, 101)), dropped=7))
    assert 20 == text.count("Fix:")
    assert all(f"gone.py:{line} in step" in text for line in range(1, 101))
    assert "Lines that are not listed synchronized 7 times." in text


def test_order() -> None:
    """Forbidden findings come first, then by severity and duration; allowed and not covered ones are last."""
    names = ["forbidden", "long", "short", "high", "medium", "low", "allowed", NOT_COVERED]
    found = {
        "low": finding("low", steps=(None,)),
        "high": finding("high"),
        NOT_COVERED: finding(NOT_COVERED),
        "medium": finding("medium", direction="H2D"),
        "allowed": finding("allowed", allowed="why", blocked_ns=10**9),
        "short": finding("short", blocked_ns=5),
        "long": finding("long", blocked_ns=6),
        "forbidden": finding("forbidden", steps=(None,), forbidden=True),
    }
    assert names == [one.op for one in report(*found.values()).findings]
    severities = [report().severity(found[name]) for name in names]
    assert ["high"] * 4 + ["medium", "low", "low", "low"] == [
        report(*found.values()).severity(found[name]) for name in names
    ], severities


@pytest.mark.parametrize("source", ["dry run", "live", "trace"])
def test_order_by_pattern(source: Any) -> None:
    """Findings are ordered by steps: most, some, bursts, single ones, then those outside the steps."""
    every = tuple(range(7))
    found = [
        finding("setup", 1, steps=(None,) * 90),
        finding("once", 2, steps=(4,)),
        finding("save", 3, steps=(3,) * 61),
        finding("log", 4, steps=(0, 5)),
        finding("most", 5, steps=every[1:]),
        finding("loss", 6, steps=(*every, None)),
        finding("twice", 7, steps=every * 2),
        finding("uneven", 8, steps=(*every, 2, 2)),
        finding("copies", 9, steps=every, direction="H2D"),
    ]
    ordered = report(*found, steps=7, source=source)
    assert ["twice", "uneven", "loss", "most", "copies", "log", "save", "once", "setup"] == [
        one.op for one in ordered.findings
    ]
    assert ["high"] * 4 + ["medium"] * 2 + ["low"] * 3 == [ordered.severity(one) for one in ordered.findings]
    assert [
        "in every step, 2 times each", "in every step, once to 3 times",
        "in every step; once outside the steps", "in 6 of 7 steps", "in every step", "in 2 of 7 steps",
        "in 1 of 7 steps, 61 times", "in 1 of 7 steps", "90 times outside the steps",
    ] == [str(ordered.pattern(one)) for one in ordered.findings]  # fmt: skip
    text = shown(ordered, width=120)
    assert text.index("in 2 of 7 steps") < text.index("in 1 of 7 steps, 61 times")
    assert "in 1 of 7 steps, 61 times" in ordered.to_sarif()
    written = {one["op"]: one for one in json.loads(ordered.to_json())["findings"]}
    assert (1, 0, "in 1 of 7 steps, 61 times") == tuple(
        written["save"][name] for name in ("in_steps", "outside", "pattern")
    )
    assert "4 of 7 steps wait for the GPU 7 to 67 times; allowed in a step: 6" == ordered.over(6)


def test_low_severity() -> None:
    """A line in under a tenth of the steps, or with a negligible share of the time, has low severity."""
    rare = finding(steps=(0, 50))
    assert "low" == report(rare, steps=100).severity(rare)
    short = finding(steps=(0, 1), blocked_ns=10_000, idle_ns=10_000)
    assert "low" == report(short, steps=2, source="trace", span_ns=10**9).severity(short)
    assert "high" == report(short, steps=2, source="trace", span_ns=10**6).severity(short)
    assert "less than 0.1 % of the time" in shown(report(short, steps=2, source="trace", span_ns=10**9))
    assert "high" == report(short, steps=2, source="live").severity(short)


def test_per_step() -> None:
    """Means are over all steps and exclude calls outside steps; without steps the run is one step."""
    found = finding(steps=(0, 0, 3, None))
    assert 3 / 4 == report(found, steps=4).per_step(found)
    assert 4 == report(found, steps=0).per_step(found)
    assert 2 == report(found, steps=4).max_in_step(found)
    assert 4 == report(found, steps=0).max_in_step(found)
    assert 3 == report(steps=4).max_in_step(found, finding(steps=(0,)))


def test_assert_max() -> None:
    """The limit applies to the step with the most synchronizations."""
    uneven = report(finding(steps=(0, 1)), finding("bool", 4, steps=(1, None, None, None)), steps=10)
    uneven.assert_max(2)
    with pytest.raises(
        AssertionError, match="1 of 10 steps wait for the GPU 2 times; allowed in a step: 1\n\n2 lines make"
    ):
        uneven.assert_max(1)
    with pytest.raises(AssertionError):
        report(finding(steps=(None, None)), steps=0).assert_max(1)
    report().assert_max()
    report(finding(allowed="why"), finding(NOT_COVERED, cause="run eagerly")).assert_max()


def test_assert_max_fails_regardless_of_the_limit() -> None:
    """Forbidden synchronizations, and a run that was not checked, fail regardless of the limit."""
    with pytest.raises(AssertionError, match="waits for the GPU 2 times inside no_syncs"):
        report(finding(steps=(None, 0), forbidden=True)).assert_max(9)
    with pytest.raises(AssertionError, match=r"(?s)ended early\n\n.*ValueError:\s+x") as raised:
        report(error=ValueError("x")).assert_max(9)
    assert "No line makes" in str(raised.value)
    with pytest.raises(AssertionError, match="nothing could be checked: there is no GPU"):
        report(unavailable_reason="there is no GPU").assert_max(9)
    with pytest.raises(AssertionError, match="the step waits for the GPU 1,000 times; allowed: 9"):
        report(dropped=1000).assert_max(9)


@pytest.mark.parametrize(
    ("most", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), ("1", TypeError)]
)
def test_wrong_limits(most: Any, error: type[Exception]) -> None:
    """A wrong limit raises an error at once, also without findings."""
    with pytest.raises(error, match=f'"most" must be .*: {most!r}'):
        report().assert_max(most)


def test_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON has all fields, with exact numbers."""
    path = script(tmp_path)
    monkeypatch.chdir(tmp_path)
    linecache.checkcache()
    big = 12_345_678_901_234_567
    made_report = report(
        finding("item", 3, path, (0, None), blocked_ns=big, region=("a", "b"), thread="MainThread"),
        finding(NOT_COVERED, 4, path, cause="why"),
        steps=1,
        coverage=["a sentence"],
        error=ValueError("bad"),
    )
    written = json.loads(made_report.to_json())
    item, unseen = written.pop("findings")
    assert written == {
        "version": 1,
        "source": "dry run",
        "steps": 1,
        "syncs_per_step": 1,
        "median_syncs": 1,
        "finished": False,
        "error": "ValueError: bad",
        "unavailable": "",
        "dropped": 0,
        "exceeded": [],
        "coverage": ["a sentence"],
    }
    assert item == {
        "status": "sync",
        "severity": "high",
        "op": "item",
        "cause": "reads a value back from the GPU",
        "site": {"file": str(path), "line": 3, "function": "step", "code": "total = loss.item()"},
        "via": None,
        "vias": [],
        "thread": "MainThread",
        "backward": None,
        "region": ["a", "b"],
        "regions": [{"path": ["a", "b"], "count": 2}],
        "count": 2,
        "pattern": "once in the step; once outside the steps",
        "in_steps": 1,
        "outside": 1,
        "per_step": 1.0,
        "step": 0,
        "steps": [{"number": 0, "count": 1}, {"number": None, "count": 1}],
        "direction": None,
        "bytes": None,
        "blocked_ns": 2 * big,
        "timed": 2,
        "untimed": None,
        "idle_ns": None,
        "allowed": None,
        "forbidden": False,
        "fingerprint": made_report.findings[0].fingerprint,
        "fix": {
            "text": "Keep the numbers on the GPU and read them only every so many steps.",
            "before": "total += loss.item()",
            "after": "total += loss.detach()",
        },
    }
    assert ("not covered", None, "a dry run has no GPU to wait for") == (
        unseen["status"],
        unseen["fix"],
        unseen["untimed"],
    )


def test_headline() -> None:
    """If steps differ, the headline has the median and the maximum, to which the limit applies."""
    even = report(finding(steps=(0, 1)), finding("bool", 4, steps=(0, 1)), steps=2)
    text = " ".join(str(even).split())
    assert text.startswith("2 lines make the CPU wait for the GPU: 2 synchronizations in most steps (dry run")
    uneven = report(finding(steps=(0, 1)), finding("bool", 4, steps=(1, 1, 1)), steps=2)
    assert "GPU: 1 synchronization in most steps, up to 4 in others (dry run" in " ".join(str(uneven).split())
    seldom = report(finding(steps=(0,) * 9), steps=20)
    text = " ".join(str(seldom).split())
    assert (
        "no synchronizations in most steps, up to 9 in others (dry run without a GPU, no timings; 20 steps)"
        in text
    )
    assert "every step waits for the GPU once to 4 times; allowed in a step: 0" == uneven.over(0)
    often = report(finding("item", 33, steps=(0,) * 5 + (1,) * 4 + (2,) * 24), steps=3)
    assert "every step waits for the GPU 4 to 24 times; allowed in a step: 0" == often.over()
    often = report(finding("item", 32, steps=(0,) * 4 + (1,) * 4 + (2,) * 24), steps=3)
    assert "every step waits for the GPU 4 to 24 times (4 in most); allowed in a step: 0" == often.over()
    assert "1 of 2 steps wait for the GPU 4 times; allowed in a step: 3" == uneven.over(3)


def test_findings_outside_of_steps() -> None:
    """Findings outside steps are listed separately, without a fix."""
    text = shown(report(finding(steps=(None, None)), steps=2))
    assert (
        "Outside the steps, where a synchronization costs little:\n  - /x/train.py:3 in step: item, 2 times\n"
        in text
    )
    assert "Fix" not in text
    assert "Fix" in shown(report(finding(steps=(None, None), forbidden=True), steps=2))
    assert "Keep the numbers" in shown(report(finding(steps=(None, 1)), steps=2))
    assert "Keep the numbers" in shown(report(finding(steps=(None, None)), steps=0))


def test_several_lines_in_a_library() -> None:
    """The library line with the most calls is shown, with the number of other lines."""
    vias = [Site("/v/site-packages/lib/a.py", line, "f") for line in (1, 2, 2, 3)]
    site = Site("/x/train.py", 3, "step")
    (found,) = findings_of(*(SyncEvent("item", "", site, via, step=0) for via in vias))
    text = shown(report(found))
    assert "via lib/a.py:2 in f, and 2 more lines (vias in the JSON)" in " ".join(text.split())
    (listed,) = json.loads(report(found).to_json())["findings"]
    assert [(via["line"]["line"], via["count"]) for via in listed["vias"]] == [(2, 2), (1, 1), (3, 1)]


def test_code_that_would_fail_on_a_gpu() -> None:
    """Code that would fail on a GPU fails regardless of the limit; code that is only not covered does not."""
    wrong = report(finding(NOT_COVERED, cause="takes tensors of both", forbidden=True))
    assert "would not run on a GPU: takes tensors of both (/x/train.py:3)" == wrong.over(99)
    assert report(finding(NOT_COVERED, cause="run eagerly")).over(0) is None


def test_thread_names(tmp_path: Path) -> None:
    """A profiler's thread name "thread 7" is not shown as "thread thread 7", and zero idle time is not shown."""
    lines = str(
        report(finding(thread="thread 7 (python)", blocked_ns=5, idle_ns=0), finding(thread="pt_autograd_0"))
    )
    assert "thread 7 (python)" in lines
    assert "thread thread" not in lines
    assert "thread pt_autograd_0" in lines
    assert "without work" not in lines


SHADOWED = """\
import instrument
import torch


def step():
    weight = torch.ones(3, device="cuda")
    print(weight.sum().item())


print(instrument.dry_run(step))
"""


@pytest.mark.process
def test_program_modules_named_like_libraries(tmp_path: Path) -> None:
    """A report prints although the program has modules named like the command line's libraries."""
    path = script(tmp_path, "train.py", SHADOWED)
    command = [sys.executable, str(path)]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "train.py:7" in plain.stdout, plain.stderr
    for name in ("rich", "typer", "msgspec", "structlog"):
        (tmp_path / f"{name}.py").touch()
    shadowed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (plain.stdout, "") == (shadowed.stdout, shadowed.stderr)


def test_names_for_users() -> None:
    """`dir` lists what a user reads and calls, not what the report is made with."""
    names = set(dir(SyncReport("live")))
    assert {"findings", "syncs", "allowed", "not_covered", "steps", "coverage", "assert_max", "to_json"} <= names
    assert not {name for name in names if name.startswith("_")} | ({"sort", "typical", "each_step"} & names)
