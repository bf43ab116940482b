"""DeepSpeed: steps of its engines, and its own ranges as regions."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from instrument.integrations import adapter
from instrument.integrations import deepspeed as integration
from instrument.integrations.deepspeed import attach
from instrument.integrations.loop import Loop
from tests.conftest import Events
from tests.integrations.trees import recorded as recorded_in
from tests.integrations.trees import traces, tree
from tests.support import nsys, warm
from tests.support.programs import ROOT, environment, python

pytestmark = pytest.mark.framework

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed: pip install deepspeed", allow_module_level=True)

SCRIPT = ROOT / "integrations/deepspeed/train.py"
IMPORTS = ("deepspeed",)  # of the script
PARTS = [
    "step", "micro-step", "forward", "Sequential", "backward", "DeepSpeedEngine.forward",
    "DeepSpeedEngine.backward", "DeepSpeedEngine.allreduce_gradients", "Optimizer.step",
]  # fmt: skip
MICRO_STEP = """\
  micro-step
    forward
      Sequential
    DeepSpeedEngine.backward
      backward
      DeepSpeedEngine.allreduce_gradients
"""
STEP = f"step\n{MICRO_STEP}{MICRO_STEP}  Optimizer.step#AdamW.step"


def start(*args: str | Path, **env: str) -> str:
    return warm.run([*python(SCRIPT), *args], environment(env), check=True, imports=IMPORTS).stdout


def losses(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("step ")]


@pytest.fixture(scope="module")
def annotated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("annotated")
    return folder, start("--out", folder)


def test_same_losses(annotated: tuple[Path, str], tmp_path: Path) -> None:
    """With and without this library, the script prints bit-identical losses."""
    plain = start("--out", tmp_path, INSTRUMENT="0")
    assert len(losses(plain)) == 12
    assert losses(plain) == losses(annotated[1])
    assert [] == list(tmp_path.iterdir())


def test_regions_of_the_script(annotated: tuple[Path, str]) -> None:
    """A step has two micro-steps, which contain DeepSpeed's own ranges once each."""
    assert tree(recorded_in(annotated[0]), PARTS) == f"{STEP}\n{STEP}"
    (line,) = (annotated[0] / "manifest.jsonl").read_text().splitlines()
    assert json.loads(line)["steps"] == [2, 3]


@pytest.mark.nsys
def test_nsight_systems(tmp_path: Path) -> None:
    """A report of Nsight Systems has the ranges."""
    report = nsys.profile(SCRIPT, tmp_path=tmp_path, args=["--out", str(tmp_path)], imports=IMPORTS)
    parts = [part for part in PARTS if part != "Sequential"]
    assert STEP.replace("      Sequential\n", "") in tree(nsys.ranges(report.file), parts)


@pytest.fixture(scope="module")
def deepspeed() -> Iterator[Any]:
    """Return the package on a CPU, in a job of one process."""
    values = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**values, "DS_ACCELERATOR": "cpu"}.items():
            patch.setenv(name, value)
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")
        yield deepspeed
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def deepspeed_is_restored(deepspeed: Any) -> Iterator[None]:
    def attributes() -> list[dict[str, Any]]:
        return [{name: value for name, value in vars(owner).items() if callable(value)} for owner in owners]

    owners = [
        owner
        for owner in integration.owners()
        if owner.__name__.startswith(("deepspeed.utils", "DeepSpeedEngine"))
    ]
    owners.append(type(deepspeed.accelerator.get_accelerator()))
    before = attributes()
    yield
    assert before == attributes()
    assert Loop.current() is None


def engine(deepspeed: Any, accumulate: int = 1) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulate,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(target: Any, batches: int, fail_at: int | None = None) -> list[float]:
    found = []
    for batch in range(batches):
        loss = target(torch.ones(1, 2)).sum()
        if batch == fail_at:
            raise RuntimeError("out of data")
        target.backward(loss)
        target.step()
        found.append(float(loss.detach()))
    return found


def steps(attached: Any) -> list[Any]:
    return [entry["steps"] for entry in attached.loop.windows if entry["status"] == "recorded"]


def test_existing_engine(deepspeed: Any, tmp_path: Path) -> None:
    """An existing engine is followed from its next step on, and trains after `detach`."""
    target = engine(deepspeed, accumulate=2)
    train(target, 6)
    with attach(tmp_path, at="4,6", engine=target) as attached:
        train(target, 4)
        train(target, 6)
    assert steps(attached) == [[4, 4], [6, 6]]
    assert tree(recorded_in(tmp_path), ["step", "micro-step"]) == "\n".join(
        ["step\n  micro-step\n  micro-step"] * 2
    )


