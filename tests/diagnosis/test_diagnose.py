"""The contract of `diagnose`: what it accepts, what it returns, and how that looks."""

from __future__ import annotations

import copy
import gzip
import json
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import instrument
from instrument.base.errors import TraceError
from instrument.explain.diagnosis.verdict import PARTS
from instrument.explain.metrics.idle import CAUSES
from instrument.explain.rules.trace_facts import TraceFacts
from instrument.read.measures.timing import Timing
from instrument.read.tables.trace import UnreadDevice
from instrument.start import cli

from .made_loops import GEMM, MadeLoop

SAMPLE = Path(__file__).parents[1] / "data" / "gpu_two_steps.json"


def idle_loop() -> MadeLoop:
    """Return a loop whose GPU idles half of the time while it waits for its next batch."""
    loop = MadeLoop(busy=False)
    for start in (0, 1000, 2000):
        loop.region("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start, start + 500)
        loop.work(GEMM, start + 500, start + 501, start + 1000)
    return loop


def events(loop: MadeLoop) -> list[dict[str, Any]]:
    """Return the loop as events of torch.profiler."""
    categories = {"regions": "user_annotation", "runtime": "cuda_runtime", "gpu": "kernel", "operators": "cpu_op"}
    return [
        {
            "ph": "X",
            "cat": categories[table],
            "name": row["name"],
            "pid": 0 if table == "gpu" else 1,
            "tid": 7 if table == "gpu" else 1,
            "ts": row["start_ns"] / 1000,
            "dur": row["duration_ns"] / 1000,
            "args": {"correlation": row.get("correlation", 0), "device": 0, "stream": 7},
        }
        for table, rows in loop.rows.items()
        for row in rows
    ]


def write(path: Path, loop: MadeLoop) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schemaVersion": 1, "traceEvents": events(loop)}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_accepts_a_path_a_trace_and_ranks(tmp_path: Path) -> None:
    """A path, a trace and a set give the same diagnosis; of several ranks, the slowest is read."""
    path = write(tmp_path / "one.json", idle_loop())
    verdict = instrument.diagnose(path).verdict
    assert verdict == instrument.diagnose(str(path)).verdict
    assert verdict == instrument.diagnose(instrument.read_trace(path)).verdict
    for rank, steps in enumerate((2, 3)):
        write(tmp_path / "ranks" / f"rank{rank}.json", MadeLoop(steps=steps))
    found = instrument.diagnose(tmp_path / "ranks")
    assert (Path(found.path).name, found.steps) == ("rank1.json", 3)
    assert found.path == instrument.diagnose(instrument.read_traces(tmp_path / "ranks")).path


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"trace": 3}, TypeError, '"trace" must be a trace or a path, or several of them: 3'),
        ({"trace": []}, ValueError, '"trace" must not be empty'),
        ({"trace": [3]}, TypeError, '"trace" must hold traces, or paths, and nothing else: [3]'),
        ({"ignore": ["nothing"]}, ValueError, "unknown rule 'nothing'; docs/rules.md lists all rules"),
        (
            {"ignore": ["input-wiat"]},
            ValueError,
            "unknown rule 'input-wiat'; similar: input-wait; docs/rules.md lists all rules",
        ),
        ({"ignore": ["memsets,input-wait"]}, ValueError, "; similar: memsets, input-wait; docs/rules.md"),
        ({"ignore": "memsets"}, TypeError, "\"ignore\" must be a collection of names of rules: 'memsets'"),
        ({"ignore": None}, TypeError, '"ignore" must be a collection of names of rules: None'),
        ({"thresholds": 5}, TypeError, '"thresholds" must be a mapping from rules to thresholds: 5'),
        ({"thresholds": {"memsets": None}}, TypeError, '"thresholds" of the rule "memsets" must be a mapping'),
        ({"thresholds": {"memsets": {"share": math.nan}}}, ValueError, "must be a finite number: nan"),
        ({"thresholds": {"memsets": {"share": math.inf}}}, ValueError, "must be a finite number: inf"),
        ({"executor": 5}, TypeError, '"executor" must be a concurrent.futures.Executor: 5'),
        (
            {"collectives": ""},
            ValueError,
            '"collectives" must be "auto" or a regular expression that is not empty',
        ),
        ({"steps_from": ""}, ValueError, '"steps_from" must be a regular expression that is not empty'),
        ({"thresholds": {"nothing": {}}}, ValueError, "unknown rule 'nothing'"),
        ({"thresholds": {"memsets": {"most": 1}}}, ValueError, "has no threshold 'most'; it has: per_step, share"),
        ({"thresholds": {"memsets": {"share": "1"}}}, ValueError, "must be a finite number: '1'"),
        ({"collectives": "("}, ValueError, '"collectives" must be "auto" or a regular expression'),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    """Errors name the argument, the value and what is accepted."""
    with pytest.raises(error, match=re.escape(text)):
        instrument.diagnose(**{"trace": MadeLoop().trace(), **arguments})


