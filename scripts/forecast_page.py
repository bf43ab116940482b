"""Writes docs/forecast.md: how a forecast is made, and every error of it.

``python -m scripts.forecast_page FOLDER TRACES`` compares with the measured steps in FOLDER and the traces in
TRACES, as scripts/efficiency_table.py reads them. Each model and trace is left out of the table that forecasts it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from instrument.forecast.gpus import GPUS
from instrument.forecast.links import LINKS
from instrument.forecast.table import Table, packaged_table

if TYPE_CHECKING:
    from .forecast.truth import Check, ParallelCheck, TraceCheck

PAGE = Path(__file__).parent.parent / "docs" / "forecast.md"
_HEAD = """# Forecast

How long a training step takes on a GPU that is not there: each operator of a [dry run](dry-run.md) gets a time,
and a step is what one CPU and one GPU need for them in their order. A forecast always comes with its error, which
this page measures.

```
$ instrument forecast --gpu h100,a100,mi300x -- train.py --batch-size 4
gpu             step  range                   bound by  memory
h100          556 ms  480 ms to 674 ms        GPU       35.0 GB of 84.9 GB
a100          1.50 s  1.28 s to 1.86 s        GPU       35.0 GB of 85.0 GB
mi300x        181 ms  127 ms to 416 ms        GPU       35.0 GB of 206 GB         bound, not forecast

h100: GPU 556 ms, CPU 24.0 ms to launch
  checked on 12 measured FP32 steps of other models: mean error 4%, worst 14%
  7.8 % of the GPU time is a bound, not forecast
  family matmul                   427 ms  76.8 %
  family element-wise            72.7 ms  13.1 %
...
```

This is a GPT-2 large in FP32 with 4 x 1,024 tokens. The script runs without data, so that no weights are
allocated; `--steps 1` is enough for a script whose first step is like the others. Below, the command says how
often the CPU waits for the GPU, and lists the parts of the GPU time by region and by family of operators.

## The time of an operator

`operator_time(operation, gpu, table)` gives nanoseconds, an error and how they were found:

- **measured**: the table has an operator of these sizes.
- **interpolated**: the efficiency of the four measured operators of the same family that are nearest in their
  sizes. Efficiency is the time on an ideal GPU, at its peaks, divided by the measured time. A matmul's ideal time
  counts tiles and waves: the grid of blocks that its kernel has, on so many multiprocessors, times the loop over
  the sums. A family or size that was only measured on other GPUs is as efficient as there; the H200 and the A100
  of 40 GB are as efficient as the H100 and the A100 of 80 GB, with twice the error.
- **bound**: nothing comparable was measured, so the time is a lower limit: the roofline of the data sheet. The
  step says how much of its time is such a limit.

Operators that only move bytes take the same time for the same bytes, whatever their type. FP32 is without TF32.

## The time of a step

The CPU launches operator after operator and runs ahead of the GPU, which computes one after the other. A step ends
when both are done. On some GPUs, whole steps were measured to take longer than their operators alone, for reasons
that the measurements do not show: on the A100 the forward passes of four of six steps ran at two thirds of the
speed that the same operators had alone, and at full speed in the others. There, the times of operators in FP32, in
which all these steps ran, are multiplied by the mean.

The range is twice the mean error to both sides: that of each family, weighted by its share of the step and added
up in squares, and that of whole steps on this GPU. For the share of a step that is unlike the measured ones, such
as BF16, the latter is taken to be 15 %.

Where launching takes longer than the GPU's work, the range is at least 50 % of the CPU's time to both sides: 10 us
a launch, taken from traces, which a profiler slows down.

What is not in it: copies between the CPU and the GPU, the host's data loading, and clocks that fall when the GPU
is hot.

## Several GPUs

With `--gpus 4` the script runs as rank 0 of 4, as torchrun starts it, but alone: `init_process_group` gives it a
process group that sends nothing. What DistributedDataParallel, FSDP2, tensor parallelism or the script itself
would send is counted, with its bytes and its group.

```
$ instrument forecast --gpu h100,l4 --gpus 4 -- train_ddp.py
gpu             step  range                   bound by  memory
4 x h100     2.65 ms  2.18 ms to 3.44 ms      GPU       823 MB of 84.9 GB
4 x l4       22.3 ms  20.1 ms to 30.7 ms      GPU       823 MB of 23.7 GB

h100: GPU 2.32 ms, CPU 1.19 ms to launch
  communication over NVLink: 687 us, of which 308 us exposed and 379 us hidden; not measured
...
```

Collectives run one after the other on a timeline of their own, beside the streams of the GPU. Each begins when
the stream that launches it has come to it, and holds up the stream that waits for it: with FSDP2, where its
streams and events say so; with DistributedDataParallel, at the end of the backward pass. What lengthens the step
is *exposed*, the rest is hidden. That kernels of NCCL take multiprocessors and memory bandwidth from the others
is not in it.

