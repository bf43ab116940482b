"""Regions and windows in reports of the real Nsight Systems."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.regions.test_nvtx import PROGRAM, TREE, attributes
from tests.support import nsys
from tests.support.programs import ROOT
from tests.support.ranges import Range, outline

pytestmark = pytest.mark.nsys

EXAMPLE = ROOT / "examples" / "transformer_annotated.py"
STEPS, LAYERS = 12, 2
WINDOWS = ([2, 3, 4], [7, 8, 9])  # wait=1, warmup=1, active=3, repeat=2
LAYER = ["self-attention", "add & norm", "mlp", "add & norm"]
STEP = ["forward", *(f"  {name}" for name in LAYER * LAYERS), "backward"]


def indented(lines: list[str], level: int) -> list[str]:
    return ["  " * level + line for line in lines]


WINDOW = ["capture", *indented(["step", *indented(STEP, 1)] * 3, 1)]


def payloads(found: list[Range]) -> list[object]:
    return [r.payload for r in found if r.name == "step"]


def manifest(folder: Path) -> list[tuple[object, ...]]:
    entries = map(json.loads, (folder / "runs/transformer/manifest.jsonl").read_text().splitlines())
    return [(entry["exporter"], entry["status"], entry["steps"], entry["files"]) for entry in entries]


RECORDED = [("nsight_systems", "recorded", [window[0], window[-1]], []) for window in WINDOWS]


def test_regions_in_a_report(tmp_path: Path) -> None:
    """The report has the same ranges as the logging tool, and none under INSTRUMENT=0."""
    report = nsys.profile(PROGRAM, tmp_path=tmp_path)
    found = nsys.ranges(report.file)
    assert outline(found) == TREE
    by_name = attributes(found)
    assert by_name["step"] == ("push_pop", "instrument", 0x112233, 3, 0.5)
    assert by_name["inner"] == ("push_pop", "instrument", 0x008000, "compute", 7)
    assert tuple(by_name["fetch"][i] for i in (0, 1, 3)) == ("push_pop", "loader", "disk")
    assert attributes(nsys.marks(report.file)) == {"saved": ("mark", "instrument", 0xFF445566, None, -1)}

    report = nsys.profile(PROGRAM, tmp_path=tmp_path, env={"INSTRUMENT": "0"})
    assert nsys.ranges(report.file) == []


def test_one_report_per_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the capture range, nsys writes one report per window, with the regions of that window's steps."""
    monkeypatch.chdir(tmp_path)
    options = ["-c", "nvtx", "-p", "capture@instrument", nsys.capture_range_end(len(WINDOWS))]
    report = nsys.profile(EXAMPLE, tmp_path=tmp_path, options=options, args=["--device=cpu", f"--steps={STEPS}"])
    assert report.returncode == 0
    assert report.stdout.count("loss ") == STEPS
    assert len(WINDOWS) == len(report.files)
    for window, file in zip(WINDOWS, report.files, strict=True):
        found = nsys.ranges(file)
        assert "\n".join(WINDOW) == outline(found)
        assert window == payloads(found)
        assert {"instrument"} == {r.domain for r in found}
    assert manifest(tmp_path) == RECORDED


def test_whole_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a capture range, one report has every region, and torch.profiler never starts."""
    monkeypatch.chdir(tmp_path)
    script = f"""
        import runpy
        from pathlib import Path
        import torch

        profiler, program = torch.autograd.profiler, {str(EXAMPLE)!r}
        profiler._run_on_profiler_start = lambda: Path("torch-profiler-started").touch()
        runpy.run_path(program, run_name="__main__")
    """
    report = nsys.profile(script, tmp_path=tmp_path, args=["--device=cpu", f"--steps={STEPS}"])
    found = nsys.ranges(report.file)
    alone = Counter(line.strip() for line in STEP)
    assert Counter(r.name for r in found) == Counter(
        {name: count * STEPS for name, count in alone.items()} | {"step": 6, "capture": 2}
    )
    between = STEP * 2
    assert [*between, *WINDOW, *between, *WINDOW, *between] == outline(found).splitlines()
    assert payloads(found) == [2, 3, 4, 7, 8, 9]
    assert manifest(tmp_path) == RECORDED
    assert not Path("torch-profiler-started").exists()
    assert [path.name for path in Path("runs").rglob("*") if path.is_file()] == ["manifest.jsonl"]
