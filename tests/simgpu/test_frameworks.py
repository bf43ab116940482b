"""Frameworks train on the simulated GPU: each by its script under integrations/, with one line of this library.

The simulator's log says what the GPU did; the script without this library says what it has to do.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.read.kineto.insert_events import gpu_lanes
from tests import simgpu
from tests.simgpu.programs import ROOT, environment
from tests.simgpu.ranks import Rank, run_command
from tests.simgpu.works import read_logs, works

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.framework,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]
ROUNDING_NS = 2  # Kineto reads the TSC, and converts both ends of each work

RegionPath = tuple[str, ...]  # the names of the regions around a region, and its own


@dataclass(frozen=True)
class Framework:
    """A framework, and what its script does."""

    script: str
    """Its path under integrations/."""
    package: str
    losses: int
    """How many losses, or lists of tokens, it prints."""
    steps: tuple[int, int]
    """The first and the last step that it records."""
    regions: str
    """Regions of the window, with their numbers of calls, indented by nesting: all of them launch work."""
    arguments: tuple[str, ...] = ()
    gpus: int = 1
    """How many ranks train, each on a GPU of its own."""
    ends: str | None = None
    """Why the window has less than it should."""
    values: bool = True
    """Whether kernels compute: those that Triton compiles do not."""
    variables: Mapping[str, str] = field(default_factory=dict)


FRAMEWORKS = {
    "transformers": Framework(
        "transformers/train.py",
        "transformers",
        losses=8,
        steps=(2, 4),
        regions="""
3 step
  6 micro-step
    6 forward
      6 GPT2LMHeadModel
        6 GPT2Model
          12 GPT2Block
    6 backward
      6 GPT2LMHeadModel (backward)
        6 GPT2Model (backward)
          12 GPT2Block (backward)
  3 clip_grad_norm_
  3 Optimizer.step#AdamW.step
1 evaluation
  1 forward
    1 GPT2LMHeadModel
1 checkpoint
""",
    ),
    "accelerate": Framework(
        "accelerate/train.py",
        "accelerate",
        losses=12,
        steps=(2, 4),
        regions="""
6 micro-step
  6 GPT2LMHeadModel
    6 GPT2Model
      12 GPT2Block
  6 backward
    6 GPT2LMHeadModel (backward)
      6 GPT2Model (backward)
        12 GPT2Block (backward)
  3 clip_grad_norm_
  3 Optimizer.step#AdamW.step
1 checkpoint
""",
    ),
    "lightning": Framework(
        "lightning/train.py",
        "lightning",
        losses=12,
        steps=(3, 4),
        regions="""
2 step
  4 micro-step
    2 forward
      2 Sequential
      2 Linear
    2 backward
      2 Sequential (backward)
      2 Linear (backward)
    2 Optimizer.step#AdamW.step
      2 forward
        2 Sequential
      2 backward
        2 Sequential (backward)
1 evaluation
  2 Sequential
1 checkpoint
""",
    ),
    "deepspeed": Framework(
        "deepspeed/train.py",
        "deepspeed",
        losses=12,
        steps=(2, 3),
        regions="""
2 step
  4 micro-step
    4 forward
      4 Sequential
    4 DeepSpeedEngine.backward
      4 backward
        4 Sequential (backward)
      4 DeepSpeedEngine.allreduce_gradients
  2 Optimizer.step#AdamW.step
""",
    ),
    "torchtitan": Framework(
        "torchtitan/train.py",
        "torchtitan",
        losses=6,
        steps=(3, 4),
        regions="""
2 step
  4 micro-step
    4 FSDPLlama3Model
      8 FSDPCheckpointWrapper
        8 Llama3TransformerBlock
    4 backward
      4 FSDPLlama3Model (backward)
        8 FSDPCheckpointWrapper (backward)
  2 Optimizer.step#OptimizersContainer.step
    2 Optimizer.step#AdamW.step
""",
    ),
    "megatron": Framework(
        "megatron/train.py",
        "megatron.core",
        losses=6,
        steps=(2, 3),
        regions="""
4 forward
  4 data
  4 GPTModel
    4 TransformerBlock
      8 TransformerLayer
4 backward
  4 GPTModel (backward)
    4 TransformerBlock (backward)
      8 TransformerLayer (backward)
2 optimizer
  2 Optimizer.step#AdamW.step
""",
    ),
    "transformers on 2 GPUs": Framework(
        "transformers/train.py",
        "transformers",
        losses=8,
        steps=(2, 4),
        gpus=2,
        regions="""
3 step
  6 micro-step
    6 forward
      6 DistributedDataParallel.forward
        6 GPT2LMHeadModel
    6 backward
      6 GPT2LMHeadModel (backward)
        6 GPT2Model (backward)
          12 Embedding (backward)
            6 nccl:all_reduce
  3 clip_grad_norm_
  3 Optimizer.step#AdamW.step
