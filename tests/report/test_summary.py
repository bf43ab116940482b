"""The printed summary."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from instrument.read.kineto.kineto import read_kineto
from instrument.read.kineto.salvage import OTHER_TYPES
from instrument.read.measures.summary import OperatorStat, RegionStat, Summary, merge, summarize
from instrument.read.tables.trace import ReadLosses
from instrument.show.terminal.console import show
from instrument.show.terminal.summary import losses, print_summary

GPU_TRACE = Path(__file__).parent.parent / "data" / "gpu_two_steps.json"

GPU_TEXT = """\
Where the step went: CPU 1.00 ms, GPU 458 us, busy 23 % (mean of steps 5-6)
Steps 5-6, CPU: 1.00, 1.00 ms
Steps 5-6, GPU: 801, 115 us
Step 5 took 801 us on the GPU; the other took 115 us.
The CPU bounds the loop: a step took 1.00 ms on the CPU, and the GPU idled
62.2 % of the time after the first step.
"% step" is the share of the step on the CPU, "% GPU" the share of 110 us of GPU
work, where kernels that run at the same time all count.
The launches of 5.00 us of GPU work are not known; it counts toward the steps in
which it ran.
region                  calls   steps      CPU  CPU self  % step      GPU  % GPU
────────────────────────────────────────────────────────────────────────────────
forward                     1           240 us    160 us    24.0  52.8 us   48.2
  attention                 1          80.0 us   80.0 us     8.0  50.3 us   45.9
backward                  0.5  1 of 2   150 us    150 us    15.0  50.2 us   45.9
Optimizer.step…GD.step    0.5  1 of 2  50.0 us   50.0 us     5.0   450 ns    0.4
(in no region)                          560 us              56.0  6.00 us    5.5
Outside the steps: 200 us in all, and 4.00 us of GPU work.
"1 of 2": the region ran in 1 of the 2 steps. All figures are means over all
steps.
Most of the step is in no region: name parts of it with instrument.annotate. To
see the layers of a model, pass modules=model to instrument.steps or
instrument.profile, or start the program with "instrument run".

operator          calls   steps  CPU self  % step      GPU  % GPU
─────────────────────────────────────────────────────────────────
aten::mm            1.5           50.0 us     5.0   101 us   91.8
MmBackward0         0.5  1 of 2   55.0 us     5.5        0    0.0
aten::copy_         0.5  1 of 2   10.0 us     1.0  3.50 us    3.2
aten::relu          0.5  1 of 2   10.0 us     1.0  2.50 us    2.3
aten::empty         0.5  1 of 2         0     0.0        0    0.0
(in no operator)                                   2.95 us    2.7

Files
  runs/bert/1.json
  runs/bert/2.json
Open one with
  Perfetto     https://ui.perfetto.dev, "Open trace file"
  Chrome       chrome://tracing, Load
  TensorBoard  tensorboard --logdir runs
               (pip install torch-tb-profiler)
"""


def rendered(
    summary: Summary, files: list[Path] | None = None, width: int = 80, folder: Path = Path("runs")
) -> str:
    out = StringIO()
    print_summary(summary, files=files or [], folder=folder, console=Console(file=out, width=width))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def cpu_summary(*regions: RegionStat, operators: tuple[OperatorStat, ...] = ()) -> Summary:
    return Summary(1, 1_000_000, regions, operators, None, None)


def cpu_region(*path: str, ns: int = 1_000) -> RegionStat:
    return RegionStat(path, 1, ns, ns, None)


def test_gpu_trace() -> None:
    """The whole text of a small trace is as expected."""
    assert (
        rendered(summarize(read_kineto(GPU_TRACE)), [Path("runs/bert/1.json"), Path("runs/bert/2.json")])
        == GPU_TEXT
    )


def test_cpu_trace() -> None:
    """Without a GPU, a bar replaces its columns; the largest children come first."""
    text = rendered(
        cpu_summary(
            cpu_region("a", ns=100_000),
            cpu_region("b", ns=500_000),
            cpu_region("b", "x", ns=100),
            cpu_region("b", "y", ns=200_000),
        )
    )
    expected = """\
b           1  500 us    500 us    50.0  ####
  y         1  200 us    200 us    20.0  ##
  x         1  100 ns    100 ns     0.0
