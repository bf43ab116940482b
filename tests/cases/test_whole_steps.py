"""Dry runs of scripts: each step is whole, up to the end of its iteration of the loop."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from instrument.explain.waits.report import SyncReport
from instrument.syncs.dryrun.run import dry_run_file

pytestmark = [pytest.mark.corpus, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")]

HEAD = """\
import sys
import torch
from torch import nn
device = "cuda" if torch.cuda.is_available() else "cpu"
count = int(sys.argv[1])
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(device)
x = torch.ones(2, 4, device=device)
optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
"""
TWO_OPTIMIZERS = """\
optimizers = [optimizer, torch.optim.AdamW(model[1].parameters(), lr=0.1)]
for step in range(count):
    loss = model(x).sum()
    loss.backward()
    for each in optimizers:
        each.step()
    model.zero_grad()
    print(loss.item())  # in
"""
CONTINUE = """\
step = 0
while step < count:
    step += 1
    loss = model(x).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step < 99:
        print(loss.item())  # in
        continue
    print(step)
print(loss.item())  # out
"""
GENERATOR = """\
def train():
    while True:
        loss = model(x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
for step, loss in enumerate(train(), 1):
    print(loss.item())  # in
    if step == count:
        break
print(loss.item())  # out
"""
ONE_UPDATE = """\
for i in range(count):
    model(x).sum().backward(); optimizer.step(); optimizer.zero_grad()
print(model(x).detach().cpu())  # out
print(model(x).sum().item())  # out
"""
GAN = """\
other = nn.Linear(4, 4).to(device)
both = [optimizer, torch.optim.SGD(other.parameters(), lr=0.1)]
for step in range(count):
    batch = torch.ones(2, 4).to(device)  # in
    first = model(batch).sum() + model(other(x).detach()).sum()
    optimizer.zero_grad()
    first.backward()
    optimizer.step()
    print(first.item())  # in
    second = model(other(x)).sum()
    both[1].zero_grad()
    second.backward()
    both[1].step()
    print(first.item(), second.item())  # in, in
torch.save(x, "out.pt")  # out
"""
GAN_IN_A_FUNCTION = """\
other = nn.Linear(4, 4).to(device)
both = [optimizer, torch.optim.SGD(other.parameters(), lr=0.1)]
def update():
    model(other(x).detach()).sum().backward()
    both[0].step()
    loss = model(other(x)).sum()
    loss.backward()
    both[1].step()
    return loss
def train():
    for _ in range(count):
        loss = update()
        print(loss.item())  # in
    return loss
print(train().item())  # out
"""
ACCUMULATION = """\
for step in range(count):
    for micro in range(3):
        loss = model(x).sum()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())  # in
print(loss.item())  # out
"""
ACCUMULATION_IN_ONE_LOOP = """\
for micro in range(2 * count):
    loss = model(x).sum()
    loss.backward()
    if micro % 2:
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())  # in
print(loss.tolist())  # out
"""
SCALERS = """\
optimizers = [optimizer, torch.optim.SGD(model[1].parameters(), lr=0.1)]
scaler = torch.amp.GradScaler(device)
for step in range(count):
    scaler.scale(model(x).sum() * (float("inf") if step == 0 else 1)).backward()
    for each in optimizers:
        scaler.step(each)  # in, in
    scaler.update()
    print(scaler.get_scale())  # in
"""
CLOSURES = """\
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
def closure():
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return loss
for step in range(count):
    optimizer.step(closure)  # lbfgs
    print(x.sum().item())  # in
print(x.tolist())  # out
"""
IN_BACKWARD = """\
optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}
for each in model.parameters():
    each.register_post_accumulate_grad_hook(lambda each: optimizers[each].step())
for step in range(count):
    loss = model(x).sum()
    loss.backward()
    print(loss.item())  # in
print(loss.item())  # out
"""
EVALUATION_IN_THE_LOOP = """\
for step in range(count):
    try:
        model(x).sum().backward()
        optimizer.step()
    except ValueError:
        continue
    with torch.no_grad():
        for _ in range(2):
            print(model(x).sum().item())  # in, in