1 evaluation
  2 all_gather_into_tensor
""",
    ),
    "lightning on 2 GPUs": Framework(
        "lightning/train.py",
        "lightning",
        losses=6,
        steps=(3, 3),
        ends="the loop ended before step 4",
        gpus=2,
        arguments=("--strategy", "ddp"),
        regions="""
1 step
  1 micro-step
    1 Optimizer.step#AdamW.step
      1 forward
        1 DistributedDataParallel.forward
      1 backward
""",
    ),
    "deepspeed, ZeRO 3 on 2 GPUs": Framework(
        "deepspeed/train.py",
        "deepspeed",
        losses=24,
        steps=(2, 3),
        gpus=2,
        arguments=("--stage", "3"),
        regions="""
2 step
  4 micro-step
    4 forward
      4 Sequential
    4 DeepSpeedEngine.backward
      4 backward
        4 Sequential (backward)
      4 DeepSpeedEngine.allreduce_gradients
  2 DeepSpeedZeroOptimizer_Stage3.step
    2 Optimizer.step#AdamW.step
    2 DeepSpeedZeroOptimizer_Stage3._post_step
      2 Init._all_gather
""",
    ),
    "torchtitan, FSDP on 2 GPUs": Framework(
        "torchtitan/train.py",
        "torchtitan",
        losses=12,
        steps=(3, 4),
        gpus=2,
        regions="""
2 step
  2 FSDPLlama3Model
    2 FSDPEmbedding
      2 FSDP::pre_forward (tok_embeddings)
    4 FSDPCheckpointWrapper
      4 Llama3TransformerBlock
  2 backward
    2 FSDPLlama3Model (backward)
      4 FSDPCheckpointWrapper (backward)
    2 FSDP::root_post_backward_callback
  2 Optimizer.step#OptimizersContainer.step
""",
    ),
    "megatron, a pipeline on 2 GPUs": Framework(
        "megatron/train.py",
        "megatron.core",
        losses=6,
        steps=(2, 3),
        gpus=2,
        arguments=("--pipeline", "2"),
        regions="""
4 forward
  4 GPTModel
    4 TransformerBlock
      8 TransformerLayer
4 backward
  4 GPTModel (backward)
    4 TransformerBlock (backward)
      8 TransformerLayer (backward)
2 optimizer
  2 all_reduce
    2 nccl:all_reduce
  2 Optimizer.step#AdamW.step
""",
    ),
    "vllm": Framework(
        "vllm/serve.py",
        "vllm",
        losses=3,
        steps=(8, 13),
        regions="""
1 prefill
5 decode
6 sampling
""",
        values=False,
        variables={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the steps of two requests are always the same
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # whose kernels count the tokens, and without values would never end
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_NO_USAGE_STATS": "1",
        },
    ),
}  # fmt: skip


def installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    parent = package.rpartition(".")[0]
    return (not parent or installed(parent)) and importlib.util.find_spec(package) is not None


def needs(name: str, package: str) -> Any:
    reason = f"{package} is not installed: docs/simulated-gpu.md says how"
    return pytest.param(name, marks=pytest.mark.skipif(not installed(package), reason=reason))


EACH = pytest.mark.parametrize("name", [needs(name, each.package) for name, each in FRAMEWORKS.items()])


@dataclass(frozen=True)
class Run:
    """The result of a script: what its ranks printed, and the simulator's log."""

    ranks: list[Rank]
    log: list[simgpu.Entry]
    out: Path

    @property
    def returncodes(self) -> list[int]:
        return [rank.returncode for rank in self.ranks]

    @property
    def stderr(self) -> str:
        return "".join(rank.stderr for rank in self.ranks)

    @property
    def losses(self) -> list[str]:
        return [
            loss
            for rank in self.ranks
            for loss in re.findall(r"0x1\.\w+p[+-]\d+|(?<=loss )\d+\.\d+|(?<=tokens )\[.+", rank.stdout)
        ]

    def works(self, rank: int) -> list[simgpu.Entry]:
        """Return what ran on the GPU of a rank."""
        return [entry for entry in self.log if entry.device == rank and not entry.returned]


def train(name: str, folder: Path, **variables: str) -> Run:
    """Run the script of a framework."""
    framework, out = FRAMEWORKS[name], folder / "out"
    script = ROOT / "integrations" / framework.script
    command = [sys.executable, str(script), "--out", str(out), *framework.arguments]
    settings = environment(devices=framework.gpus, numerics=int(framework.values), log=folder / "log-%p")
    settings |= {"INSTRUMENT_STRICT": "1", **framework.variables, **variables}
    return Run(run_command(command, framework.gpus, settings, 150), read_logs(folder), out)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that runs the script of a framework; it runs each script once."""
    return cache(lambda name: train(name, tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def traces(run: Any) -> Any:
    """Return a function that reads the traces of a framework's window, by rank."""
    return cache(lambda name: dict(instrument.read_traces(run(name).out)))