def test_thresholds() -> None:
    """A threshold changes when a rule fires."""
    trace = idle_loop().trace()
    assert "input-wait" in {found.rule for found in instrument.diagnose(trace).findings}
    tuned = instrument.diagnose(trace, thresholds={"input-wait": {"share": 0.6}})
    assert "input-wait" not in {found.rule for found in tuned.findings}


def test_steps_from(tmp_path: Path) -> None:
    """Regions may be the steps; a name that no region has is an error."""
    loop = MadeLoop(busy=False)
    loop.rows["regions"] = [row | {"name": f"epoch {place}"} for place, row in enumerate(loop.rows["regions"])]
    trace = loop.work(GEMM, 1, 2, 900).trace()
    assert instrument.diagnose(trace, steps_from="epoch").steps == 3
    with pytest.raises(ValueError, match='"steps_from" must match the name of a region'):
        instrument.diagnose(trace, steps_from="nothing")


def test_inflated_times() -> None:
    """Findings on CPU time say that the window stretched it; the verdict says by how much."""
    from instrument.explain.diagnosis.diagnose import diagnosis_of

    facts = TraceFacts(idle_loop().trace(), "auto", Timing(around_ns=(500_000,), around_steps=((0, 9),)))
    found = diagnosis_of(facts)
    assert found.stretch == 2.0
    assert "Recording made a step 2.00 times as long." in found.verdict
    by_rule = {each.rule: each for each in found.findings}
    assert by_rule["input-wait"].title.endswith("(inflated: recording made steps 2.00 times as long)")
    assert by_rule["input-wait"].confidence == "low"
    assert by_rule["input-wait"].evidence[-1].value == 2.0
    assert by_rule["stretched-window"].evidence[0].value == 2.0


def test_the_manifest_gives_the_stretch(tmp_path: Path) -> None:
    """For a trace of a run, and for its folder, the manifest says how long steps take outside the window."""
    path = write(tmp_path / "window-0001" / "rank0.pt.trace.json.gz", idle_loop())
    line = {
        "run": "a", "rank": 0, "window": 1, "status": "recorded", "steps": [0, 2], "end_ns": 5,
        "files": [{"path": "window-0001/rank0.pt.trace.json.gz"}],
        "timing": {"run_steps": 9, "run_ns": 9000, "around_ns": 800_000, "around_steps": [[3, 8]], "own_ns": 0},
    }  # fmt: skip
    (tmp_path / "manifest.jsonl").write_text(json.dumps(line) + "\n")
    for place in (path, tmp_path):
        assert instrument.diagnose(place).stretch == 1.25


def test_json() -> None:
    """The JSON holds everything, each number with its definition."""
    found = instrument.diagnose(idle_loop().trace())
    data = json.loads(found.to_json())
    assert (data["version"], data["bound"], data["steps"]) == (1, "input", 3)
    assert {name: part["definition"] for name, part in data["parts"].items()} == PARTS
    assert set(data["idle_by_cause"]) <= set(CAUSES)
    first = data["findings"][0]
    assert first["rule"] == "input-wait"
    assert first["meaning"] == "The loop waits for its next batch."
    assert first["win_share"] == pytest.approx(0.5, rel=0.01)
    assert {"name", "value", "unit", "definition"} == {*first["evidence"][0]}
    assert set(first["where"]) == {"region", "module", "operator", "kernel", "step", "site", "rank"}
    assert data["abstained"]["memory-growth"] == (
        "there are neither memory events nor a memory snapshot: record with profile_memory=True or "
        'memory="snapshot"'
    )
    assert data["metrics"]["busy_pct"]["definition"] == "busy_ns / span_ns."
    assert data["goodput"]["unknown"]
    loop = MadeLoop(steps=1, busy=False).operator("aten::mm", 0, 90, [[512, 512]] * 2, ["c10::BFloat16"] * 2)
    (row,) = json.loads(instrument.diagnose(loop.work(GEMM, 1, 2, 900).trace()).to_json())["roofline"]
    assert (row["operator"], row["sizes"], row["bound"]) == ("aten::mm", [1, 512, 512, 512], "memory")
    assert row["flops_per_byte"] < row["ridge_flops_per_byte"]


