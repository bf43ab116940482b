"""The examples run as users run them, in an empty folder."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .support import warm
from .support.programs import environment

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, *command], env=environment({"COLUMNS": "100"}), cwd=folder, check=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the loop without this library prints."""
    return run(tmp_path_factory.mktemp("plain"), str(EXAMPLES / "transformer.py")).stdout


def test_examples_are_short() -> None:
    """No example is longer than 60 lines."""
    assert [path.name for path in EXAMPLES.glob("*.py") if len(path.read_text().splitlines()) > 60] == []


def test_transformer(plain: str, tmp_path: Path) -> None:
    """The annotated loop prints the same losses and a summary, and saves its two windows."""
    annotated = run(tmp_path, str(EXAMPLES / "transformer_annotated.py"))
    assert annotated.stdout == plain
    assert plain.count("loss") == 12
    rows = re.findall(r"^( *)(\S.*?)  +[\d.]+  +[\d.]+ [mu]?s ", annotated.stderr, re.MULTILINE)
    depths = {name: len(indent) // 2 for indent, name in rows}
    expected = {"forward": 0, "self-attention": 1, "mlp": 1, "add & norm": 1, "backward": 0}
    assert {name: depths.get(name) for name in expected} == expected
    manifest = [
        json.loads(line) for line in (tmp_path / "runs/transformer/manifest.jsonl").read_text().splitlines()
    ]
    assert [(entry["window"], entry["status"], entry["steps"]) for entry in manifest] == [
        (1, "recorded", [2, 4]),
        (2, "recorded", [7, 9]),
    ]
    for entry in manifest:
        (file,) = entry["files"]
        trace = tmp_path / "runs/transformer" / file["path"]
        assert trace.stat().st_size == file["bytes"]
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        counts = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
        assert {name: counts[name] for name in ("forward", "backward", "self-attention", "mlp", "add & norm")} == {
            "forward": 3, "backward": 3, "self-attention": 6, "mlp": 6, "add & norm": 12,
        }  # fmt: skip


def test_layers(plain: str, tmp_path: Path) -> None:
    """The unedited model prints the same losses, and its layers have forward and backward regions."""
    named = run(tmp_path, str(EXAMPLES / "transformer_layers.py"))
    assert named.stdout == plain
    rows = re.findall(r"^( *)(\S.*?)  +[\d.]+  +[\d.]+ [mu]?s ", named.stderr, re.MULTILINE)
    depths = {name: len(indent) // 2 for indent, name in rows}
    expected = {"Sequential": 0, "1": 1, "1.net": 2, "Sequential (backward)": 0, "1 (backward)": 1}
    assert {name: depths.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], "64_bf16_cold_eager"),
        (["--size", "256", "--dtype", "fp32", "--warmup"], "256_fp32_warm_eager"),
        (["--compile", "--warmup"], "64_bf16_warm_compiled"),
    ],
)
def test_matmul_add(tmp_path: Path, options: list[str], name: str) -> None:
    """Table and trace are named after the measured case, and the trace contains the region."""
    done = run(tmp_path, str(EXAMPLES / "matmul_add.py"), *options)
    table = (tmp_path / f"runs/{name}.txt").read_text()
    assert table in done.stdout
    assert "matmul_add" in table
    events = json.loads((tmp_path / f"runs/{name}.json").read_text())["traceEvents"]
    regions = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert regions.count("matmul_add") == 3


def test_black_box(tmp_path: Path) -> None:
    """The slow batch is found in its phase, and checkpoints are known as a period."""
    lines = run(tmp_path, str(EXAMPLES / "black_box.py")).stdout.splitlines()
    assert any(re.search(r"^  step 250 took .* of it in data$", line) for line in lines)
    assert any(re.search(r"^  one step in 50 is like this, .* of it in checkpoint$", line) for line in lines)


def test_find_syncs() -> None:
    """Exactly the three synchronizing lines are found, and printed as in docs/syncs.md."""
    path = EXAMPLES / "find_syncs.py"
    done = run(EXAMPLES.parent, "examples/find_syncs.py")
    lines = path.read_text().splitlines()
    found = re.findall(r"^\w+ +\S+:(\d+) in train\n    (\w+):", done.stdout, re.MULTILINE)
    assert {(lines[int(line) - 1].strip(), op) for line, op in found} == {
        ('tokens = batch.to("cuda")', "to"),
        ("loss = loss / len(tokens[tokens != 0])", "getitem"),
        ('print(f"loss {loss.item():.4f}")', "item"),
    }
    assert done.stdout.count("Fix: ") == len(found) == 3
    assert done.stdout.splitlines()[-1] == "Without the three, no step waits."
    (shown,) = re.findall(
        r"^```\n(high .*?)^\.\.\.$", (EXAMPLES.parent / "docs" / "syncs.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert shown in done.stdout