@EACH
def test_training_is_the_same(name: str, run: Any, tmp_path: Path) -> None:
    """The losses, the exit code and what each stream of the GPU runs are those of the script alone."""
    framework = FRAMEWORKS[name]
    expected = train(name, tmp_path, INSTRUMENT="0")
    assert expected.returncodes == [0] * framework.gpus, expected.stderr
    assert len(expected.losses) == framework.losses
    assert (len(set(expected.losses)) > 1) == framework.values
    assert not expected.out.exists()
    assert all(len(expected.works(rank)) > 100 for rank in range(framework.gpus))

    found = run(name)

    assert (found.returncodes, found.losses) == (expected.returncodes, expected.losses), found.stderr
    assert works(found.log) == works(expected.log)


@EACH
def test_the_steps(name: str, run: Any, traces: Any) -> None:
    """The window of each rank has the steps that were asked for, by the framework's numbers."""
    framework = FRAMEWORKS[name]
    lines = (run(name).out / "manifest.jsonl").read_text().splitlines()
    status = "partial" if framework.ends else "recorded"
    assert [(status, list(framework.steps), framework.ends)] * framework.gpus == [
        (window["status"], window["steps"], window["reason"]) for window in map(json.loads, lines)
    ]
    first, last = framework.steps
    assert list(range(framework.gpus)) == sorted(traces(name))
    for trace in traces(name).values():
        assert [f"ProfilerStep#{number}" for number in range(first, last + 1)] == trace.steps.text("name")


def outline(text: str) -> dict[RegionPath, int]:
    """Return the numbers of calls of an outline by the paths of the regions."""
    found: dict[RegionPath, int] = {}
    path: list[str] = []
    for line in text.strip().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        calls, _, region = line.strip().partition(" ")
        path[depth:] = [region]
        found[tuple(path)] = int(calls)
    return found


def paths(trace: instrument.Trace) -> list[RegionPath]:
    """Return the path of each region."""
    names, found = trace.regions.text("name"), []
    for row in range(len(names)):
        path: list[str] = []
        while row >= 0:
            path.insert(0, names[row])
            row = int(trace.regions.parent[row])
        found.append(tuple(path))
    return found


@EACH
def test_the_regions_and_what_they_launch(name: str, run: Any, traces: Any) -> None:
    """Each region is called as often as expected, and has what the GPU's log says was launched meanwhile."""
    expected = outline(FRAMEWORKS[name].regions)
    for rank, trace in traces(name).items():
        found = paths(trace)
        calls = Counter(found)
        assert expected == {path: calls[path] for path in expected}

        region_of = dict(zip(trace.gpu.correlation.tolist(), trace.gpu.region.tolist(), strict=True))
        starts, ends = trace.regions.start_ns + trace.epoch_ns, trace.regions.end_ns + trace.epoch_ns
        for path in expected:
            rows = [row for row, each in enumerate(found) if each == path]
            launched = {
                entry.correlation
                for entry in run(name).works(rank)
                if any(starts[row] <= entry.enqueued < ends[row] for row in rows)
            }
            attributed = {
                number for number, row in region_of.items() if row >= 0 and found[row][: len(path)] == path
            }
            assert launched == attributed != set(), (rank, path)


@EACH
def test_all_work_of_the_steps(name: str, run: Any, traces: Any) -> None:
    """The trace has each kernel, copy and fill of its steps on its stream, for as long as it took."""
    for rank, trace in traces(name).items():
        begin, end = (trace.epoch_ns + int(ns) for ns in (trace.steps.start_ns.min(), trace.steps.end_ns.max()))
        expected = {entry.correlation: entry for entry in run(name).works(rank) if begin <= entry.enqueued < end}
        gpu = {int(trace.gpu.correlation[row]): row for row in range(len(trace.gpu)) if trace.gpu.step[row] >= 0}
        assert expected.keys() == gpu.keys()
        for number, row in gpu.items():
            entry = expected[number]
            assert (entry.device, entry.stream) == (trace.gpu.device[row], trace.gpu.stream[row])
            assert abs(entry.duration - trace.gpu.duration_ns[row]) <= ROUNDING_NS


@EACH
def test_the_lanes(name: str, traces: Any) -> None:
    """The lanes of regions on the GPU's streams show each region around the work that it launched."""
    for trace in traces(name).values():
        lanes, found = gpu_lanes(trace), paths(trace)
        assert not any(lane.left_out for lane in lanes)
        shown: Counter[str] = Counter()
        for span in (span for lane in lanes for row in lane.rows for span in row):
            shown[span.name] += span.operations
        launched = Counter(name for row in trace.gpu.region.tolist() if row >= 0 for name in found[row])
        names = {path[-1] for path in outline(FRAMEWORKS[name].regions)}
        assert {name: shown[name] for name in names} == {name: launched[name] for name in names}