def test_longest_idle_gaps() -> None:
    """The longest gaps have their cause, and the place and name of the work that ends them."""
    loop = idle_loop().region("loss", 1490, 1510)
    found = instrument.diagnose(loop.trace())
    gap, *others = found.idle_gaps
    assert [(each.duration_ns, each.cause) for each in (gap, *others)] == [(501_000, "input")] * 3
    middle = next(each for each in found.idle_gaps if each.start_ns == 1_000_000)
    assert (middle.where.region, middle.where.step) == (("loss",), 1)
    assert middle.where.kernel.startswith("gemm sm90 bf16")
    assert "501 us at 1.00 ms: input, ended by loss, gemm sm90" in " ".join(str(found).split())
    data = json.loads(found.to_json())
    assert data["idle_gaps"][0]["where"]["kernel"] == gap.where.kernel
    assert data["regions"][0]["name"].startswith("enumerate(DataLoader)")
    assert all(each.duration_ns == 1000 for each in instrument.diagnose(MadeLoop().trace()).idle_gaps)


def test_every_number_of_the_json_is_defined() -> None:
    """A number is beside its definition, or its key is among the definitions."""
    loop = idle_loop().operator("aten::mm", 501, 590, [[512, 512]] * 2, ["c10::BFloat16"] * 2)
    loop.rows["memory"] += MadeLoop().memory(10, 10, 10).rows["memory"]
    loop.rows["memory"][0]["address"] = 1
    data = json.loads(instrument.diagnose(loop.trace()).to_json())
    lacking = set[str]()

    def visit(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, dict) and "definition" in value:
            return
        for key, part in value.items() if isinstance(value, dict) else ((None, each) for each in value):
            inner = path if key is None else (*path, key)
            if isinstance(part, (dict, list)):
                visit(part, inner)
            elif isinstance(part, (int, float)) and not isinstance(part, bool):
                lacking.add(".".join(inner))

    visit({key: part for key, part in data.items() if key != "definitions"}, ())
    places = {"version", "rank", "steps", "memory.device", "findings.where.step", "findings.where.rank"}
    places |= {"idle_gaps.where.step", "idle_gaps.where.rank", "roofline.sizes", "memory.parts.bytes"}
    assert lacking - places <= {*data["definitions"]}
    assert {name for name in data["definitions"] if "." not in name} <= {*data}


def test_markdown() -> None:
    """The Markdown has the verdict, a table of parts, and each finding with its fix as a diff."""
    text = instrument.diagnose(idle_loop().trace()).to_markdown()
    assert text.startswith("**Bound by input: of 3 steps of 1.00 ms each, 50 % is waiting for the next batch (")
    assert "| input | 500 us | 50.0 % |" in text
    assert "### 1. The loop waits 500 us per step" in text
    assert "```diff\n- DataLoader(" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_terminal(width: int) -> None:
    """At any width the bar fills a line, and without color every part has its letter."""
    out = StringIO()
    Console(file=out, width=width).print(instrument.diagnose(idle_loop().trace()), soft_wrap=True)
    lines = out.getvalue().splitlines()
    assert "i" * (width // 2) + "#" * 0 in "".join(
        sorted(next(line for line in lines if set(line) <= {"#", "i", "o"}))
    )
    prose = [line for line in lines if not line.lstrip().startswith(("- DataLoader", "+ DataLoader"))]
    assert width < 80 or max(map(len, prose)) <= width


def test_print_and_notebook() -> None:
    """``print`` shows the findings in plain text; a notebook shows Markdown."""
    found = instrument.diagnose(idle_loop().trace())
    assert "1. The loop waits 500 us per step for the next batch" in str(found)
    assert "\x1b" not in str(found)
    assert found._repr_markdown_() == found.to_markdown()