def test_second_engine(deepspeed: Any, tmp_path: Path) -> None:
    """A second engine, and one in evaluation, make no steps."""
    first, other = engine(deepspeed), engine(deepspeed)
    with attach(tmp_path, at=1, active=1) as attached:
        for _ in range(3):
            train(first, 1)
            train(other, 1)
            first.eval()
            first(torch.ones(1, 2))
            first.train()
    assert steps(attached) == [[1, 1]]
    assert tree(recorded_in(tmp_path), ["step", "forward"]).count("step") == 1


def test_error_in_step(deepspeed: Any, tmp_path: Path) -> None:
    """After an error between forward and backward, `detach` leaves nothing open."""
    target = engine(deepspeed)
    attached = attach(tmp_path, at=1, active=5)
    with pytest.raises(RuntimeError, match="out of data"):
        train(target, 5, fail_at=3)
    attached.detach()
    attached.detach()
    assert not torch.autograd._profiler_enabled()
    assert not any(map(attached.loop.is_open, ("step", "forward", "backward")))
    (entry,) = attached.loop.windows
    assert ("partial", [1, 2], 3) == (entry["status"], entry["steps"], entry["cut_step"])


def test_error_in_forward(deepspeed: Any, tmp_path: Path) -> None:
    """An error in forward closes the step, and the next one counts."""
    target = engine(deepspeed)
    with attach(tmp_path, at=0, active=1) as attached:
        with pytest.raises(RuntimeError):
            target(torch.ones(1, 3))
        assert not any(map(attached.loop.is_open, ("step", "forward")))
        train(target, 2)
    assert steps(attached) == [[0, 0]]


@pytest.mark.usefixtures("lenient")
def test_failures_of_the_library(deepspeed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of this library does not change the losses."""
    expected = train(engine(deepspeed), 3)
    monkeypatch.setattr(Loop, "start", lambda *_, **__: 1 / 0)
    with attach(tmp_path):
        assert train(engine(deepspeed), 3) == expected


def test_ranges_left_open(deepspeed: Any, recorded: Any, tmp_path: Path) -> None:
    """Ranges that an error leaves open in DeepSpeed are closed, and later ranges are not nested in them."""
    from deepspeed.utils import nvtx

    accelerator = deepspeed.accelerator.get_accelerator()
    with attach(tmp_path, record=False):

        @nvtx.instrument_w_nvtx
        def fails() -> None:
            accelerator.range_push("inside")
            raise RuntimeError

        @nvtx.instrument_w_nvtx
        def follows() -> None:
            accelerator.range_push("pushed")
            accelerator.range_pop()

        def both() -> None:
            with pytest.raises(RuntimeError):
                fails()
            follows()
            accelerator.range_pop()  # without a push

        events: Events = recorded(both)
    names = [event["name"].rsplit(".")[-1] for event in events]
    assert names == ["fails", "inside", "follows", "pushed"]
    assert max(event["ts"] + event["dur"] for event in events[:2]) <= events[2]["ts"]


def test_compiled_functions(deepspeed: Any, tmp_path: Path) -> None:
    """Functions with DeepSpeed's decorator compile once and without a graph break, even under a profiler."""
    from deepspeed.utils import nvtx

    with attach(tmp_path, record=False):

        @nvtx.instrument_w_nvtx
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        counter = CompileCounter()
        compiled = torch.compile(double, backend=counter, fullgraph=True)
        assert compiled(torch.ones(2)).tolist() == [2, 2]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            assert compiled(torch.ones(2)).tolist() == [2, 2]
        assert counter.frame_count == 1


def test_checkpoint(deepspeed: Any, tmp_path: Path) -> None:
    """Writing a checkpoint is a region."""
    target = engine(deepspeed)
    with attach(tmp_path / "runs", at=0, active=3):
        train(target, 1)
        target.save_checkpoint(str(tmp_path / "saved"))
        train(target, 2)
    assert tree(recorded_in(tmp_path / "runs"), ["step", "checkpoint"]) == "step\ncheckpoint\nstep\nstep"


def test_install(deepspeed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`install` attaches once to the environment's loop, and has no effect without one."""
    adapters: list[integration.DeepSpeedAdapter] = []
    kind, attach_to = integration.DeepSpeedAdapter, integration.DeepSpeedAdapter.attach
    monkeypatch.setattr(kind, "attach", lambda made: adapters.append(made) or attach_to(made))
    for loop in (None, Loop(tmp_path, at=0, active=1)):
        monkeypatch.setattr(adapter, "loop_from_environment", lambda loop=loop: loop)
        integration.install.cache_clear()
        integration.install()
        integration.install()
    integration.install.cache_clear()
    train(engine(deepspeed), 2)
    (only,) = adapters
    only.detach()
    assert steps(only) == [[0, 0]]
    assert len(traces(tmp_path)) == 1


def test_wrong_arguments(tmp_path: Path) -> None:
    """An object that is not an engine is rejected."""
    with pytest.raises(TypeError, match='"engine" must be'):
        attach(tmp_path, engine=os)