with torch.no_grad():
    print(model(x).sum().item())  # out
"""
EVALUATION_AFTER_EACH_EPOCH = """\
for epoch in range(1):
    for step in range(count):
        model(x).sum().backward()
        optimizer.step()
    print(model(x).sum().item())  # out
"""
WHILE = """\
step = 0
while step < count:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    step += 1
    print(loss.item())  # in
else:
    print(loss.item())  # out
"""
NO_LOOP = """\
def update():
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    return loss
losses = list(map(lambda _: update().item(), range(count)))  # in
print(model(x).sum().item())  # out
"""
COMPILED = """\
model = torch.compile(model)
for step in range(count):
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    print(loss.item())  # in
print(loss.item())  # out
"""
FUNCTIONAL = """\
weight = torch.ones(4, device=device, requires_grad=True)
optimizers = [torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([x.requires_grad_()], lr=0.1)]
for step in range(count):
    loss = (x * weight).sum()
    loss.backward()
    for each in optimizers:
        each.step()
    print(loss.item())  # in
print(loss.item())  # out
"""
ASYNC = """\
import asyncio
async def update():
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    await asyncio.sleep(0)
    return loss
async def main():
    for step in range(count):
        loss = await update()
        print(loss.item())  # in
    print(loss.item())  # out
asyncio.run(main())
"""
LOADER_ON_ANOTHER_THREAD = """\
from concurrent.futures import ThreadPoolExecutor
def load():
    for _ in range(count):
        yield torch.ones(2, 4).to(device)  # in
def train():
    for batch in load():
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        print(loss.item())  # in
    return loss
with ThreadPoolExecutor(1) as pool:
    loss = pool.submit(train).result()
print(model(x).sum().item())  # out
"""
MARKED = """\
import instrument
with instrument.profile("runs", schedule=instrument.schedule(at=[100])) as prof:
    for _ in range(count):
        print(x.sum().item())  # in
        model(x).sum().backward()
        optimizer.step()
        print(x.sum().item())  # in
        prof.step()
print(x.sum().item())  # out
"""
INFERENCE = """\
model.eval()
for _ in range(count):
    y = model(x)
    print(y.cpu())  # in
print(y.sum().item())  # out
"""
SUBCLASS = """\
class Trainer:
    def fit(self, steps):
        self.number = 0
        while True:
            if self.number == steps:
                return loss
            with torch.autocast(device, enabled=False):
                loss = self.step()
            try:
                self.log(loss)
            finally:
                self.number += 1
    def step(self):
        loss = model(x).sum()
        self.update(loss)
        return loss
    def update(self, loss):
        loss.backward()
        optimizer.step()
    def log(self, loss):
        print(loss.item())  # in
