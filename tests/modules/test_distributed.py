"""Distributed models: two gloo ranks under torchrun, on the CPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.torch_versions import shards_on_cpu

ROOT = Path(__file__).parents[2]

JOB = """
import contextlib, json, os, pathlib, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
import instrument
from instrument.base.config import settings
from instrument.record.modules.installer import installer
from instrument.record.regions import dispatch
from tests.modules.conftest import RecordingEmitter
from tests.support.torch_versions import shards_on_cpu

settings.strict = True
dist.init_process_group("gloo")
rank = dist.get_rank()
results = {}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)
    def forward(self, x):
        return x + self.act(self.lin(x))

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Block(), Block()
    def forward(self, x):
        return self.b(self.a(x))

class Spare(Whole):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(8, 8)

def batch(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))

def hooks(model):
    return [
        [[repr(hook) for hook in module._forward_pre_hooks.values()],
         [repr(hook) for hook in module._forward_hooks.values()], sorted(vars(module))]
        for module in model.modules()
    ]

def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value

def numbers(losses, model):
    gradients = [None if p.grad is None else full(p.grad).clone() for p in model.parameters()]
    return losses + gradients + [full(p.detach()).clone() for p in model.parameters()]

def same(one, other):
    return len(one) == len(other) and all(
        (x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in zip(one, other))

@contextlib.contextmanager
def attach_emitter():
    emitter = RecordingEmitter()
    dispatch.active._attached.append(emitter)
    dispatch.active._refresh()
    yield emitter
    dispatch.active._attached.remove(emitter)
    dispatch.active._refresh()

def no_sync(model, step):
    losses = []
    with model.no_sync():
        losses.append(model(batch(step)).square().sum()); losses[-1].backward()
    losses.append(model(batch(step + 5)).square().sum()); losses[-1].backward()
    return [loss.detach() for loss in losses]

def plain(model, step):
    loss = model(batch(step)).square().sum(); loss.backward()
    return [loss.detach()]

def sharded(layers, **options):
    def make():
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        model = Whole()
        for layer in ((model.a, model.b) if layers else ()):
            fully_shard(layer, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)
    return make

CASES = {
    "ddp": (lambda: DDP(Whole()), plain),
    "no_sync": (lambda: DDP(Whole()), no_sync),
    "unused": (lambda: DDP(Spare(), find_unused_parameters=True), plain),
    "static": (lambda: DDP(Whole(), static_graph=True), plain),
    "views": (lambda: DDP(Whole(), gradient_as_bucket_view=True, bucket_cap_mb=0.0001), plain),
    "fsdp_root": (sharded(False), plain),
    "fsdp_layers": (sharded(True), plain),
    "fsdp_kept": (sharded(True, reshard_after_forward=False), plain),
}

if not shards_on_cpu:
    CASES = {name: case for name, case in CASES.items() if "fsdp" not in name}

def run(make, train, annotated):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, trees, clean = [], [], []
    handle = instrument.annotate_modules(model) if annotated else None
    for step in range(3):
        optimizer.zero_grad()
        with attach_emitter() if annotated and step == 1 else contextlib.nullcontext() as emitter:
            found += train(model, step)
            optimizer.step()
        if emitter is not None:
            trees.append(emitter.tree())
        found += numbers([], model)
        # torch may add hooks of its own at the first forward
        found_hooks = json.dumps(hooks(model))
        clean.append("instrument" not in found_hooks and "__getstate__" not in found_hooks)
    if annotated:
        handle.remove()
    clean.append(not installer._module_hooks and not installer._patches)
    return found, trees, clean, [len(list(m._forward_hooks) + list(m._forward_pre_hooks)) for m in model.modules()]

for name, (make, train) in CASES.items():
    expected, _, _, hooked = run(make, train, False)
    found, trees, clean, left = run(make, train, True)
    results[name] = dict(same=same(expected, found), count=len(found), tree=trees[0])
    results[name].update(clean=all(clean), left=left == hooked)

# The place of the all-gather in a real trace
def trace_sharded_model():
    torch.manual_seed(0)
    model = sharded(True)()
    model(batch(0)).sum().backward()
    with instrument.annotate_modules(model):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
            model(batch(1)).sum().backward()
        path = pathlib.Path(sys.argv[1], f"trace{rank}.json")
        prof.export_chrome_trace(str(path))
        with attach_emitter():
            state = {key: full(value) for key, value in model.state_dict().items()}
            results["keys"] = sorted(state) == sorted(Whole().state_dict())

if shards_on_cpu:
    trace_sharded_model()
pathlib.Path(sys.argv[1], f"results{rank}.json").write_text(json.dumps(results))
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo sometimes aborts at exit: "terminate called without an active exception"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of two ranks that trained several models, without and with annotation."""
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "job.py"
    script.write_text(JOB)
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    warm.run([sys.executable, script, folder], env, timeout=100, check=True, ranks=2)
    return folder


Found = Callable[[str], list[Any]]


@pytest.fixture
def found(folder: Path) -> Found:
    """Return the results of a case, one per rank."""
    results = [json.loads((folder / f"results{rank}.json").read_text()) for rank in (0, 1)]
    return lambda name: [result[name] for result in results]


sharding = pytest.mark.skipif(not shards_on_cpu, reason="this version of torch shards no model on a CPU")
DATA_PARALLEL = ["ddp", "no_sync", "unused", "static", "views"]
SHARDED = [pytest.param(name, marks=sharding) for name in ("fsdp_root", "fsdp_layers", "fsdp_kept")]


@pytest.mark.parametrize("case", [*DATA_PARALLEL, *SHARDED])
def test_numbers(found: Found, case: str) -> None:
    """Losses, gradients and weights of three steps are bit-identical on every rank, with a window on one step."""
    for result in found(case):
        assert result["count"] >= 27
        assert result["same"]


@pytest.mark.parametrize("case", [*DATA_PARALLEL, *SHARDED])
def test_no_hooks_left(found: Found, case: str) -> None:
    """Between windows and after removal, the model has only the hooks of its wrapper."""
    for result in found(case):
        assert result["clean"]
        assert result["left"]


def tree(root: str, prefix: str, blocks: tuple[str, ...] = ("a", "b")) -> tuple[list[Any], list[Any]]:
    """Return the regions of a forward and of a backward."""
    inside = [[f"{prefix}{name}", [f"{prefix}{name}.lin"], [f"{prefix}{name}.act"]] for name in blocks]
    outside = [
        [
            f"{prefix}{name} (backward)",
            [f"{prefix}{name}.act (backward)"],
            [f"{prefix}{name}.lin (backward)"],
        ]
        for name in reversed(blocks)
    ]
    if prefix:
        return [root, ["module", *inside]], [f"{root} (backward)", ["module (backward)", *outside]]
    return [root, *inside], [f"{root} (backward)", *outside]


@pytest.mark.parametrize("case", DATA_PARALLEL)
def test_regions_of_data_parallel(found: Found, case: str) -> None:
    """Every module has its region inside DDP's, in micro-steps with and without a reduction."""
    expected = list(tree("DistributedDataParallel", "module."))
    for result in found(case):
        assert result["tree"] == expected * (2 if case == "no_sync" else 1)


@pytest.mark.parametrize("case", SHARDED)
def test_regions_of_sharded_models(found: Found, case: str) -> None:
    """Every module of a sharded model has a forward and a backward region inside the model's own."""
    for result in found(case):
        assert result["tree"] == list(tree("FSDPWhole", ""))


@sharding
def test_all_gather_inside_its_module(folder: Path) -> None:
    """FSDP's all-gather for a module lies inside the module's region, forward and backward."""
    for rank in (0, 1):
        events = json.loads((folder / f"trace{rank}.json").read_text())["traceEvents"]
        found = [event for event in events if event.get("cat") == "user_annotation"]
        regions = {
            event["name"]: (event["ts"], event["ts"] + event["dur"])
            for event in found
            if event["name"] in ("a", "b", "a (backward)", "b (backward)")
        }
        assert len(regions) == 4
        for name in ("a", "b"):
            start, end = regions[name]
            inside = [
                event["name"] for event in found if start <= event["ts"] and event["ts"] + event["dur"] <= end
            ]
            assert [text for text in inside if text.startswith("FSDP::all_gather")], (name, inside)
            assert [text for text in inside if text.startswith("FSDP::pre_forward")], (name, inside)
            assert [text for text in inside if text.startswith("FSDP::post_forward")], (name, inside)


@sharding
def test_state_dict(found: Found) -> None:
    """A sharded model's state_dict has its usual keys inside a window."""
    assert found("keys") == [True, True]
