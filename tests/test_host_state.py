"""The library leaves the process unchanged: random numbers, warnings, signals, logging, flags, folders.

The programs use torch.profiler once before the comparison, since its first use changes the process. Changes by the
library are listed in docs/globals.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .support import programs
from .support.host_state import differences

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

HEAD = f"""
import sys
sys.path.insert(0, {str(programs.ROOT)!r})
import torch
from torch.profiler import ProfilerActivity, profile
from tests.support.host_state import differences, seed, snapshot

with profile(activities=[ProfilerActivity.CPU]):
    pass
"""

# This training draws no random numbers, so that each drawn one comes from the library.
ENTRY_POINTS = """
import contextlib, glob, os, signal, instrument
from tests.support.finishing import processes
from instrument.integrations.server import Server

net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))

def train(step=lambda: None, body=lambda: None):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        net(torch.ones(2, 4)).sum().backward()
        body()
        optimizer.step()
        step()

def annotate():
    with instrument.annotate("a"):
        instrument.annotate(train)()
        instrument.mark("b")

def steps():
    before, seen = snapshot(), set()
    for _ in instrument.steps(range(8), "out", wait=1, warmup=1, active=2, repeat=2):
        with instrument.annotate("forward"):
            train()
        seen |= {name.split(":")[0] for name in differences(before, snapshot())}
    # An open window, and one that another process is finishing.
    assert seen <= {"profiler", "threads", "sockets", *EXPECTED}, seen

def modules():
    with instrument.annotate_modules(net), instrument.annotate_step("optimizer", "backward", "clipping", "data"):
        with instrument.profile("out") as prof:
            train(prof.step)

def raising():
    class Fails:
        name = hint = "fails"
        def prepare(self): raise OSError("on purpose")
        def capture(self): raise OSError("on purpose")
    with instrument.profile("out", schedule="1-2,4", on_trace_ready=lambda prof: 1 / 0) as prof:
        train(prof.step)
    with instrument.profile("out", schedule="1-2,4", exporter=Fails()) as prof:
        train(prof.step)
    fails = {"schedule": "1-2,4", "on_summary": lambda text: 1 / 0}
    with contextlib.suppress(ZeroDivisionError), instrument.profile("out", **fails) as prof:
        train(prof.step, lambda: 1 / (prof.step_num - 4))

def unwritable():
    open("file", "w").close()
    with instrument.profile("file/out", schedule="1-2,4") as prof:
        train(prof.step)

def no_process():
    executable, sys.executable = sys.executable, "/nowhere"
    with instrument.profile("out", schedule="1-2,4") as prof:
        train(prof.step)
    sys.executable = executable

def killed():
    def kill():
        for number in processes(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, 9)
    with instrument.profile("out", schedule="1-2,4") as prof:
        train(prof.step, kill)

def live():
    with instrument.detect_syncs() as syncs:
        train(syncs.step, lambda: torch.ones(1).item())
        with instrument.allow_sync("logging"):
            torch.ones(1).item()
    with instrument.no_syncs():
        torch.ones(1)
    str(syncs.report), syncs.report.to_json()

def dry():
    str(instrument.dry_run(lambda: torch.ones(3, device="cuda").sum().item()))

def reading():
    path = sorted(glob.glob("out/window-*/*.gz"))[0]
    instrument.metrics(instrument.read_trace(path))
    str(instrument.audit_syncs(path))

def server():
    server = Server("out", active=2, file="trigger", signal=signal.SIGUSR2)
    server.attach(net)
    server.step()
    signal.raise_signal(signal.SIGUSR2)
    for _ in range(5):
        server.step()
    server.detach()

def wrong():
    for call in (lambda: instrument.profile(3), lambda: instrument.schedule("x"), lambda: instrument.steps(3)):
        with contextlib.suppress(TypeError, ValueError):
            call()

EXPECTED = {"sys.meta_path"}  # wrapt's finder, added by the first import hook
train()
changed = {}
for call in annotate, steps, modules, raising, unwritable, no_process, killed, live, dry, reading, server, wrong:
    seed()
    before = snapshot()
    call()
    left = differences(before, snapshot())
    changed[call.__name__] = [line for line in left if line.split(":")[0] not in EXPECTED]
"""

ADAPTERS = """
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader, TensorDataset
import lightning.pytorch as pl
import instrument
from instrument.integrations import accelerate, lightning, torchtitan
from instrument.integrations import transformers as trainer
from tests.support.net import Net

PLAN = {"wait": 1, "warmup": 1, "active": 2, "on_summary": lambda text: None}

def in_transformers(with_library):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()
        def forward(self, x, labels=None):
            return {"loss": self.net(x).square().mean()}
    data = [{"x": torch.randn(4), "labels": 0} for _ in range(8)]
    options = {"use_cpu": True, "report_to": [], "max_steps": 6, "disable_tqdm": True}
    options |= {"save_strategy": "no", "logging_strategy": "no", "per_device_train_batch_size": 2}
    callbacks = [trainer.InstrumentCallback("out", **PLAN)] if with_library else []
    arguments = transformers.TrainingArguments("checkpoints", **options)
    transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=callbacks).train()

