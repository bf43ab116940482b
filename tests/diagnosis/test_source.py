"""What a diagnosis says of its source: the file that was chosen, and those that are damaged or left out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import instrument
from instrument.start import cli
from tests.support.shared_traces import shared

from .made_loops import GEMM, MadeLoop
from .test_diagnose import idle_loop, write
from .test_job import job, rank, rules


def said(text: object) -> str:
    return " ".join(str(text).split())


def dlrm(folder: Path, *ranks: int) -> Path:
    """Copy the files of these ranks of a real job of eight ranks into a folder."""
    folder.mkdir(exist_ok=True)
    for number in ranks:
        shutil.copy(shared(f"param_dlrm_8rank_r{number}.json.gz"), folder)
    return folder


def test_the_chosen_file_is_named(tmp_path: Path) -> None:
    """A file that was chosen from several is named with its rank; one that the caller named is not."""
    for number, took in enumerate((100, 850)):
        path = write(tmp_path / f"rank{number}.json", rank(number, [took] * 3))
    found = instrument.diagnose(tmp_path)
    assert found.source == f"{path}, rank 1 of the 2 ranks that were read"
    for text in (str(found), found.to_markdown().replace("\\", "")):
        assert f"Diagnosed: {found.source}." in said(text)
    data = json.loads(found.to_json())
    assert data["source"] == found.source
    assert (data["job"]["world_size"], data["job"]["ranks"], data["job"]["damaged"]) == (2, [0, 1], {})
    assert instrument.diagnose(path).source == ""
    assert "Diagnosed" not in str(instrument.diagnose(path))
    predicted = CliRunner().invoke(cli.app, ["whatif", str(tmp_path)])
    assert f"Replayed: {found.source}." in said(predicted.stdout)


def test_the_only_file_below_a_folder(tmp_path: Path) -> None:
    """A file that was found below the folder is named, and so are the folders that are left out."""
    write(tmp_path / "a" / "one.json", idle_loop())
    path = write(tmp_path / "b" / "one.json", idle_loop())
    found = instrument.diagnose(tmp_path)
    assert found.source == str(path)
    assert found.left_out == {str(tmp_path / "a"): "only the last of these folders is read"}
    assert f"Diagnosed: {path}. 1 file left out, {tmp_path / 'a'}: only the last" in said(found)


def test_ranks_without_a_number(tmp_path: Path) -> None:
    """Files that give no rank may be of no common job, so it is said that their ranks are guesses."""
    for name in ("one", "two"):
        write(tmp_path / f"{name}.json", MadeLoop())
    text = "Neither the file nor its name gives the rank; numbered by name: 0, 1."
    found = instrument.diagnose(tmp_path)
    assert text in said(found)
    assert json.loads(found.to_json())["job"]["guessed"] == [0, 1]


def test_a_list_of_paths_or_traces(tmp_path: Path) -> None:
    """The ranks of a job may be a list or a tuple of paths, or of traces."""
    paths = [
        write(tmp_path / f"rank{number}.json", rank(number, [took] * 3)) for number, took in ((0, 100), (1, 850))
    ]
    found = instrument.diagnose(paths)
    assert (Path(found.path).name, found.source) == (
        "rank1.json",
        f"{paths[1]}, rank 1 of the 2 ranks that were read",
    )
    traces = [instrument.read_trace(path) for path in paths]
    for given in (traces, tuple(traces), iter(traces), list(map(str, paths))):
        assert instrument.diagnose(given).verdict == found.verdict
    assert "on rank 0" in instrument.diagnose(paths, rank=0).verdict
    assert instrument.diagnose([traces[0]]).steps == 3
    unnamed = [replace(trace, path=Path("made")) for trace in traces]
    assert instrument.diagnose(unnamed).job.guessed == (0, 1)  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="must hold traces, or paths, and nothing else"):
        instrument.diagnose([traces[0], paths[1]])


def test_damaged_ranks(tmp_path: Path) -> None:
    """A damaged file of another rank is a finding, and a file that cannot be read is named."""
    dlrm(tmp_path, 0, 1)
    (tmp_path / "r4.json.gz").write_bytes(shared("param_dlrm_8rank_r4.json.gz").read_bytes()[:20_000])
    (tmp_path / "r5.json.gz").write_bytes(b"\x1f\x8bnothing")
    found = instrument.diagnose(tmp_path)
    damaged = rules(found)["damaged-trace"]
    assert damaged.title.startswith("The file of rank 4 is damaged: the gzip file is cut off; ")
    assert damaged.where.rank == 4
    assert "1 file cannot be read, " in said(found)
    assert "r5.json.gz: " in said(found)
    data = json.loads(found.to_json())
    assert [*data["job"]["damaged"]] == ["4"]
    assert [*data["job"]["unreadable"]] == [str(tmp_path / "r5.json.gz")]


def test_several_damaged_ranks() -> None:
    """Damaged files of several ranks are one finding, apart from that of the rank that is diagnosed."""
    traces = job([850] * 3, [100] * 3, [100] * 3)
    for number, trace in traces.items():
        trace.path = Path(f"rank{number}")
        trace.lost = replace(trace.lost, events=1, reasons={"zero bytes": 1})
    findings = [found for found in instrument.diagnose(traces, rank=0).findings if found.rule == "damaged-trace"]
    assert [found.title for found in findings] == [
        "The file is damaged: zero bytes",
        "The files of 2 other ranks are damaged: rank 1, zero bytes; rank 2, zero bytes",
    ]
    assert [found.evidence[0].value for found in findings] == [1, 2]


def test_few_lost_bytes_are_counted(tmp_path: Path) -> None:
    """Bytes that are far below a megabyte are not rounded to zero."""
    text = write(tmp_path / "whole.json", idle_loop()).read_bytes()
    (tmp_path / "cut.json").write_bytes(text[: len(text) // 2])
    lost = rules(instrument.diagnose(tmp_path / "cut.json"))["damaged-trace"].evidence[1]
    assert isinstance(lost.value, int)
    assert lost.value > 0
    assert f"Bytes in the file that could not be read, without what a cut removed: {lost.value} bytes" in said(
        instrument.diagnose(tmp_path / "cut.json")
    )


def test_why_no_rank_is_late(tmp_path: Path) -> None:
    """With a rank missing, the reason is that it may be the late one, not that nothing is shared."""
    found = instrument.diagnose(dlrm(tmp_path, 0, 1, 2))
    reason = "ranks are missing, which may be those that arrive last"
    assert found.abstained["late-rank"] == reason
    text = CliRunner().invoke(cli.app, ["summarize", str(tmp_path)]).stdout
    assert f"It is not known which rank arrives last at the collectives: {reason}." in said(text)


def test_steps_from_regions() -> None:
    """It is said that regions are the steps, and regions that differ only in numbers are one row."""
    loop = MadeLoop(steps=12, busy=False)
    for step, row in enumerate(loop.rows["regions"]):
        row["name"] = f"Warm-up Step {step}"
        loop.work(GEMM, 1000 * step, 1000 * step + 1, 1000 * step + 900)
    found = instrument.diagnose(loop.trace())
    for text in (str(found), found.to_markdown()):
        assert 'A step is a call of the region "Warm-up Step' in said(text)
        assert "Warm-up Step 0" not in text.partition("Longest regions")[2].partition("Longest idle")[0]
    assert found.steps_from == json.loads(found.to_json())["steps_from"] == "Warm-up Step *"
    (row,) = found.longest_regions
    assert (row.name, round(row.cpu_ns, -2)) == ("Warm-up Step *", 1_000_000)
    assert len(found.regions) == 12
    assert "A step is" not in str(instrument.diagnose(MadeLoop().trace()))


def test_a_region_with_more_gpu_time_than_the_step() -> None:
    """Durations of kernels that run at the same time add up to more than the step, which is explained."""
    loop = MadeLoop(busy=False)
    for step in (0, 1000, 2000):
        loop.region("forward", step, step + 900)
        for stream in (7, 20, 21):
            loop.work(GEMM, step + 1, step + 2, step + 900, stream=stream)
    note = "GPU adds up the durations of the region's work: what runs at the same time counts in full."
    found = instrument.diagnose(loop.trace())
    assert note in said(found)
    assert note in said(found.to_markdown())
    assert note not in said(instrument.diagnose(idle_loop().trace()))


def test_markdown_has_what_the_terminal_has() -> None:
    """The coverage, the utilization, the regions and the idle gaps are in Markdown as well."""
    found = instrument.diagnose(shared("tl_h100_bert_small.json.gz"))
    text = found.to_markdown().replace("\\", "")
    assert found.coverage_text in text
    assert found.mfu_text
    assert found.mfu_text in text
    assert f"- {found.longest_gaps[0]}" in text
    text = instrument.diagnose(shared("nsys/mfu_2gpu_before.sqlite"), what_if=False).to_markdown()
    assert "Based on: " in text
    looped = instrument.diagnose(idle_loop().region("loss", 1490, 1510).trace()).to_markdown()
    assert "| longest regions, per step | CPU | GPU |" in looped
    assert "| loss | 6.67 us | " in looped


def test_times_of_regions() -> None:
    """Only calls inside no other region count, and only their time during the steps."""
    loop = MadeLoop(steps=2, busy=False).region("load", 0, 300).region("model", 400, 1000)
    loop.region("model", 500, 900).region("load", 600, 800)  # inside the first call
    for at in (100, 650):
        loop.work(GEMM, at, at + 1, at + 101)
    loop.region("load", 1900, 2600)  # ends after the last step
    found = instrument.diagnose(loop.trace())
    assert [tuple(row) for row in found.regions] == [("model", 300_000, 50_000), ("load", 200_000, 50_000)]