a           1  100 us    100 us    10.0  #
"""
    assert expected in text
    assert "GPU" not in text


def test_calls_in_some_steps() -> None:
    """All figures are means; a column says of regions that are not in every step in how many they are."""
    step = RegionStat(("forward",), 26, 1_000, 1_000, None, frozenset(range(13)))
    often = RegionStat(("zero_grad",), 1_200, 900, 900, None, frozenset(range(12)))
    burst = RegionStat(("evaluate",), 1_200, 800, 800, None, frozenset(range(3)))
    rare = RegionStat(("save",), 1, 700, 700, None, frozenset(range(1)))
    lines = rendered(Summary(13, 10_000, (rare, step, often, burst), (), None, None)).splitlines()
    of_regions = [line for line in lines if line[0] in "fzes" and "  " in line]
    rows = {cells[0]: cells[1:-1] for cells in (re.split(" {2,}", line) for line in of_regions)}
    assert rows == {
        "forward": ["2", "77 ns", "77 ns", "10.0"],
        "zero_grad": ["92.3", "12 of 13", "69 ns", "69 ns", "9.0"],
        "evaluate": ["92.3", "3 of 13", "62 ns", "62 ns", "8.0"],
        "save": ["0.077", "1 of 13", "54 ns", "54 ns", "7.0"],
    }
    assert '"1 of 13": the region ran in 1 of the 13 steps. All figures are means' in " ".join(lines)


@pytest.mark.parametrize("name", ["[/]", "[bold]x[/bold]", "layer[0] :smile:", "https://x.y", "'q' 1.5 None"])
def test_names_are_literal(name: str) -> None:
    """Names are printed verbatim: no markup, emoji or color."""
    out = StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system="truecolor")
    operators = (OperatorStat(name, 1, 10, None),)
    files = [Path("runs") / name]
    print_summary(
        cpu_summary(cpu_region(name), operators=operators), files=files, folder=Path("runs"), console=console
    )
    lines = out.getvalue().splitlines()
    assert sum(line.startswith(f"{name} ") for line in lines) == 2
    assert f"  {files[0]}" in lines


def test_names_stay_on_one_line() -> None:
    """Control characters in a name cannot move the cursor."""
    lines = rendered(cpu_summary(cpu_region("a\nb\x1b[2J"))).splitlines()
    assert lines[-1].startswith(r"a\nb\x1b[2J ")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_long_names_are_shortened(width: int) -> None:
    """Long names keep their start and end; numbers are never cut."""
    name = "autograd::engine::evaluate_function: " + "x" * 100 + "AccumulateGrad0"
    operators = (OperatorStat(name, 123, 4_560_000, None),)
    text = rendered(cpu_summary(operators=operators), width=width)
    line = next(line for line in text.splitlines() if "…" in line)
    assert line.startswith("autogra")
    assert line.split()[-5:] == ["123", "4.56", "ms", "456.0", "########"]
    assert "Grad0" in line if width >= 80 else "d0" in line
    assert len(line) <= max(width, 60)


def test_deep_trees_keep_their_names() -> None:
    """A deep tree leaves room for its names."""
    stats = [cpu_region(*["recurse"] * depth) for depth in range(1, 30)]
    lines = [line for line in rendered(cpu_summary(*stats)).splitlines() if "recurse" in line]
    assert len(lines) == 29
    assert max(map(len, lines)) <= 80


def test_long_trees_are_cut() -> None:
    """The largest regions are shown with their parents, and the rest is counted."""
    small = [cpu_region(f"small {a}{b}", ns=10 + i) for i, (a, b) in enumerate(product("abcdefghij", repeat=2))]
    text = rendered(cpu_summary(*small, cpu_region("p", ns=1), cpu_region("p", "child", ns=5_000)))
    assert "\np " in text
    assert "\n  child " in text
    assert "small jj " in text
    assert "small ha " not in text
    assert "... and 71 smaller regions" in text


def test_operators_are_cut() -> None:
    """The first ten operators are shown."""
    operators = tuple(OperatorStat(f"aten::op{i}", 1, 100 - i, None) for i in range(13))
    text = rendered(cpu_summary(operators=operators))
    assert "aten::op9 " in text
    assert "aten::op10" not in text
    assert "... and 3 more operators" in text


def test_mostly_in_no_region() -> None:
    """The summary says how to see more; models are named only if their layers are no regions."""
    some = replace(cpu_summary(cpu_region("a", ns=1)), no_region_ns=999_999)
    assert "modules=model" in rendered(some)
    layers = replace(cpu_summary(cpu_region("Net (backward)", ns=1)), no_region_ns=999_999)
    text = rendered(layers)
    assert "Most of the step is in no region" in text
    assert "modules=model" not in text
    assert "Most of" not in rendered(replace(some, no_region_ns=400_000))


def test_no_regions() -> None:
    """Without regions, the report mentions annotations."""
    assert "No regions: name parts of the step with instrument.annotate" in rendered(cpu_summary())


@pytest.mark.parametrize(("overlap_ns", "explained"), [(10, False), (11, True)])
def test_overlapping_regions(overlap_ns: int, explained: bool) -> None:
    """Shares above 100 % are explained."""
    summary = Summary(1, 1_000, (cpu_region("task", ns=30_000),), (), None, None, overlap_ns=overlap_ns)
    text = " ".join(rendered(summary).split())
    assert (
        "Regions of one thread overlap, as the regions of asyncio tasks do: every open region" in text
    ) == explained


def test_a_thread_that_works_beside_the_loop(tmp_path: Path) -> None:
    """Its regions have shares of their own, so that all add up to more than 100 %, which is explained."""
    ranges = [("ProfilerStep#3", 1, 0, 100), ("loop", 1, 10, 80), ("inner", 1, 20, 50), ("load", 2, 40, 60)]
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": thread, "ts": start, "dur": length}
        for name, thread, start, length in ranges
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    summary = summarize(read_kineto(tmp_path / "trace.json"))
    said = "Regions of several threads run at the same time: every open region counts"
    assert said in " ".join(rendered(summary).split())
    assert (50_000, 100_000) == (summary.parallel_ns, merge([summary, summary]).parallel_ns)
    assert said not in " ".join(rendered(summarize(read_kineto(GPU_TRACE))).split())


def test_no_steps() -> None:
    """Without marked steps, totals are shown."""
    summary = Summary(0, 2_500_000_000, (RegionStat(("a",), 4, 1_250_000_000, 0, None),), (), None, None)
    text = rendered(summary)
    assert "Where the time went: 2.50 s (no steps marked)" in text
    assert "% time" in text
    assert text.splitlines()[-1].split() == ["a", "4", "1.25", "s", "0", "50.0", "####"]


def test_empty_summary() -> None:
    """An empty summary is printed."""
    assert rendered(Summary(0, 0, (), (), None, None)).startswith("Where the time went: 0 (no steps marked)\n")


def test_file_names(tmp_path: Path) -> None:
    """Paths are neither wrapped nor shortened; further files are counted."""
    files = [tmp_path / ("long name " * 10).strip() / f"{i}.json" for i in range(12)]
    text = rendered(cpu_summary(), files, folder=Path("my runs"))
    assert f"  {files[9]}\n" in text
    assert "... and 2 more in my runs" in text
    assert "--logdir 'my runs'" in text


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (1, "1 ns"),
        (999, "999 ns"),
        (1_000, "1.00 us"),
        (9_999, "10.0 us"),
        (99_960, "100 us"),
        (999_600, "1.00 ms"),
        (12_345_678, "12.3 ms"),
        (61_000_000_000, "61.0 s"),
        (3_600_000_000_000, "3600 s"),
    ],
)
def test_units(ns: int, text: str) -> None:
    """Durations have three digits and a suitable unit."""
    assert f"Where the step went: {text} (1 step)\n" in rendered(Summary(1, ns, (), (), None, None))


def test_ascii() -> None:
    """A console with ASCII encoding gets no line-drawing characters."""

    class Ascii(StringIO):
        encoding = "ascii"

    out = Ascii()
    print_summary(
        summarize(read_kineto(GPU_TRACE)), files=[], folder=Path("runs"), console=Console(file=out, width=80)
    )
    assert out.getvalue().isascii()


@pytest.mark.parametrize(
    ("count", "end"),
    [
        (10, "layers.8, layers.9"),
        (11, "layers.9 and 1 more, see manifest.jsonl"),
        (12, "layers.9 and 2 more, see manifest.jsonl"),
    ],
)
def test_hidden_regions_are_cut_after_ten(count: int, end: str) -> None:
    """Ten names of regions inside compiled code are listed; the others are counted."""
    out = StringIO()
    names = [f"layers.{i}" for i in range(count)]
    console = Console(file=out, width=200)
    print_summary(cpu_summary(cpu_region("a")), files=[], folder=Path("runs"), hidden=names, console=console)
    (line,) = [line for line in out.getvalue().splitlines() if "compiled" in line]
    assert line.rstrip().endswith(end)


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ({OTHER_TYPES: 3}, "The file differs from what torch.profiler writes, but all of it was read: "),
        ({OTHER_TYPES: 3, "invalid UTF-8": 1}, "The file is damaged: "),
    ],
)
def test_file_with_other_types_is_not_damaged(reasons: dict[str, int], expected: str) -> None:
    """A file that was read completely, for example with times as text, is not called damaged."""
    out = StringIO()
    show(Console(file=out, width=200), losses(ReadLosses(repaired=3, reasons=reasons)))
    assert out.getvalue().startswith(f"\n{expected}values of another type (3 times)")
    assert ("damaged" in out.getvalue()) is ("lost" in out.getvalue())