def test_text_draws_no_random_number() -> None:
    """The text of a diagnosis, and its Markdown, leave Python's random generator as it was."""
    code = f"""
import random
import instrument
found = instrument.diagnose({str(SAMPLE)!r})
state = random.getstate()
assert str(found) and found.to_markdown()
assert random.getstate() == state
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hostile_names() -> None:
    """Control characters of names reach neither the terminal nor Markdown."""
    loop = idle_loop().region("\x1b[31mred|`#", 0, 900)
    found = instrument.diagnose(loop.trace())
    foreign = replace(MadeLoop(busy=False).trace(), unread_devices={"\x1b[31mTPU": UnreadDevice(3, 100)})
    for text in (str(found), str(instrument.diagnose(foreign)), instrument.diagnose(foreign).to_markdown()):
        assert "\x1b" not in text


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["diagnose", *map(str, arguments)])


def test_command(tmp_path: Path) -> None:
    """The command prints, exports, ignores and tunes; each file that cannot be read is named."""
    path = write(tmp_path / "one.json", idle_loop())
    assert "1. The loop waits" in run(path).stdout
    assert json.loads(run(path, "--json").stdout)["bound"] == "input"
    assert run(path, "--markdown").stdout.startswith("**Bound by input")
    assert "The loop waits" not in run(path, "--ignore", "input-wait").stdout
    assert "The loop waits" not in run(path, "--set", "input-wait.share=0.9").stdout
    both = run(path, tmp_path / "gone.json", "--json")
    assert (both.exit_code, len(json.loads(both.stdout))) == (1, 1)
    assert "gone.json" in both.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--json", "--markdown"], "--json, --markdown and --html exclude each other"),
        (["--ignore", "nothing"], "unknown rule 'nothing'"),
        (["--set", "input-wait.share"], "--set must be RULE.NAME=NUMBER: 'input-wait.share'"),
        (["--set", "input-wait.most=1"], "has no threshold 'most'"),
        (["--collectives", "("], "regular expression"),
        (["--collectives", ""], "regular expression that is not empty"),
        (["--set", "input-wait.share=nan"], "must be a finite number: nan"),
    ],
)
def test_wrong_options(arguments: list[str], text: str) -> None:
    """Wrong options end the command with code 2, before a file is read."""
    result = run("gone.json", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr


@pytest.mark.parametrize("command", ["diagnose", "summarize", "whatif"])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rank", "3"], "3"),
        (["--steps-from", "nothing"], "must match the name of a region: 'nothing'; the trace has no regions"),
        (["--steps-from", "("], "must be a regular expression"),
        (["--collectives", "("], "regular expression"),
    ],
)
def test_options_that_do_not_fit(command: str, arguments: list[str], text: str, tmp_path: Path) -> None:
    """An option that the trace shows to be wrong ends every command with code 2, and a message only."""
    loop = idle_loop()
    loop.rows["regions"] = []
    path = write(tmp_path / "one.json", loop)
    result = CliRunner().invoke(cli.app, [command, str(path), *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert text in " ".join(result.stderr.replace("│", " ").split())
    unread = CliRunner().invoke(cli.app, [command, str(tmp_path / "gone.json")])
    assert unread.exit_code == 1


def test_pyproject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyproject.toml silences and tunes rules, from the current folder or above; the command line adds to it."""
    path = write(tmp_path / "one.json", idle_loop())
    file = tmp_path / "pyproject.toml"
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    file.write_text("[tool.instrument.diagnose]\ninput-wait = {share = 0.9}\n")
    assert "The loop waits" not in run(path).stdout
    assert "The loop waits" in run(path, "--set", "input-wait.share=0.1").stdout
    file.write_text('[tool.instrument.diagnose]\nignore = ["input-wait"]\n')
    assert "The loop waits" not in run(path).stdout
    for wrong, text in (
        ("ignore = 3", '"ignore" in [tool.instrument.diagnose] must be a list of rules: 3'),
        ("memsets = 3", '"memsets" in [tool.instrument.diagnose] must be a table of thresholds: 3'),
        ("nothing = {}", "unknown rule 'nothing'"),
        ("= 3", f"cannot read {file}"),
    ):
        file.write_text(f"[tool.instrument.diagnose]\n{wrong}\n")
        result = run(path)
        assert result.exit_code == 2
        assert text in result.stderr