print(Trainer().fit(count).item())  # out
"""
PROGRAMS = {name: HEAD + body for name, body in list(globals().items()) if name.isupper() and name != "HEAD"}
PROGRAMS["INFERENCE"] = PROGRAMS["INFERENCE"].replace("optimizer = torch", "SGD = lambda: torch")


def expected(code: str, steps: int) -> dict[int, dict[int | None, int]]:
    """Return the synchronizations by line and step, as the comments in ``code`` say."""
    found: dict[int, dict[int | None, int]] = {}
    for number, line in enumerate(code.splitlines(), 1):
        words = line.partition("  # ")[2].split(", ")
        if words[0] in ("in", "out"):
            found[number] = dict.fromkeys(range(steps), len(words)) if words[0] == "in" else {None: 1}
    return found


def counts(report: SyncReport) -> dict[int, dict[int | None, int]]:
    """Return the synchronizations by line and step, without those of the set-up and of optimizers."""
    found: dict[int, dict[int | None, int]] = {}
    for each in report.syncs:
        line, text = (each.site.line, each.site.code) if each.site else (0, "")
        if line > HEAD.count("\n") and "nn.Linear" not in text and "lbfgs" not in text:
            found.setdefault(line, {}).update(each.steps)
    return found


def run(path: Path, code: str, count: int, steps: int | None = None) -> SyncReport:
    path.write_text(code)
    report = dry_run_file(path, None, args=[str(count)], steps=steps)
    assert report.error is None, report
    return report


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_limit_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, steps: int) -> None:
    """The first steps of a longer loop are whole, and nothing of the next one is counted."""
    monkeypatch.chdir(tmp_path)
    code = PROGRAMS[name]
    report = run(tmp_path / "train.py", code, 6, steps)
    assert steps == report.steps
    inside = {line: found for line, found in expected(code, steps).items() if None not in found}
    assert inside == counts(report)
    assert f"stopped after {steps} step" in str(report)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_whole_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    """What follows the loop is outside of the steps, for one update as for several."""
    monkeypatch.chdir(tmp_path)
    code = PROGRAMS[name]
    report = run(tmp_path / "train.py", code, count)
    assert count == report.steps
    assert expected(code, count) == counts(report)


def test_a_limit_above_the_number_of_steps(tmp_path: Path) -> None:
    """A limit that the loop does not reach changes nothing."""
    code = PROGRAMS["ONE_UPDATE"]
    report = run(tmp_path / "train.py", code, 2, 5)
    assert 2 == report.steps
    assert expected(code, 2) == counts(report)
    assert "stopped after" not in str(report)


def test_a_line_of_the_first_step(tmp_path: Path) -> None:
    """What follows only the first update, as with a line that logs once in 100 steps, is in the first step."""
    code = (
        f"{HEAD}for step in range(count):\n    loss = model(x).sum()\n    loss.backward()\n    optimizer.step()\n"
    )
    code += "    if step % 100 == 0:\n        print(loss.item())\n"
    for steps in (1, 2, 3):
        assert {14: {0: 1}} == counts(run(tmp_path / "train.py", code, 6, steps))


@pytest.mark.parametrize(
    ("most", "count", "steps"), [(1, 1, None), (1, 3, None), (1, 5, 1), (1, 5, 2), (2, 3, None)]
)
def test_a_budget_of_whole_steps(tmp_path: Path, most: int, count: int, steps: int | None) -> None:
    """Synchronizations before and after the update count in one step; those after the loop count in none."""
    code = (
        f"{HEAD}for _ in range(count):\n    loss = model(x).sum()\n    print(loss.item())\n    loss.backward()\n"
    )
    code += "    optimizer.step()\n    print(loss.item())\nfor _ in range(9):\n    print(loss.item())\n"
    (tmp_path / "train.py").write_text(code)
    report = dry_run_file(tmp_path / "train.py", None, args=[str(count)], steps=steps, budget=most)
    shown = min(count, steps or count)
    often = " in every step" if shown > 1 else ""
    exceeded = f"a step synchronizes 2 times{often}; its budget is 1 (the first one too many: "
    assert [exceeded] * (most < 2) == [text[: len(exceeded)] for text in report.exceeded]


@pytest.mark.parametrize(("loop", "said"), [("for step in range(count):", False), ("while True:", True)])
def test_a_limit_inside_another_loop(tmp_path: Path, loop: str, said: bool) -> None:
    """The report says that it ends before the rest of a loop around that of the steps."""
    lines = ["loss = model(x).sum()", "loss.backward()", "optimizer.step()"]
    if said:
        lines = ["for _ in range(2):", *(f"    {line}" for line in lines)]
    code = HEAD + "\n    ".join([loop, *lines, "print(loss.item())"])
    report = run(tmp_path / "train.py", code, 6, 1)
    assert said == any("the rest of the loop around theirs was not checked" in text for text in report.coverage)


def test_no_warning_about_compiled_models(tmp_path: Path) -> None:
    """A limit of steps installs nothing that torch.compile warns about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(tmp_path / "train.py", PROGRAMS["COMPILED"], 6, None)  # imports the compiler, which warns of its own
        caught.clear()
        run(tmp_path / "train.py", PROGRAMS["COMPILED"], 6, 2)
    assert [] == [str(each.message) for each in caught]
