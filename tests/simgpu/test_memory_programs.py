"""What is read from the memory history of small programs, against the allocator's own numbers and the program's.

The history covers the whole program, so that every number is exact: the peak is the most that was asked for, and
each category has the bytes of the tensors that the program names at its end.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.read.memory.categories import CATEGORIES
from tests import simgpu
from tests.support import warm
from tests.support.programs import ROOT, environment

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]

# `report` takes what the program holds at its end; the line with "# peak: CATEGORY BYTES" allocates so much of the
# peak. Sizes are not multiples of 512 bytes, to which the allocator rounds.
BEGIN = """
import json, os, sys
import torch
from torch import nn
from torch.nn import functional

MIB = 1 << 20
STATISTICS = {
    "peak": "requested_bytes.all.peak", "rounded_peak": "active_bytes.all.peak",
    "now": "requested_bytes.all.current", "rounded_now": "active_bytes.all.current",
    "reserved_peak": "reserved_bytes.all.peak", "reserved": "reserved_bytes.all.current",
}
numbers, windows = {}, "OUT" in os.environ
if not windows:
    torch.cuda.memory._record_memory_history()

def count():
    numbers.update({name: torch.cuda.memory_stats()[key] for name, key in STATISTICS.items()})

def loop(items):
    if not windows:
        yield from items
        return
    import instrument

    schedule = instrument.schedule("1-2", warmup=0)
    with instrument.profile(os.environ["OUT"], schedule=schedule, memory="snapshot", exporter="none") as prof:
        for number, item in enumerate(items):
            if number == 1:
                torch.cuda.reset_peak_memory_stats()
            yield item
            if number == 2:
                count()
            prof.step()