@pytest.mark.parametrize(
    ("text", "place"), [("[tool.instrument]\ndiagnose = 5", "tool.instrument.diagnose"), ("tool = 5", "tool")]
)
def test_pyproject_without_tables(text: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What should be a table of pyproject.toml and is not, is an error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(text + "\n")
    result = run("gone.json")
    assert result.exit_code == 2
    assert f"[{place}] in pyproject.toml must be a table: 5" in " ".join(result.stderr.split())


def test_ignored_rules_are_named() -> None:
    """Without findings it is said which rules were left out or changed."""
    trace = MadeLoop().trace()
    assert instrument.diagnose(trace).nothing_found == "No rule found anything worth 1 % of the step."
    found = instrument.diagnose(trace, ignore=["memsets"], thresholds={"input-wait": {"share": 0.9}})
    text = (
        "No rule found anything worth 1 % of the step; left out: memsets; thresholds were changed of: input-wait."
    )
    assert text in " ".join(str(found).split())
    assert "left out: memsets" in found.to_markdown()
    data = json.loads(found.to_json())
    assert (data["ignored"], data["thresholds"]) == (["memsets"], {"input-wait": {"share": 0.9}})


def test_ranks_as_separate_files(tmp_path: Path) -> None:
    """Files of several ranks are diagnosed apart, with a hint; a file of a rank that comes twice is named."""
    for rank in (0, 1):
        path = write(tmp_path / "job" / f"rank{rank}.json", MadeLoop())
        data = json.loads(path.read_text()) | {"distributedInfo": {"rank": rank, "world_size": 2}}
        path.write_text(json.dumps(data))
    result = run(tmp_path / "job" / "rank0.json", tmp_path / "job" / "rank1.json")
    assert "the files of ranks 0, 1 were diagnosed apart" in " ".join(result.stderr.split())
    (tmp_path / "job" / "again.json").write_bytes((tmp_path / "job" / "rank1.json").read_bytes())
    found = instrument.diagnose(tmp_path / "job")
    (path,) = map(Path, found.left_out)
    assert path.name in ("again.json", "rank1.json")
    assert "1 file left out, /" in " ".join(str(found).split())
    assert json.loads(found.to_json())["left_out"] == dict(found.left_out)


def test_a_log_of_torch_compile_is_no_trace(tmp_path: Path) -> None:
    """Given as the trace, the log of torch.compile is refused with the option that takes it."""
    log = tmp_path / "dedicated_log_torch_trace_rank_0_a.log"
    log.write_text('V1123 12:00:00.000000 77 torch/_logging/structured.py:22] {"str": ["a.py", 0]}\n')
    with pytest.raises(TraceError, match="instrument diagnose TRACE --compile-log LOG"):
        instrument.diagnose(log)


@pytest.mark.parametrize(
    "dims",
    [[1e300, 4], [-4, 4], [0, 4], [4.5, 4], ["4", 4], [True, 4], [4], [4, 4, 4], [1 << 60, 4], None, []],
)
@pytest.mark.parametrize("name", ["aten::mm", "aten::_scaled_dot_product_flash_attention", "aten::add"])
def test_impossible_shapes(name: str, dims: Any) -> None:
    """Shapes that no tensor has are unknown: no rule fails or fires on them, and the output is JSON."""
    loop = MadeLoop(steps=1, busy=False).operator(name, 0, 90, [dims] * 3, ["float"] * 3)
    found = instrument.diagnose(loop.work("k", 1, 2, 900).trace())
    assert found.failed == {}
    if name != "aten::add" or dims not in ([4], [4, 4, 4]):
        assert found.roofline.rows == []
    json.loads(found.to_json(), parse_constant=lambda text: pytest.fail(text))


def test_a_damaged_and_a_foreign_file(tmp_path: Path) -> None:
    """A file cut in the middle gives what it holds; a chrome trace of another program gives no finding."""
    whole = write(tmp_path / "whole.json", idle_loop()).read_bytes()
    (tmp_path / "cut.json").write_bytes(whole[: len(whole) // 2])
    cut = instrument.diagnose(tmp_path / "cut.json")
    assert cut.failed == {}
    (damage,) = (each for each in cut.findings if each.rule == "damaged-trace")
    assert damage.title.startswith("The file is damaged: the file ends in an event")
    foreign = {"traceEvents": [{"ph": "X", "cat": "x", "name": "f", "pid": 1, "tid": 1, "ts": 1, "dur": 5}]}
    (tmp_path / "foreign.json").write_text(json.dumps(foreign))
    found = instrument.diagnose(tmp_path / "foreign.json")
    assert (found.findings, found.bound, found.failed) == ((), None, {})


@pytest.mark.parametrize("copied", [lambda given: pickle.loads(pickle.dumps(given)), copy.deepcopy])
@pytest.mark.parametrize("trace", [SAMPLE, "idle", "communicating"])
def test_copies(trace: Path | str, copied: Callable[[Any], Any]) -> None:
    """A copy of a diagnosis, or of a comparison, says the same, and its page shows the same."""
    loop = idle_loop()
    if trace == "communicating":
        loop = MadeLoop()
        for start in (0, 1000, 2000):
            loop.work("ncclDevKernel_AllReduce_Sum_f32_RING_LL", start, start + 1, start + 900)
    given = trace if isinstance(trace, Path) else loop.trace()
    diagnosis = instrument.diagnose(given)
    other = copied(diagnosis)
    assert str(diagnosis) == str(other)
    assert diagnosis.to_json() == other.to_json()
    assert diagnosis._repr_html_() == other._repr_html_()
    change = instrument.compare(given, given)
    assert str(change) == str(copied(change))
