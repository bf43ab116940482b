"""Training is not changed: the same kernels in the same order, the same output and exit code, whatever records it.

Under faults of the GPU and of CUPTI, nothing fails that does not fail without this library, and the manifest says
what is missing.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import simgpu
from tests.simgpu.works import read_logs, works
from tests.support import warm
from tests.support.programs import ROOT, environment

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]

BEGIN = """
import torch
from torch import nn
from torch.nn import functional
from tests.simgpu.ways import loop, watch

torch.manual_seed(0)

def mlp():
    return watch(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8)).cuda())

def batches(count=6):
    return [torch.randn(16, 32) for _ in range(count)]
"""

END = """
torch.cuda.synchronize()
print(torch.cuda.max_memory_allocated(), int(torch.cuda.get_rng_state().sum()), torch.rand(1).item())
"""

PROGRAMS = {
    "eager": """
model = mlp()
optimizer = torch.optim.Adam(model.parameters())
for batch in loop(batches()):
    loss = model(batch.cuda()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
""",
    "amp": """
model = mlp()
optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cuda", growth_interval=2)
for number, batch in enumerate(loop(batches())):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(batch.cuda() * (1e9 if number == 3 else 1)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(loss.item(), scaler.get_scale())
""",
    "compiled": """
model = mlp()
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in loop(batches(8)):
    compiled(batch.cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "graphs": """
model = watch(nn.Linear(32, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
static, graph = torch.zeros(16, 32).cuda(), torch.cuda.CUDAGraph()

def step():
    global loss
    optimizer.zero_grad(set_to_none=True)
    loss = model(static).square().mean()
    loss.backward()
    optimizer.step()

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
with torch.cuda.graph(graph):
    step()
for batch in loop(batches()):
    static.copy_(batch)
    graph.replay()
    print(loss.item())
""",
    "checkpointing": """
from torch.utils.checkpoint import checkpoint

model = mlp()
optimizer = torch.optim.AdamW(model.parameters())
for batch in loop(batches()):
    loss = checkpoint(model, batch.cuda(), use_reentrant=False).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
""",
    "accumulation": """
model = mlp()
optimizer = torch.optim.Adam(model.parameters(), fused=True)
for number, batch in enumerate(loop(batches(12))):
    (model(batch.cuda()).square().mean() / 2).backward()
    if number % 2:
        print(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
""",
    "two_streams": """
model = mlp()
side = torch.cuda.Stream()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in loop(batches()):
    x = batch.cuda()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        extra = (x @ x.T).sum()
    loss = model(x).square().mean()
    torch.cuda.current_stream().wait_stream(side)
    (loss + extra * 1e-3).backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
""",
    "pinned_loader": """
data = torch.utils.data.TensorDataset(torch.randn(96, 32), torch.randint(8, (96,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, pin_memory=True, shuffle=True)
model = mlp()
optimizer = torch.optim.Adam(model.parameters())
for x, y in loop(loader):
    loss = functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
""",
    "generate": """
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(40, 32), nn.Linear(32, 96), nn.Linear(32, 40)

    def forward(self, token, keys, values):
        q, k, v = self.qkv(self.embed(token)).view(1, 1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return self.out(functional.scaled_dot_product_attention(q, keys, values).flatten()), keys, values

model = watch(Decoder().cuda().eval())
with torch.inference_mode():
    for prompt in loop(range(5)):
        token, tokens = torch.tensor([prompt]).cuda(), []
        keys = values = torch.empty(1, 4, 0, 8).cuda()
        while len(tokens) < 6 and (not tokens or tokens[-1] != 7):
            logits, keys, values = model(token, keys, values)
            token = logits.argmax(-1, keepdim=True)
            tokens.append(token.item())
        print(tokens)
""",
}
# What a compilation imports, which takes seconds.
COMPILER = (
    "torch._inductor.compile_fx", "torch._inductor.async_compile", "torch._inductor.codegen.triton",
    "torch._inductor.runtime.triton_heuristics", "triton.compiler", "triton.backends.nvidia.compiler",
    "triton.backends.nvidia.driver",
)  # fmt: skip
WAYS = ("run", "steps", "syncs", "modules", "memory", "black_box")


@dataclass(frozen=True)
class Outcome:
    """What a program did: `works` are the names of what each stream of a GPU ran, in order."""

    returncode: int
    stdout: str
    stderr: str
    works: dict[tuple[int, int], list[str]]
    manifest: list[dict[str, Any]]
    kernels: list[tuple[int, int]]
    """The start and end of each kernel in ns, by the simulator's log."""


def outcome(program: str, way: str, folder: Path, **settings: object) -> Outcome:
    """Run a program in a way, with settings of the simulated GPU."""
    script, out = folder / "train.py", folder / "out"
    script.write_text(BEGIN + PROGRAMS[program] + END)
    variables = {f"SIMGPU_{name.upper()}": str(value) for name, value in settings.items()}
    variables |= {"WAY": way, "OUT": str(out), "SIMGPU_LOG": str(folder / "log-%p"), "INSTRUMENT_SUMMARY": "0"}
    env = environment(variables)
    env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{ROOT}"
    options = ["-m", "instrument", "run", "--steps", "2-3", "--out", str(out), "--"] if way == "run" else []
    imports = COMPILER if program == "compiled" else ()
    done = warm.run([sys.executable, *options, script], env, timeout=60, imports=imports)
    entries = read_logs(folder)
    manifest = out / "manifest.jsonl"
    lines = manifest.read_text().splitlines() if manifest.exists() else []
    kernels = [(entry.start, entry.end) for entry in entries if entry.kind == "kernel"]
    return Outcome(
        done.returncode, done.stdout, done.stderr, works(entries), list(map(json.loads, lines)), kernels
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def run(program: str) -> Outcome:
        if program == "compiled":
            outcome(program, "plain", tmp_path_factory.mktemp("first"))  # fills the caches of the compiler
        return outcome(program, "plain", tmp_path_factory.mktemp(program), **numerics(program))

    return cache(run)


def numerics(program: str) -> dict[str, object]:
    """Return the setting by which a program's kernels compute, but those that Triton compiles."""
    return {} if program == "compiled" else {"numerics": 1}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_training_is_the_same(program: str, way: str, plain: Any, tmp_path: Path) -> None:
    expected = plain(program)
    assert expected.returncode == 0, expected.stderr

    found = outcome(program, way, tmp_path, **numerics(program))

    assert (found.returncode, found.stdout) == (0, expected.stdout), found.stderr
    assert found.works == expected.works
    assert all((window["status"], window["reason"]) == ("recorded", None) for window in found.manifest)
    assert bool(found.manifest) == (way not in ("syncs", "black_box"))
    check_kernels(found)


def check_kernels(found: Outcome) -> None:
    """Check that a window that is recorded, without a reason, has all kernels that ran in it."""
    for window in found.manifest:
        if window["start_ns"] is None:
            continue
        ran = sum(window["start_ns"] <= start and end <= window["end_ns"] for start, end in found.kernels)
        if window["reason"] is None:
            assert window["status"] == "recorded"
            assert window["trace"]["kernels_recorded"] >= ran > 0


# Programs that meet each fault: one of them, or all in half an hour.
FAULTY = list(PROGRAMS) if os.environ.get("INSTRUMENT_FUZZ") == "all" else ["eager"]

# What CUPTI and its records do, and a part of the reason that the manifest has to give.
RECORDS = [
    pytest.param({"cupti": "refused"}, "records no GPU", id="refused"),
    pytest.param({"cupti": "busy"}, "records no GPU", id="busy"),
    pytest.param({"lost_records": 1}, "", id="lost"),  # those of a step of warm-up
    pytest.param({"late_records": 1}, "no record of this window", id="late"),
    pytest.param({"late_records": 2}, "no record of this window", id="never"),
    pytest.param({"zero_stamps": 1}, "no record of a kernel", id="zero"),
]


@pytest.mark.parametrize("way", ["run", "steps"])
@pytest.mark.parametrize(("settings", "said"), RECORDS)
@pytest.mark.parametrize("program", FAULTY)
def test_missing_records_change_nothing_and_are_told(
    program: str, settings: dict[str, object], said: str, way: str, plain: Any, tmp_path: Path
) -> None:
    expected = plain(program)

    found = outcome(program, way, tmp_path, **settings, **numerics(program))

    assert (found.returncode, found.stdout) == (0, expected.stdout), found.stderr
    assert found.works == expected.works
    check_kernels(found)
    (window,) = found.manifest
    assert said in (window["reason"] or "")
    assert bool(said) == (window["reason"] is not None)


# Each step of the eager program has 24 launches: the first fails in the third step, which is recorded.
FAILURES: dict[str, dict[str, object]] = {
    "in a window": {"error_at_launch": 80},
    "before a window": {"error_at_launch": 4},
    "assert": {"assert": "Gelu"},
    "full": {"device": "full"},
    "exclusive": {"device": "exclusive"},
    "out of memory": {"largest_bytes": 1 << 20},
}


@pytest.mark.parametrize("way", ["run", "steps"])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("program", FAULTY)
def test_a_failure_is_that_of_the_program(program: str, failure: str, way: str, tmp_path: Path) -> None:
    for name in ("plain", way):
        (tmp_path / name).mkdir()
    expected = outcome(program, "plain", tmp_path / "plain", **FAILURES[failure])

    found = outcome(program, way, tmp_path / way, **FAILURES[failure])

    raised = [line for line in expected.stderr.splitlines() if re.match(r"torch\.\w+: CUDA", line)]
    statuses = [window["status"] for window in found.manifest]
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert set(raised) <= set(found.stderr.splitlines())
    assert all(window["reason"] or window["status"] == "recorded" for window in found.manifest)
    if program == "eager":  # which meets each failure before its window ends
        assert expected.returncode == 1
        assert raised
        ends = ["partial"] if failure == "in a window" else ["not reached", "skipped", "partial", "failed"]
        assert set(statuses) <= set(ends)
        assert len(statuses) == 1 or not statuses
    check_kernels(found)