def size_of(tensors):
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()), sum(-(-size // 512) * 512 for size in storages.values())

def states(*optimizers):
    held = (each for one in optimizers for state in one.state.values() for each in state.values())
    return [each for each in held if torch.is_tensor(each) and each.is_cuda]

def gradients(module):
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]

def held(module):
    return [*module.parameters(), *module.buffers()]

def mlp():
    return nn.Sequential(nn.Linear(301, 503), nn.ReLU(), nn.Linear(503, 7)).cuda()

def batch(rows=65):
    return torch.randn(rows, 301, device="cuda")

saved = []

def save(tensor):
    saved.append(tensor)
    return tensor

def saved_but(*others):
    known = {tensor.untyped_storage().data_ptr() for tensor in others}
    return [each for each in saved if each.untyped_storage().data_ptr() not in known]

def report(**kept):
    torch.cuda.synchronize()
    if not windows:
        count()
        torch.cuda.memory._dump_snapshot("memory.pickle")
    print(json.dumps({**numbers, "kept": {category: size_of(tensors) for category, tensors in kept.items()}}))
"""

PROGRAMS = {
    "sgd": """
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in loop(range(4)):
    x = batch()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
report(parameters=held(model), other=[x, loss])
""",
    "adam": """
model = mlp()
optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
for _ in loop(range(4)):
    optimizer.zero_grad()
    x = batch()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
report(parameters=held(model), gradients=gradients(model), optimizer_state=states(optimizer), other=[x, loss])
""",
    "fused adam and batch norm": """
model = nn.Sequential(nn.Linear(301, 503), nn.BatchNorm1d(503), nn.Linear(503, 7)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in loop(range(4)):
    x = batch()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
report(parameters=held(model), optimizer_state=states(optimizer), other=[x, loss])
""",
    "amp": """
model = mlp()
optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.amp.GradScaler("cuda")
for _ in loop(range(4)):
    x = batch()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
report(
    parameters=held(model), gradients=gradients(model), optimizer_state=states(optimizer),
    other=[x, loss, scaler._scale, scaler._growth_tracker],
)
""",
    "checkpointing": """
from torch.utils.checkpoint import checkpoint

model = nn.Sequential(*(nn.Sequential(nn.Linear(301, 301), nn.GELU()) for _ in range(4))).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in loop(range(4)):
    x = hidden = batch()
    for layer in model:
        hidden = checkpoint(layer, hidden, use_reentrant=False)
    loss = hidden.square().mean()
    del hidden
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
report(parameters=held(model), optimizer_state=states(optimizer), other=[x, loss])
""",
    "accumulation": """
model = mlp()
optimizer = torch.optim.Adam(model.parameters())
for number in loop(range(7)):
    x = batch(number + 1)
    loss = model(x).square().mean()
    loss.backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
report(parameters=held(model), gradients=gradients(model), optimizer_state=states(optimizer), other=[x, loss])
""",
    "a leak in a list": """
model, kept = mlp(), []
optimizer = torch.optim.Adam(model.parameters())
for _ in loop(range(6)):
    x = batch()
    kept.append(torch.zeros(3 * MIB + 5, dtype=torch.uint8, device="cuda"))  # peak: other 6 * (3 * MIB + 5)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
report(parameters=held(model), optimizer_state=states(optimizer), other=[x, loss, *kept])
""",
    "a retained graph": """
model = mlp()
x = batch()
with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
    loss = model(x).square().mean()
loss.backward(retain_graph=True)
report(
    parameters=held(model), gradients=gradients(model), activations=saved_but(x, *model.parameters()),
    other=[x, loss],
)
""",
    "evaluation with a graph": """
model = mlp().eval()
outputs = []
inputs = [batch(2000) for _ in range(3)]
with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
    for x in inputs:
        outputs.append(model(x))  # peak: activations 2000 * 4 * (3 * 503 + 2 * 7)
report(
    parameters=held(model), activations=[*saved_but(*inputs, *model.parameters()), *outputs], other=inputs
)
""",
    "two streams": """
side = torch.cuda.Stream()
x = torch.empty(5 * MIB + 3, dtype=torch.uint8, device="cuda")  # peak: other 5 * MIB + 3
with torch.cuda.stream(side):
    y = torch.empty(9 * MIB + 1, dtype=torch.uint8, device="cuda")  # peak: temporaries 9 * MIB + 1
    torch.cuda._sleep(500_000_000)
y.record_stream(torch.cuda.current_stream())
torch.cuda.current_stream().wait_stream(side)
del y  # it is free when the stream has waited, and the allocator is called again
z = torch.empty(100, device="cuda")  # peak: other 400
torch.cuda.synchronize()
last = torch.empty(100, device="cuda")
report(other=[x, z, last])
""",
    "a graph with its pool": """
model = mlp().requires_grad_(False)
x = batch()
model(x)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = model(x)
for _ in range(3):
    graph.replay()
report(parameters=held(model), activations=[y], other=[x])
""",
    "expandable segments": """
model = nn.Linear(1501, 1601).cuda()  # peak: parameters (1501 + 1) * 1601 * 4
optimizer = torch.optim.Adam(model.parameters())
for rows in loop((100, 200, 30_000, 200)):
    x = torch.randn(rows, 1501, device="cuda")
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
report(parameters=held(model), optimizer_state=states(optimizer), other=[x, loss])
""",
    "pinned loader": """
data = torch.utils.data.TensorDataset(torch.randn(50, 301))
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for (x,) in loop(torch.utils.data.DataLoader(data, batch_size=10, pin_memory=True)):
    x = x.cuda(non_blocking=True)  # peak: other 10 * 301 * 4
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
y = torch.zeros(4 * MIB + 1, dtype=torch.uint8, device="cuda")
report(parameters=held(model), optimizer_state=states(optimizer), other=[x, loss, y])
""",
    "an embedding table": """
table, head = nn.Embedding(9001, 101).cuda(), nn.Linear(101, 3).cuda()  # peak: parameters 4 * (9001 * 101 + 306)
optimizer = torch.optim.Adam([*table.parameters(), *head.parameters()])
for _ in loop(range(4)):
    tokens = torch.randint(9001, (17,), device="cuda")
    loss = head(table(tokens)).square().mean()
    loss.backward()
    optimizer.step()  # peak: optimizer_state 2 * 4 * (9001 * 101 + 306)
    optimizer.zero_grad()
report(
    parameters=[*held(table), *held(head)], optimizer_state=states(optimizer), other=[tokens, loss]
)
""",
    "a frozen backbone": """
backbone = nn.Sequential(nn.Linear(301, 2003), nn.ReLU(), nn.Linear(2003, 503)).cuda().requires_grad_(False)
head = nn.Linear(503, 7).cuda()
optimizer = torch.optim.Adam(head.parameters())
for _ in loop(range(4)):
    optimizer.zero_grad()
    x = batch()
    features = backbone(x)
    loss = head(features).square().mean()
    loss.backward()
    optimizer.step()
report(
    parameters=[*held(backbone), *held(head)], gradients=gradients(head), optimizer_state=states(optimizer),
    activations=[features], other=[x, loss],
)
""",
    "lora": """
class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(301, 3, bias=False), nn.Linear(3, 301, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

model = nn.Sequential(*(Adapted(nn.Linear(301, 301)) for _ in range(3))).cuda()
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
for _ in loop(range(4)):
    optimizer.zero_grad()
    x = batch()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
report(parameters=held(model), gradients=gradients(model), optimizer_state=states(optimizer), other=[x, loss])
""",
    "hooks of gradients": """
model, seen = mlp(), []
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model[2].weight.register_hook(lambda gradient: seen.append(gradient.abs().amax(0)))
for _ in loop(range(4)):
    optimizer.zero_grad()
    x = batch()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
report(parameters=held(model), gradients=[*gradients(model), *seen], other=[x, loss])
""",
    "an optimizer in the backward pass": """
model = mlp()
optimizers = {each: torch.optim.Adam([each]) for each in model.parameters()}

def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()

for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
for _ in loop(range(4)):
    x = batch()
    loss = model(x).square().mean()
    loss.backward()
report(parameters=held(model), optimizer_state=states(*optimizers.values()), other=[x, loss])
""",
    "generate with a cache": """
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(41, 96), nn.Linear(96, 288), nn.Linear(96, 41)

    def forward(self, token, keys, values):
        q, k, v = self.qkv(self.embed(token)).view(1, 1, 3, 4, 24).permute(2, 0, 3, 1, 4)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return self.out(functional.scaled_dot_product_attention(q, keys, values).flatten()), keys, values

model = Decoder().cuda().eval()
with torch.inference_mode():
    token = torch.tensor([1]).cuda()
    keys = values = torch.empty(1, 4, 0, 24).cuda()
    for _ in range(9):
        logits, keys, values = model(token, keys, values)
        token = logits.argmax(-1, keepdim=True)
report(parameters=held(model), activations=[keys, values, logits], other=[token])
""",
    "fragmentation": """
torch.empty(240 * MIB, dtype=torch.uint8, device="cuda")
parts = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
del parts[::2]
try:
    torch.empty(110 * MIB + 1, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
report(other=parts)
""",
    "gradients of gradients": """
model = mlp()
optimizer = torch.optim.Adam(model.parameters())
for _ in loop(range(4)):
    optimizer.zero_grad()
    x = batch().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().mean().backward()
    optimizer.step()
del slope
report(
    parameters=held(model), gradients=[*gradients(model), x.grad], optimizer_state=states(optimizer), other=[x]
)
""",
    "two models": """
maker = nn.Sequential(nn.Linear(31, 101), nn.ReLU(), nn.Linear(101, 301)).cuda()
judge = nn.Sequential(nn.Linear(301, 101), nn.ReLU(), nn.Linear(101, 1)).cuda()
of_maker, of_judge = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
for _ in loop(range(4)):
    z = torch.randn(65, 31, device="cuda")
    made = maker(z)
    first = (judge(made.detach()) - judge(batch())).mean()
    first.backward()
    of_judge.step()
    of_judge.zero_grad()
    second = judge(made).mean()
    second.backward()
    of_maker.step()
    of_maker.zero_grad()
    of_judge.zero_grad()
report(
    parameters=[*held(maker), *held(judge)], optimizer_state=states(of_maker, of_judge), activations=[made],
    other=[z, first, second],
)
""",
    "settings of the allocator": """
torch.cuda.set_per_process_memory_fraction(0.01)
parts = [torch.empty(9 * MIB + 1, dtype=torch.uint8, device="cuda") for _ in range(9)]
del parts[::2]
big = torch.empty(100 * MIB + 1, dtype=torch.uint8, device="cuda")  # peak: other 100 * MIB + 1
try:
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
report(other=[*parts, big])
""",
    "out of memory": """
x = torch.empty(100 * MIB + 1, dtype=torch.uint8, device="cuda")  # peak: other 100 * MIB + 1
try:
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
report(other=[x])
""",
}
FAILURES = {"fragmentation": ["fragmented"], "out of memory": ["full"], "settings of the allocator": ["limited"]}
GROWTH = {"a leak in a list": [(6, 6 * ((3 << 20) + 5))], "hooks of gradients": [(4, 4 * 503 * 4)]}
# In their windows, each parameter has a new gradient, and each state the size of one, so that none is mistaken.
INFERRED = ("sgd", "adam", "checkpointing", "an embedding table", "a frozen backbone", "lora")
ALLOCATOR = {
    "expandable segments": "expandable_segments:True",
    "settings of the allocator": "roundup_power2_divisions:4,max_split_size_mb:64",
}
MEMORY = {"fragmentation": 820 << 20}


def run(program: str, folder: Path, **variables: str) -> dict[str, Any]:
    """Run a program, and return what it prints; with the variable OUT, it records a window there."""
    (folder / "train.py").write_text(BEGIN + PROGRAMS[program])
    variables = {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR.get(program, ""), "INSTRUMENT_SUMMARY": "0", **variables}
    if program in MEMORY:
        variables |= {"SIMGPU_MEMORY": str(MEMORY[program]), "SIMGPU_SHARED": ""}  # which no other process uses
    env = environment(variables)
    env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{ROOT}"
    command = [sys.executable, "train.py"]
    if program in MEMORY or "backend:" in variables["PYTORCH_CUDA_ALLOC_CONF"]:  # both count from the start
        text = subprocess.run(command, env=env, cwd=folder, timeout=60, check=True, stdout=subprocess.PIPE).stdout
    else:
        text = warm.run(command, env, cwd=folder, timeout=60, check=True).stdout.encode()
    printed: dict[str, Any] = json.loads(text)
    return printed


def read(folder: Path) -> instrument.MemorySnapshot:
    (path,) = folder.rglob("*memory.pickle")
    return instrument.read_memory(path)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_memory_of_a_program(program: str, tmp_path: Path) -> None:
    """The peak, what is kept by category, and the marked lines are those of the allocator and of the program."""
    printed, snapshot = run(program, tmp_path), read(tmp_path)
    script = tmp_path / "train.py"

    peak = snapshot.break_down(0)
    assert peak.peak.bytes == printed["peak"] <= printed["rounded_peak"]
    assert sum(use.bytes for use in peak.uses) == printed["peak"]
    timeline = snapshot.timeline(0)
    assert timeline.used_bytes[-1] == printed["now"]
    assert timeline.reserved_bytes.max() == printed["reserved_peak"]
    state = snapshot.state(0)
    assert (state.reserved_bytes, state.used_bytes) == (printed["reserved"], printed["rounded_now"])
    kept = {category: asked for category, (asked, _) in printed["kept"].items()}
    kept["workspace"] = printed["now"] - sum(kept.values())
    assert at_the_end(snapshot) == {name: size for name, size in kept.items() if size}

    # A checkpoint runs its part again on a thread of autograd, where no line of the program is.
    own = {place.file for place, _ in peak.by_line() if not place.file.endswith("torch/nn/modules/linear.py")}
    assert own == {str(script)}
    lines = {(place.file, place.line, category): size for (place, category), (size, _) in peak.by_line().items()}
    for number, line in enumerate(script.read_text().splitlines(), 1):
        if marked := re.search(r"# peak: (\w+) (.+)", line):
            assert lines[str(script), number, marked[1]] == eval(marked[2], {"MIB": 1 << 20})
    assert [failure.reason for failure in snapshot.failures(0)] == FAILURES.get(program, [])
    assert [(line.steps, line.bytes) for _, line in snapshot.growth(0)] == GROWTH.get(program, [])


def at_the_end(snapshot: instrument.MemorySnapshot) -> dict[str, int]:
    """Return the bytes of each category in use when the snapshot was taken, without those that have none."""
    sizes = zip(CATEGORIES, snapshot.timeline(0).bytes[:, -1].tolist(), strict=True)
    return {name: size for name, size in sizes if size}


@pytest.mark.parametrize("program", [name for name, source in PROGRAMS.items() if "loop(" in source])
def test_the_memory_of_a_window(program: str, tmp_path: Path) -> None:
    """What is older than the window has the size of its blocks, and its category by inference."""
    printed, snapshot = run(program, tmp_path, OUT="out"), read(tmp_path)

    assert printed["peak"] <= snapshot.peak(0).bytes <= printed["rounded_peak"]
    assert printed["now"] <= snapshot.timeline(0).used_bytes[-1] <= printed["rounded_now"]
    assert snapshot.timeline(0).reserved_bytes.max() == printed["reserved_peak"]
    state = snapshot.state(0)
    assert (state.reserved_bytes, state.used_bytes) == (printed["reserved"], printed["rounded_now"])
    if program in INFERRED:
        kept = at_the_end(snapshot)
        for category, (asked, rounded) in printed["kept"].items():
            assert asked <= kept.pop(category, 0) <= rounded, category
        assert kept.keys() == {"workspace"}


def test_an_allocator_without_a_history(tmp_path: Path) -> None:
    """That of CUDA itself records none: the window says so, and the program trains as ever."""
    plain = run("adam", tmp_path, OUT="out")
    (tmp_path / "async").mkdir()
    conf = "backend:cudaMallocAsync"

    printed = run("adam", tmp_path / "async", OUT="out", PYTORCH_CUDA_ALLOC_CONF=conf)

    (line,) = map(json.loads, (tmp_path / "async/out/manifest.jsonl").read_text().splitlines())
    assert (line["status"], line["memory"]["status"], line["memory"]["file"]) == ("recorded", "failed", None)
    assert "cudaMallocAsync" in line["memory"]["reason"]
    assert printed["kept"] == plain["kept"]