def in_accelerate(with_library):
    for state in AcceleratorState, GradientState, PartialState:
        state._reset_state()
    accelerator = Accelerator(cpu=True)
    if with_library:
        accelerate.attach("out", accelerator=accelerator, **PLAN)
    net = Net()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(6):
        accelerator.backward(net(torch.randn(2, 4)).sum())
        optimizer.step()
    accelerator.end_training()

class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def in_lightning(with_library):
    callbacks = [lightning.InstrumentCallback("out", **PLAN)] if with_library else []
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"accelerator": "cpu", "enable_checkpointing": False, "max_epochs": 1}
    data = DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=2, shuffle=True)
    pl.Trainer(callbacks=callbacks, **quiet).fit(Lit(), data)

def in_torchtitan(with_library):
    class Trainer:
        def __init__(self):
            self.model_parts = [Net()]
            self.optimizer = torch.optim.SGD(self.model_parts[0].parameters(), lr=0.1)
        def train_step(self):
            self.model_parts[0](torch.randn(2, 4)).sum().backward()
            self.optimizer.step()
        def train(self):
            for _ in range(6):
                self.train_step()
    loop = Trainer()
    adapter = torchtitan.attach("out", trainer=loop, **PLAN) if with_library else None
    loop.train()
    if with_library:
        adapter.detach()

def in_server(with_library):
    from instrument.integrations.server import Server
    net, server = Net(), Server("out", active=2, on_summary=lambda text: None)
    if with_library:
        server.attach(net)
        server.start_profile()
    for _ in range(6):
        net(torch.randn(2, 4))
        server.step()
    server.detach()

EXPECTED = {"sys.meta_path"}
changed = {}
for call in in_transformers, in_accelerate, in_lightning, in_torchtitan, in_server:
    after = []
    for with_library in (False, False, True):
        seed()
        call(with_library)
        after.append(snapshot())
    left = differences(*after[1:])
    changed[call.__name__] = [line for line in left if line.split(":")[0] not in EXPECTED]
"""

TAIL = """
import json
print(json.dumps(changed))
"""


@pytest.mark.parametrize(("code", "count", "windows"), [(ENTRY_POINTS, 12, 8), (ADAPTERS, 5, 5)])
def test_nothing_changes(tmp_path: Path, code: str, count: int, windows: int) -> None:
    """No state changes, in a successful or failing run; in a framework, only what the framework changes itself."""
    if code is ADAPTERS:
        for package in ("transformers", "accelerate", "lightning"):
            pytest.importorskip(package)
    changed, errors = run_program(tmp_path, code)
    assert count == len(changed)
    assert {name: [] for name in changed} == changed, errors
    assert "Where the step went" in errors or code is ADAPTERS
    assert len(list((tmp_path / "out").glob("window-*/*.gz"))) >= windows


def run_program(folder: Path, code: str) -> tuple[dict[str, Any], str]:
    """Run a program; return the changes that it reports, and its errors."""
    script = folder / "program.py"
    script.write_text(HEAD + code + TAIL)
    options: Any = {"cwd": folder, "env": programs.environment(), "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, script], timeout=200, **options)
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


TRAINING = """
import json, random, re
import numpy

seed()
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters())
numbers = range(12)
if "steps" in sys.argv:
    import instrument
    numbers = instrument.steps(numbers, "steps", wait=1, warmup=1, active=2, repeat=2)
for number in numbers:
    batch = torch.randn(2, 4) * random.random() + numpy.random.rand()
    loss = net(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), random.random(), numpy.random.rand())
print("rich" in sys.modules or "structlog" in sys.modules)
print(json.dumps({name: re.sub("0x[0-9a-f]+", "", repr(value)) for name, value in snapshot().items()}))
"""
# Differences while windows are open: variables of `run`, wrapt's finder, the process that finishes windows; and
# values that differ between any two processes.
OF_RUN = {"environment", "sys.meta_path", "threads", "sockets", "builtins", "sys.argv"}


def test_the_same_losses(tmp_path: Path) -> None:
    """A script that uses every random generator in each step trains bit-identically with the library."""
    script = programs.program(HEAD + TRAINING, tmp_path)
    plan = ["--wait", "1", "--active", "2", "--repeat", "2"]
    run = [sys.executable, "-m", "instrument", "run", "--out", "run", *plan, "--"]
    options: Any = {"cwd": tmp_path, "env": programs.environment(), "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    commands = [sys.executable, script], [sys.executable, script, "steps"], [*run, script]
    started = [subprocess.Popen(command, **options, **pipes) for command in commands]
    outputs = [program.communicate(timeout=200) for program in started]
    assert [0, 0, 0] == [program.returncode for program in started]
    *plain, last = outputs[0][0].splitlines()
    assert 13 == len(plain)
    assert "False" == plain[-1]
    for output, errors in outputs[1:]:
        *losses, seen = output.splitlines()
        assert plain == losses
        assert 1 == errors.count("Where the step went")
        changed = differences(json.loads(last), json.loads(seen))
        assert [] == [line for line in changed if line.split(":")[0] not in OF_RUN]
    for folder in ("steps", "run"):
        assert 2 == len(list((tmp_path / folder).glob("window-*/*.gz")))
