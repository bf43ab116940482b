"""Profiles that have sums of GPU time by name and no timeline."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from instrument.base.errors import TimeSumsError, TraceError
from instrument.read.jobs.read import read_trace
from instrument.start.cli import app

Tree = dict[str, Any]
LAYERS = """[
  { "count" : 625 }
, { "name" : "Conv_0 + PWN(Clip_3)", "timeMs" : 41.4232, "averageMs" : 0.0662771, "percentage" : 1.36062 }
, { "name" : "Conv_4", "timeMs" : 68.3092, "averageMs" : 0.109295, "percentage" : 2.24374 }
, { "name" : "Reformatting CopyNode", "timeMs" : 0, "averageMs" : 0, "percentage" : 0 }
]
"""


def node(name: str, *children: Tree, **metrics: object) -> Tree:
    return {"children": list(children), "frame": {"name": name, "type": "function"}, "metrics": metrics}


def kernel(name: str, calls: int, time_ns: int, title: str = "time (ns)") -> Tree:
    return node(name, **{"count": calls, "device_id": "0", "device_type": "CUDA", title: time_ns})


def proton(path: Path, *nodes: Tree) -> Path:
    """Write a tree as Proton does, with its devices at the end."""
    root = node("ROOT", *nodes, **{"count": 0, "time (ns)": 0})
    path.write_text("\n" + json.dumps([root, {"CUDA": {"0": {"arch": "90"}}}], indent=4))
    return path


def test_proton(tmp_path: Path) -> None:
    """The calls of a kernel in all scopes are added up, the most time first; the error pickles."""
    scopes = [node(name, kernel("add", 3, 700), kernel("gemm", 1, 900)) for name in ("forward", "backward")]
    path = proton(tmp_path / "p.hatchet", *scopes, kernel("old", 2, 5, "Time (ns)"))
    with pytest.raises(TimeSumsError, match=r"GPU time by name: gemm 1.80 us, add 1.40 us, old 5 ns") as raised:
        read_trace(path)
    again = pickle.loads(pickle.dumps(raised.value))
    assert [tuple(each) for each in again.sums] == [("gemm", 2, 1800), ("add", 6, 1400), ("old", 2, 5)]


def test_layers_of_tensorrt(tmp_path: Path) -> None:
    """The command shows the layers, as text and as JSON; the file may be in an archive."""
    path = tmp_path / "profile.json"
    path.write_text(LAYERS)
    shown = CliRunner().invoke(app, ["summarize", str(path)])
    assert (shown.exit_code, "times of layers and no timeline" in " ".join(shown.output.split())) == (0, True)
    rows = [line.split()[-4:] for line in shown.output.splitlines() if " ms" in line]
    assert rows == [["625", "68.3", "ms", "62.3"], ["625", "41.4", "ms", "37.7"]]
    packed = tmp_path / "profile.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.write(path)
    said = json.loads(CliRunner().invoke(app, ["summarize", "--json", str(packed)]).output)
    assert said["time_sums"][0] == {"name": "Conv_4", "calls": 625, "time_ns": 68_309_200}


@pytest.mark.parametrize("text", ['[{"frame": {"name": "x"}, "metrics": {"cycles": 5}}]', '[{"children": [[['])
def test_without_times(tmp_path: Path, text: str) -> None:
    """A tree without times, and one that is cut off, is named, with what to do."""
    path = tmp_path / "p.hatchet"
    path.write_text(text)
    with pytest.raises(TraceError, match="proton-viewer shows it") as raised:
        read_trace(path)
    assert not isinstance(raised.value, TimeSumsError)
