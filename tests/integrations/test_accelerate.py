"""The adapter for the `Accelerator` of Hugging Face Accelerate."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProfileKwargs

from instrument.integrations import accelerate as integration
from instrument.integrations.accelerate import AccelerateAdapter, attach
from instrument.integrations.loop import Loop
from instrument.record.windows.profile import Profile
from tests.integrations.trees import counts, recorded, tree
from tests.support import nsys, warm
from tests.support.net import Net
from tests.support.programs import ROOT, environment, python

pytestmark = pytest.mark.framework

SCRIPT = ROOT / "integrations" / "accelerate" / "train.py"
IMPORTS = ("accelerate", "transformers.models.gpt2.modeling_gpt2")  # of the script
NAMES = {"micro-step", "backward", "checkpoint", "clip_grad_norm_", "Optimizer.step", "GPT2LMHeadModel"}
MICRO_STEP = "micro-step\n  GPT2LMHeadModel\n  backward\n"
STEP = f"{MICRO_STEP * 2}  clip_grad_norm_\n  Optimizer.step#AdamW.step\n"


adapters = weakref.WeakKeyDictionary[Accelerator, AccelerateAdapter]()  # the last one of each


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("loss")]


@pytest.fixture(scope="module")
def unchanged() -> list[str]:
    """Return the losses that the script prints without this library."""
    return losses(warm.run(python(SCRIPT), environment({"INSTRUMENT": "0"}), check=True, imports=IMPORTS).stdout)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return the folder and the output of the script."""
    out = tmp_path_factory.mktemp("script") / "out"
    env = environment({"COLUMNS": "100"})
    return out, warm.run(python(SCRIPT, ["--out", str(out)]), env, check=True, imports=IMPORTS)


def test_same_losses(script: tuple[Path, subprocess.CompletedProcess[str]], unchanged: list[str]) -> None:
    """The losses of the script are bit-identical to those without this library."""
    assert 12 == len(unchanged)
    assert unchanged == losses(script[1].stdout)
    assert "Where the step went" in script[1].stderr