A script for one GPU needs `--parallel`, and the output says what was assumed:

- `dp`: the gradients are copied to buckets of 25 MB as the backward pass completes them, each bucket is
  reduced, and copied back. The buckets take as much memory as the gradients.
- `fsdp`: of the modules that are members of a `ModuleList`, `ModuleDict` or `Sequential` and have modules of their
  own, those of the repeated class that holds the most parameters are sharded, and the rest of the model.
  Parameters are gathered before the forward and the backward pass of a block, one block ahead; gradients are
  reduced and scattered behind it. A GPU keeps its share of parameters, gradients and optimizer state.

The time of a collective is that of a ring: its latency, and its bytes at the rate of the link, with the protocol
that is best for its size. The constants are those by which NCCL itself chooses
([topo.h](https://github.com/NVIDIA/nccl/blob/master/src/graph/topo.h),
[tuning.cc](https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc)) and, for MI300X, RCCL's in the same
files; the number of links is that of the data sheets. NVLink SHARP, which reduces in the switches of H100
machines, is not in it.

| GPU | link | GB/s in a ring |
|---|---|---:|
@LINKS@
Exposed communication counts twice at the upper end of the range, as only the six steps below were measured.

## The largest batch

```
$ instrument forecast --gpu h100,a100-40,l4 --batch batch-size -- train.py --batch-size 4
gpu             step  range                   bound by  memory                  batch
h100         36.4 ms  32.2 ms to 40.7 ms      GPU       2.72 GB of 84.9 GB      475
a100-40       110 ms  81.3 ms to 139 ms       GPU       2.72 GB of 42.3 GB      213
l4            193 ms  161 ms to 226 ms        GPU       2.72 GB of 23.7 GB      114
...
```

`--batch` names the option with which the script takes its batch, `batch-size`, or `batch_size=`. The script runs
again with other values of it: two runs tell how each allocation grows, so that the allocator can be tried with
any batch, and two more confirm the largest one, which fits, and the next, which does not. There are 14 runs at
most for all GPUs together, in silence. Where they take longer than half a minute, the command says so before.

The memory of a GPU is what its driver reports, less 512 MiB for the CUDA context and its libraries. Whether a
batch fits is what torch's allocator would say with its default settings: pieces that are free but too small do
not count. With `--parallel`, the script's own allocations are replayed against a limit that is moved
by the assumed peak minus the recorded one.

## A table of your own

On a machine with a GPU of the list, `instrument calibrate table.json.gz` measures about 370 operators in FP32 and
BF16 in two minutes at most, and `instrument forecast --table table.json.gz` uses them. It has no whole steps, so
that the range of its forecasts takes 15 % for their error. Nothing else may use the GPU meanwhile.

<!-- Made by python -m scripts.forecast_page; tests/forecast/test_page.py compares the table of operators. -->
"""


def operators_section(table: Table) -> str:
    """Return the section with the error of each family on each GPU."""
    lines = [
        "## Errors of operators",
        "",
        "The mean error of operators that are left out of the table, one at a time. The last row: families that",
        "were not measured on a GPU, if the other GPUs stand for it.",
        "",
        "| GPU | type | family | measured | mean error |",
        "|---|---|---|---:|---:|",
    ]
    for gpu in GPUS:
        if gpu not in table.gpus:
            like = GPUS[gpu].like
            said = f"the efficiency of {like}" if like else "bound, not forecast"
            lines.append(f"| {gpu} | | {said} | 0 | |")
            continue
        for (family, kind), measured in sorted(table.gpus[gpu].families.items()):
            lines.append(f"| {gpu} | {kind} | {family} | {len(measured):,} | {measured.error:.1%} |")
        for kind, kernels in table.gpus[gpu].kernels.items():
            lines.append(
                f"| {gpu} | {kind} | matmul, by tiles | {len(kernels.tiles)} tiles | {kernels.error:.1%} |"
            )
    borrowed = ", ".join(f"{family} {error:.0%}" for family, error in sorted(table.borrowed.items()))
    lines += [f"| others | any | {borrowed} | | |", "", f"Measured by: {table.source}.", ""]
    return "\n".join(lines)


def links_table() -> str:
    """Return the rows of the links between GPUs."""
    rows = []
    for name, link in LINKS.items():
        rate = f"{link.bytes_per_s / 1e9:.0f}" + " for each other GPU" * link.is_per_peer
        rows.append(f"| {name} | {link.name} | {rate} |")
    return "\n".join([*rows, ""])


def steps_section(then: list[Check], today: list[Check]) -> str:
    """Return the section with every measured step."""
    lines = [
        "## Errors of steps",
        "",
        "Forward and backward pass of models whose operators and steps are left out of the table; `inf` is",
        "a forward pass alone. The programs are plain ones of transformers, without an optimizer. *As measured*:",
        "attention with the operators of the transformers of that time. *Today*: with those of the installed one,",
        "which computes less in OPT's attention, so that the difference is in part a real one.",
        "",
        "| GPU | model | length x batch | kind | measured ms | as measured | range | today |",
        "|---|---|---|---|---:|---:|---|---:|",
    ]
    order = list(GPUS)
    pairs = sorted(
        zip(then, today, strict=True), key=lambda pair: (order.index(pair[0].step.gpu), pair[0].step.kind)
    )
    for check, now in pairs:
        step, ns = check.step, check.forecast
        span = f"{ns.least_ns / 1e6:.0f} to {ns.most_ns / 1e6:.0f}{'' if check.in_range else ' (missed)'}"
        lines.append(
            f"| {step.gpu} | {step.model} | {step.sequence} x {step.batch} | {step.kind} | {step.ms:.1f} "
            f"| {check.error:+.1%} | {span} | {now.error:+.1%} |"
        )
    lines += ["", "| GPU | kind | steps | mean error | worst | in range | mean today | worst today |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|", *_summary(pairs), ""]
    return "\n".join(lines)


def _summary(pairs: list[tuple[Check, Check]]) -> Iterator[str]:
    for (gpu, kind), group in groupby(pairs, key=lambda pair: (pair[0].step.gpu, pair[0].step.kind)):
        yield _summary_row(gpu, kind, list(group))
    training = [pair for pair in pairs if pair[0].step.kind == "train" and pair[0].step.gpu in ("h100", "a100")]
    yield _summary_row("h100 and a100", "train", training)
    yield _summary_row("all", "all", pairs)


def _summary_row(gpu: str, kind: str, pairs: list[tuple[Check, Check]]) -> str:
    then, today = ([abs(check.error) for check in column] for column in zip(*pairs, strict=True))
    hits = sum(check.in_range for check, _ in pairs)
    return (
        f"| {gpu} | {kind} | {len(pairs)} | {mean(then):.1%} | {max(then):.1%} | {hits} "
        f"| {mean(today):.1%} | {max(today):.1%} |"
    )


def parallel_section(found: Iterable[ParallelCheck]) -> str:
    """Return the section with the measured steps on four GPUs."""
    lines = [
        "## Four GPUs",
        "",
        "Data parallelism and pipelines are forecast from the program of one GPU. Data parallelism: each GPU's",
        "share of the batch, and the gradients reduced after it, as Megatron-LM does by default, which was",
        "measured. *Hidden*: in buckets during the backward pass, as DistributedDataParallel does, which is",
        "further off here. A pipeline with one micro-batch: the whole batch on one GPU after the other. Tensor",
        "parallelism: a plain script with torch's `parallelize_module`, run as one of four ranks.",
        "",
        "| GPUs | model | length x batch | parallel | measured ms | error | hidden |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    checks = list(found)
    for check in checks:
        step = check.step
        hidden = "" if check.hidden_error is None else f"{check.hidden_error:+.1%}"
        lines.append(
            f"| 4 x {step.gpu} | {step.model} | {step.sequence} x {step.batch} | {step.parallel} | {step.ms:.1f} "
            f"| {check.error:+.1%} | {hidden} |"
        )
    average = mean(abs(check.error) for check in checks)
    return "\n".join([*lines, f"| mean | | | | | {average:.1%} | |", ""])


def traces_section(found: list[TraceCheck]) -> str:
    """Return the section with the traces in BF16."""
    lines = [
        "## Errors in BF16",
        "",
        "Traces of inference on an H100, each left out of the table: the GPU time of all operators with recorded",
        "shapes, without copies from and to the CPU. The last column adds up what each operator is off, without",
        "regard to its sign. Three traces are few: another model in BF16 can well be further off. FP16 was not",
        "measured and is forecast as BF16, which runs at the same rate.",
        "",
        "| trace | measured ms | error | by operator |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {each.name} | {each.measured_ns / 1e6:.2f} | {each.error:+.1%} | {each.off:.1%} |" for each in found
    ]
    average = mean(abs(check.error) for check in found)
    lines.append(f"| mean | | {average:.1%} | {mean(check.off for check in found):.1%} |")
    return "\n".join([*lines, ""])


def main(folder: Path, traces: Path) -> None:
    """Write the page."""
    from .forecast.truth import checks, parallel_checks, trace_checks  # needs transformers; the sections do not

    then, today = checks(folder, traces, today=False), checks(folder, traces, today=True)
    sections = [
        steps_section(then, today),
        parallel_section(parallel_checks(folder, traces)),
        traces_section(trace_checks(folder, traces)),
        operators_section(packaged_table()),
    ]
    PAGE.write_text("\n".join([_HEAD.replace("@LINKS@", links_table()), *sections]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
