"""`instrument memory` prints the parts of a peak, and what changed from one snapshot to another."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from instrument.read.memory.breakdown import OLDER_MEMORY
from instrument.read.memory.categories import CATEGORIES
from instrument.start.cli import app

from ..support.programs import ROOT
from ..support.shared_traces import shared
from ..traces.test_page import sections
from .snapshots import event, write
from .test_breakdown import BATCH, FORWARD, OLDER, OPTIMIZER, STEP

TWO = ("--batch", "2", "--batch", "2")


@pytest.fixture
def snapshots(tmp_path: Path) -> list[str]:
    """The paths of a snapshot of a step, and of one whose activation is twice as large."""
    larger = copy.deepcopy(STEP)
    for number in (1, 5):
        larger[number]["size"] = 5000
    given = {"one": STEP, "two": larger}
    return [str(write(tmp_path / f"{name}.pickle", [events], OLDER)) for name, events in given.items()]


def output(*arguments: str, code: int = 0, columns: int = 120) -> str:
    result = CliRunner().invoke(app, ["memory", *arguments], env={"COLUMNS": str(columns)})
    assert code == result.exit_code, result.output
    return result.output


def test_a_peak(snapshots: list[str]) -> None:
    """Categories, lines and evidence, with what they are of the peak."""
    lines = [" ".join(line.split()) for line in output(snapshots[0]).splitlines()]
    assert "GPU 0 of one.pickle: 4.73 kB in use at the peak" == lines[0]
    assert "optimizer state 2.00 kB 42.3 2.00 kB 0 B" in lines
    assert "me/train.py:42 train optimizer state 2.00 kB 42.3 2" in lines
    assert "gradients (sized gradient) 1.00 kB 21.1 1" in lines
    assert any(line.startswith("sized gradient: allocated on a thread") for line in lines)


def test_a_change(snapshots: list[str]) -> None:
    """The peaks, and the parts that differ."""
    lines = [" ".join(line.split()) for line in output(*snapshots).splitlines()]
    assert "The peak went from 4.73 kB to 6.72 kB, +1.99 kB. The changes of the parts add up to this." in lines
    assert "me/model.py:12 forward activations 0 B 5.00 kB +5.00 kB" in lines
    assert not any(line.startswith("me/data.py") for line in lines)  # the same


def test_documented_output() -> None:
    """docs/traces.md shows what the command prints, in order, but for what it leaves out."""
    text = (ROOT / "docs" / "traces.md").read_text()
    block = text.split("$ instrument memory ctx128_fullstep.pickle\n")[1].split("```")[0]
    printed = iter(output(str(shared("memory/ctx128_fullstep.pickle")), columns=100).splitlines())
    shown = [line.rstrip() for line in block.splitlines() if line != "..."]
    missing = [line for line in shown if line not in map(str.rstrip, printed)]
    assert [] == missing


def keys_of(data: object) -> set[str]:
    """Return the keys of all dictionaries in JSON."""
    if isinstance(data, list):
        return set().union(*map(keys_of, data))
    return set(data).union(*map(keys_of, data.values())) if isinstance(data, dict) else set()


def test_documented_keys(tmp_path: Path) -> None:
    """docs/traces.md lists the keys of the JSON, and no others."""
    grows = [event("alloc", 20, 70, frames=BATCH), *STEP]
    again = [{**each, "addr": each["addr"] + 100} for each in grows]
    failed = {**event("oom", 0, 9000, frames=FORWARD), "device_free": 5}
    events = [*grows, *again, event("segment_free", 1, 10), event("alloc", 300, 5, frames=OPTIMIZER), failed]
    path = str(write(tmp_path / "all.pickle", [events], OLDER))
    found = json.loads(output(path, path, "--json"))
    path = str(write(tmp_path / "step.pickle", [STEP], OLDER))
    found["batch_fit"] = json.loads(output(path, path, "--json", "--batch", "1", "--batch", "2"))["batch_fit"]
    text = (ROOT / "docs" / "traces.md").read_text().split("### Memory as JSON\n")[1]
    rows = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    shown = [key for row in rows for key in re.findall(r"`(\w+)`", row)]
    assert [*found["snapshots"][0], *(key for key in found if key != "snapshots")] == shown
    assert {*re.findall(r"`(\w+)`", text)} - {OLDER_MEMORY} == keys_of(found) - {*CATEGORIES}


def test_batches(snapshots: list[str]) -> None:
    """How large the batch can be, from one snapshot and from two with their batch sizes."""
    text = " ".join(output(snapshots[0], "--limit", "6kB", "--batch", "2").split())
    assert "With a batch twice as large, the peak would be 5.42 kB, in the backward pass." in text
    assert "The batch can be 2.82 times as large, which is 5, until 6.00 kB is full." in text
    both = " ".join(output(*snapshots, "--batch", "1", "--batch", "3", "--limit", "11kB").split())
    assert "With a batch of 6, the peak would be 15.7 kB, in the forward pass." in both
    assert "The largest batch within 11.0 kB: 3." in both
    unknown = " ".join(output(snapshots[0], "--batch", "2").split())
    assert "How large the batch can be is not known without the memory of the GPU: see --limit." in unknown
    assert "needs --batch twice" in output(*snapshots, "--limit", "9kB", code=2)
    refused = output(snapshots[0], "--batch", "1000000000001", code=2)
    assert "1000000000000" in refused  # what is accepted
    output(snapshots[0], "--batch", "9" * 401, code=2)
    binary = " ".join(output(*snapshots, "--batch", "1", "--batch", "3", "--limit", "11KiB").split())
    assert "The largest batch within 11.3 kB: 4." in binary
    assert "GB is 10^9 bytes, and GiB 2^30" in " ".join(output("--help", columns=200).split())


def test_out_of_memory(tmp_path: Path) -> None:
    """The allocation that failed, its line, why, and memory that went back to the driver before."""
    events = [
        event("segment_free", 1 << 30, 5000, frames=FORWARD),
        {**event("oom", 0, 8000, frames=FORWARD), "device_free": 20},
    ]
    path = str(write(tmp_path / "a.pickle", [events], OLDER))
    text = " ".join(output(path).split())
    assert "An allocation of 8.00 kB failed at me/model.py:12 forward: too little memory is free" in text
    assert "me/model.py:12 forward none left 1 5.00 kB" in text
    other = str(write(tmp_path / "b.pickle", [STEP], OLDER))
    assert "Out of memory in a.pickle: 1 allocation failed." in " ".join(output(other, path).split())
    assert "in which no allocation failed" in output(other, path, "--batch", "1", "--batch", "2", code=2)


def test_json(snapshots: list[str]) -> None:
    """All numbers, unrounded."""
    found = json.loads(output(*snapshots, "--json"))
    one, two = (each["peak_bytes"] for each in found["snapshots"])
    assert (4730, two - one) == (one, sum(part["change_bytes"] for part in found["changes"]))
    assert two - one == sum(part["change_bytes"] for part in found["changes_by_region"])
    sized = json.loads(output(snapshots[0], "--json", "--limit", "6kB", "--batch", "2"))["snapshots"][0]
    assert (2, 5, 6000) == tuple(sized["larger_batch"][key] for key in ("batch", "largest", "limit_bytes"))
    first = found["snapshots"][0]
    assert 4730 == sum(use["bytes"] for use in first["uses"])
    assert 4730 == max(map(sum, zip(*first["timeline"]["bytes"].values(), strict=True)))
    assert [1000, 1000, 2000] == [use["bytes"] for use in first["largest_blocks"][:3]]
    assert ([], 0) == (first["failures"], first["driver_traffic"]["taken_later"])


def test_page(snapshots: list[str], tmp_path: Path) -> None:
    """--html writes one file, of one snapshot or of two."""
    page = tmp_path / "page.html"
    assert f"{page} has the page" in output(snapshots[0], "--html", str(page)).replace("\n", "")
    assert "Memory of GPU 0 at its peak: 4.73 kB in use" in page.read_text()
    output(*snapshots, "--html", str(page))
    assert "GPU 0: the peak went from 4.73 kB to 6.72 kB, +1.99 kB." in page.read_text()
    assert "cannot write" in output(snapshots[0], "--html", str(tmp_path / "none" / "page.html"), code=1)
    assert "--html and --json exclude each other" in output(snapshots[0], "--html", str(page), "--json", code=2)
    output(snapshots[0], "--html", str(page), "--limit", "6kB", "--batch", "2")
    (summary,) = (section for section in sections(page.read_text()) if section["id"] == "summary")
    assert any("which is 5, until 6.00 kB is full" in note for note in summary["notes"])
    output(*snapshots, "--html", str(page), "--batch", "1", "--batch", "3")
    (summary,) = (section for section in sections(page.read_text()) if section["id"] == "summary")
    assert any("With a batch of 6, the peak would be 15.7 kB" in note for note in summary["notes"])


def test_wrong_arguments(snapshots: list[str], tmp_path: Path) -> None:
    """What cannot be read ends with 1, wrong arguments with 2, and both say what is accepted."""
    (tmp_path / "text.pickle").write_text("no pickle")
    assert "it is not a pickle" in output(str(tmp_path / "text.pickle"), code=1)
    assert "cannot read" in output(str(tmp_path / "none.pickle"), code=1)
    assert "GPUs with memory in every snapshot are 0: 3" in output(snapshots[0], "--device", "3", code=2)
    empty = str(write(tmp_path / "empty.pickle", []))
    assert "no GPU has memory in" in output(empty, code=1)
    assert "one or two are accepted: 3" in output(*snapshots, snapshots[0], code=2)
    assert '"limit" must be a number > 0 with a unit' in output(snapshots[0], "--limit", "80", code=2)
    assert "one for each snapshot is accepted: 2, 2" in output(snapshots[0], *TWO, code=2)
    assert "two different ones are accepted: 2, 2" in output(*snapshots, *TWO, code=2)


@pytest.mark.parametrize("command", ["summarize", "slim", "merge", "whatif", "compare", "compare folder"])
def test_commands_that_read_traces(tmp_path: Path, command: str) -> None:
    """They say of a snapshot what it is, and which command reads it."""
    write(tmp_path / "rank0.1.memory.pickle", [STEP], OLDER)
    name, _, folder = command.partition(" ")
    path = str(tmp_path if folder else tmp_path / "rank0.1.memory.pickle")
    result = CliRunner().invoke(app, [name, path, *[path] * (name == "compare")])
    assert 1 == result.exit_code
    assert "it is a pickle, such as a memory snapshot, which instrument memory reads" in result.output


@pytest.mark.parametrize("command", ["memory", "diagnose", "summarize"])
def test_a_folder_of_other_snapshots(tmp_path: Path, command: str) -> None:
    """Those of no run are counted, and one is named as an example."""
    for name in ("step10", "step9"):
        write(tmp_path / f"{name}.pickle", [STEP], OLDER)
    result = CliRunner().invoke(app, [command, str(tmp_path)])
    assert 1 == result.exit_code
    assert f", but 2 .pickle files: instrument memory reads one, such as {tmp_path}/step9.pickle" in result.output
    if command == "memory":
        assert "the folder has no memory snapshot of a run, but" in result.output