def test_regions_of_the_script(script: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Each recorded step has its micro-steps, its update, and the checkpoint before it."""
    step = "".join(f"  {line}\n" for line in STEP.splitlines())
    expected = f"ProfilerStep#2\n{step}ProfilerStep#3\n{step}ProfilerStep#4\n  checkpoint\n{step}"
    assert expected == tree(recorded(script[0]), {*NAMES, "ProfilerStep"}) + "\n"


@pytest.mark.nsys
def test_nsight_systems(tmp_path: Path, unchanged: list[str]) -> None:
    """Under Nsight Systems every step of the run has its ranges."""
    report = nsys.profile(SCRIPT, tmp_path=tmp_path, args=["--out", str(tmp_path / "out")], imports=IMPORTS)
    found = [r for r in nsys.ranges(report.file) if r.kind == "push_pop"]
    assert STEP * 4 + "checkpoint\n" + STEP * 2 == tree(found, NAMES) + "\n"
    assert unchanged == losses(report.stdout)


# In this process, with a smaller model.

Out = Path


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    assert Loop.current() is None
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Training:
    """A typical hand-written loop."""

    def __init__(self, accelerator: Accelerator, *, scheduled: bool = False) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerator
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)
        self.model, self.optimizer, self.loader = accelerator.prepare(net, optimizer, loader)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer) if scheduled else None
        self.losses: list[float] = []

    def run(self, batches: int) -> None:
        for number, batch in enumerate(self.loader):
            if number == batches:
                break
            with self.accelerator.accumulate(self.model):
                loss = self.model(batch).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                if self.scheduler is not None:
                    self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())


def accelerator(steps: int = 1, **arguments: Any) -> Accelerator:
    return Accelerator(cpu=True, gradient_accumulation_steps=steps, **arguments)


def attached(accelerator: Accelerator, out: Path | None = None, **options: Any) -> Accelerator:
    """Attach to ``accelerator`` and return it."""
    adapters[accelerator] = attach(out, accelerator=accelerator, **options)
    return accelerator


def windows(out: Path) -> list[Any]:
    return [json.loads(line)["steps"] for line in (out / "manifest.jsonl").read_text().splitlines()]


def test_accelerator_is_restored(tmp_path: Path) -> None:
    """The accelerator keeps its class, and is as before once the adapter is detached."""
    given = accelerator()
    before = dict(vars(given))
    adapter = attach(tmp_path / "out", accelerator=given)
    assert type(given) is Accelerator
    training = Training(given)
    training.run(3)
    adapter.detach()
    assert set(before) == set(vars(given))
    assert "step" not in vars(training.optimizer)
    assert all(not module._forward_hooks for module in training.model.modules())
    assert [[2, 2]] == windows(tmp_path / "out")
    adapter.detach()


def test_end_of_training(tmp_path: Path) -> None:
    """``end_training`` detaches, and the loop may continue."""
    training = Training(attached(accelerator(), tmp_path / "out", wait=0, warmup=0, active=2))
    training.run(3)
    training.accelerator.end_training()
    assert {"instrument", "_instrument"}.isdisjoint(vars(training.accelerator))
    training.run(3)
    assert [[0, 1]] == windows(tmp_path / "out")


def test_updates_are_steps(tmp_path: Path) -> None:
    """Updates are steps; batches that only accumulate gradients are not."""
    training = Training(attached(accelerator(3), tmp_path / "out", wait=1, warmup=0, active=2))
    training.run(12)
    adapters[training.accelerator].detach()
    found = recorded(tmp_path / "out")
    assert {"micro-step": 6, "backward": 6, "Net": 6} == counts(found, ["micro-step", "backward", "Net"])


def test_no_micro_steps_without_accumulation(tmp_path: Path) -> None:
    """Without accumulation, the body of ``accumulate`` is a whole step and has no region "micro-step"."""
    training = Training(attached(accelerator(), tmp_path / "out", wait=0, warmup=0, active=2))
    training.run(3)
    adapters[training.accelerator].detach()
    assert {"micro-step": 0, "backward": 2} == counts(recorded(tmp_path / "out"), ["micro-step", "backward"])


def test_skipped_updates_are_steps(tmp_path: Path) -> None:
    """An update that the gradient scaler skips is a step."""
    training = Training(attached(accelerator(), tmp_path / "out", wait=0, warmup=0, active=2))
    training.optimizer._is_overflow = True
    training.run(3)
    training.optimizer._is_overflow = False
    training.run(3)
    adapters[training.accelerator].detach()
    assert {"backward": 2} == counts(recorded(tmp_path / "out"), ["backward"])


def test_copy_of_the_optimizer(tmp_path: Path) -> None:
    """A copied optimizer updates its own parameters, and its steps do not count."""
    training = Training(attached(accelerator(), tmp_path / "out", wait=0, warmup=0, active=2))
    other = copy.deepcopy(training.optimizer)
    (parameter,) = other.param_groups[0]["params"][:1]
    parameter.grad = torch.ones_like(parameter)
    before = parameter.detach().clone()
    other.step()
    assert not torch.equal(before, parameter)
    adapters[training.accelerator].detach()
    assert not torch.autograd._profiler_enabled()


def test_free_memory(tmp_path: Path) -> None:
    """`free_memory` frees the model, and steps of an optimizer prepared later count."""
    attached_accelerator = attached(accelerator(), tmp_path / "out", at="5")
    training = Training(attached_accelerator)
    training.run(3)
    reference = weakref.ref(training.model)
    del training
    attached_accelerator.free_memory()
    gc.collect()
    assert reference() is None
    Training(attached_accelerator).run(4)
    adapters[attached_accelerator].detach()
    entries = [json.loads(line) for line in (tmp_path / "out/manifest.jsonl").read_text().splitlines()]
    assert [(entry["status"], entry["steps"]) for entry in entries] == [("recorded", [5, 5])]


def test_attach_after_prepare(tmp_path: Path) -> None:
    """`attach` may be called after everything is prepared."""
    training = Training(accelerator())
    attached(training.accelerator, tmp_path / "out", wait=0, warmup=0, active=2)
    training.run(3)
    adapters[training.accelerator].detach()
    assert {"Net": 2} == counts(recorded(tmp_path / "out"), ["Net"])


def test_two_optimizers(tmp_path: Path) -> None:
    """Of several optimizers, the steps of the one prepared first count."""
    training = Training(attached(accelerator(), tmp_path / "out", wait=0, warmup=0, active=2))
    other = training.accelerator.prepare(torch.optim.Adam(training.model.parameters()))
    for _ in range(2):
        training.run(1)
        other.step()
    adapters[training.accelerator].detach()
    assert [[0, 1]] == windows(tmp_path / "out")


def test_another_accelerator(tmp_path: Path) -> None:
    """Models and steps of an accelerator without an adapter stay uninstrumented, whichever prepares first."""
    first, second = Accelerator(), Accelerator()
    with attach(tmp_path, accelerator=first, schedule="0-99") as adapter:
        Training(second).run(2)
        assert adapter.windows == []
        training = Training(first)
        training.run(3)
        Training(second).run(2)
    (entry,) = adapter.windows
    assert entry["steps"] == [0, 2]


def test_scheduler_that_wraps_the_step(tmp_path: Path) -> None:
    """A scheduler that replaces the optimizer's method keeps working, while attached and after."""
    expected = Training(accelerator(), scheduled=True)
    expected.run(6)
    training = Training(attached(accelerator(), tmp_path / "out"), scheduled=True)
    training.run(3)
    adapters[training.accelerator].detach()
    training.run(3)
    assert [[2, 2]] == windows(tmp_path / "out")
    assert expected.losses[:3] == training.losses[:3]


def test_error_inside_a_step(tmp_path: Path) -> None:
    """After an error, the region of the step is closed and recording continues."""
    training = Training(attached(accelerator(2), tmp_path / "out", wait=0, warmup=0, active=2))
    with pytest.raises(RuntimeError, match="lost"), training.accelerator.accumulate(training.model):
        raise RuntimeError("lost")
    training.run(4)
    adapters[training.accelerator].detach()
    assert {"micro-step": 4} == counts(recorded(tmp_path / "out"), ["micro-step"])


def test_resumed_run(tmp_path: Path) -> None:
    """Steps are numbered over the whole run."""
    training = Training(attached(accelerator(), tmp_path / "out", at=101, active=1, first_step=100))
    training.run(3)
    adapters[training.accelerator].detach()
    assert [[101, 101]] == windows(tmp_path / "out")


def test_second_adapter(tmp_path: Path) -> None:
    """A second adapter detaches the first."""
    training = Training(attached(accelerator(), tmp_path / "one", wait=0, warmup=0, active=9))
    training.run(2)
    attached(training.accelerator, tmp_path / "two", wait=0, warmup=0, active=1)
    training.run(2)
    adapters[training.accelerator].detach()
    assert [[[0, 1]], [[0, 0]]] == [windows(tmp_path / "one"), windows(tmp_path / "two")]


def test_checkpoints(tmp_path: Path) -> None:
    """Saving the state or the model is the region "checkpoint", and both files are written."""
    training = Training(attached(accelerator(), tmp_path / "out", wait=0, warmup=0, active=2))
    training.run(1)
    training.accelerator.save_state(str(tmp_path / "state"))
    training.accelerator.save_model(training.model, str(tmp_path / "model"))
    training.run(1)
    pickle.loads(pickle.dumps(training.model))
    adapters[training.accelerator].detach()
    assert {"checkpoint": 2} == counts(recorded(tmp_path / "out"), ["checkpoint"])
    assert (tmp_path / "state" / "optimizer.bin").exists()


OPTIONS = {"activities": ["cpu"], "record_shapes": True, "schedule_option": {"wait": 1, "warmup": 1, "active": 1}}


@pytest.mark.parametrize("given", [True, False])
def test_profile_kwargs(tmp_path: Path, given: bool) -> None:
    """A `ProfileKwargs`, given or found in the accelerator, has its usual meaning."""
    called = []
    profile = ProfileKwargs(
        **OPTIONS, output_trace_dir=str(tmp_path / "out"), on_trace_ready=lambda p: called.append(p.key_averages())
    )
    target = accelerator(kwargs_handlers=[] if given else [profile])
    training = Training(attached(target, profile=profile) if given else attached(target))
    training.run(7)
    adapters[target].detach()
    assert [[2, 2], [5, 5]] == windows(tmp_path / "out")[:2]
    assert 2 == len(called)


def test_arguments_override_profile_kwargs(tmp_path: Path) -> None:
    """Arguments take precedence over a `ProfileKwargs`."""
    profile = ProfileKwargs(**OPTIONS, output_trace_dir=str(tmp_path / "other"))
    target = accelerator()
    training = Training(attached(target, tmp_path / "out", profile=profile, wait=0, warmup=0, active=2))
    training.run(3)
    adapters[target].detach()
    assert [[0, 1]] == windows(tmp_path / "out")
    assert not (tmp_path / "other").exists()


def test_wrong_arguments() -> None:
    """Wrong arguments fail at once and leave the accelerator unchanged."""
    target = accelerator()
    before = dict(vars(target))
    for arguments, message in [
        ({"first_step": -1}, '"first_step" must be an integer >= 0: -1'),
        ({"profile": 3}, '"profile" must be an accelerate.utils.ProfileKwargs: 3'),
        ({"profile": ProfileKwargs(activities=["abacus"])}, "\"activities\" must be some of .*: 'abacus'"),
        ({"modules": -1}, '"modules" must be'),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            attach(accelerator=target, **arguments)
    with pytest.raises(TypeError, match='"accelerator" must be'):
        attach(accelerator=3)  # type: ignore[arg-type, unused-ignore]
    assert before == vars(target)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("internal")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(integration.AccelerateAdapter, "wrap"), (Profile, "step"), (Loop, "start"), (Loop, "name")],
)
@pytest.mark.usefixtures("lenient")
def test_failures_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """If any part of this library fails, the loop has the same losses."""
    expected = Training(accelerator())
    expected.run(4)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, broken)
        training = Training(accelerator())
        adapter = attach(tmp_path / "out", accelerator=training.accelerator)
        training.run(4)
    assert expected.losses == training.losses
    adapter.detach()
