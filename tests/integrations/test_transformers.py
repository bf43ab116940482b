"""`InstrumentCallback` in the Trainer of Hugging Face Transformers."""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.trainer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.generation.utils import GenerationMixin

from instrument import every
from instrument.base.errors import SyncError
from instrument.integrations import loop
from instrument.integrations import transformers as integration
from instrument.integrations.loop import Loop
from instrument.integrations.transformers import InstrumentCallback
from instrument.record.windows.profile import Profile
from tests.integrations.trees import counts, recorded, traces, tree
from tests.support import nsys, warm
from tests.support.programs import ROOT, python
from tests.support.programs import environment as clean

pytestmark = pytest.mark.framework

SCRIPT = ROOT / "integrations" / "transformers" / "train.py"
IMPORTS = ("accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2")  # of the script
NAMES = {
    "step", "micro-step", "forward", "backward", "evaluation", "checkpoint", "clip_grad_norm_", "Optimizer.step",
    "GPT2LMHeadModel", "enumerate(DataLoader)",
}  # fmt: skip
DATA = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__\n"
MICRO_STEP = "  micro-step\n    forward\n      GPT2LMHeadModel\n    backward\n"
STEP = f"step\n{MICRO_STEP * 2}  clip_grad_norm_\n  Optimizer.step#AdamW.step\n"
EVALUATION = f"evaluation\n  {DATA}  {DATA}  forward\n    GPT2LMHeadModel\n"  # asks for a batch too many
INDENT = "  "


def indented(text: str) -> str:
    return "".join(f"{INDENT}{line}\n" for line in text.splitlines())


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(("loss", "eval_loss"))]


@pytest.fixture(scope="module")
def plain() -> list[str]:
    """Return the losses that the script prints without this library."""
    return losses(warm.run(python(SCRIPT), clean({"INSTRUMENT": "0"}), check=True, imports=IMPORTS).stdout)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return the folder and the output of the script."""
    out = tmp_path_factory.mktemp("script") / "out"
    env = clean({"COLUMNS": "100"})
    return out, warm.run(python(SCRIPT, ["--out", str(out)]), env, check=True, imports=IMPORTS)


def test_same_losses(script: tuple[Path, subprocess.CompletedProcess[str]], plain: list[str]) -> None:
    """The losses of the script are bit-identical to those without this library."""
    assert len(plain) == 8
    assert plain == losses(script[1].stdout)


def test_regions_of_the_script(script: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Each recorded step has its batches, micro-steps and update, and the evaluation or checkpoint before it."""
    expected = "".join(
        [
            "ProfilerStep#2\n" + indented(DATA * 2 + STEP),
            "ProfilerStep#3\n" + indented(EVALUATION + DATA * 2 + STEP),
            "ProfilerStep#4\n" + indented("checkpoint\n" + DATA * 2 + STEP),
        ]
    )
    assert expected == tree(recorded(script[0]), {*NAMES, "ProfilerStep"}) + "\n"


def test_summary_is_logged_by_transformers(script: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """At default verbosity the summary is shown, as a log record of Transformers."""
    assert "[transformers] \nWhere the step went" in script[1].stderr


@pytest.mark.nsys
def test_nsight_systems(tmp_path: Path, plain: list[str]) -> None:
    """Under Nsight Systems every step of the run has its ranges."""
    report = nsys.profile(SCRIPT, tmp_path=tmp_path, args=["--out", str(tmp_path / "out")], imports=IMPORTS)
    found = [r for r in nsys.ranges(report.file) if r.kind == "push_pop"]
    step = DATA * 2 + STEP
    after = {3: EVALUATION, 4: "checkpoint\n", 6: EVALUATION + "checkpoint\n"}
    expected = "".join(step + after.get(number, "") for number in range(1, 7))
    assert DATA + expected == tree(found, NAMES) + "\n"  # the loader is one batch ahead
    assert plain == losses(report.stdout)


def test_two_ranks(tmp_path: Path) -> None:
    """Each rank writes a trace, and one rank prints the summary."""
    env = clean({"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"})
    done = warm.run(python(SCRIPT, ["--out", str(tmp_path / "out")]), env, check=True, ranks=2, imports=IMPORTS)
    assert ["rank0", "rank1"] == [path.name.split(".")[0] for path in traces(tmp_path / "out")]
    assert 1 == done.stderr.count("Where the step went")
    assert {"step": 6, "micro-step": 12, "backward": 12} == counts(
        recorded(tmp_path / "out"), ["step", "micro-step", "backward"]
    )


# In this process, with a smaller model.


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    assert Loop.current() is None
    assert "generate" in vars(GenerationMixin)
    assert "instrument" not in GenerationMixin.generate.__code__.co_filename


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def trainer(folder: Path, *callbacks: Any, kind: type[Trainer] = Trainer, **arguments: Any) -> Trainer:
    given: dict[str, Any] = {"max_steps": 5, "logging_steps": 1, "save_strategy": "no", **arguments}
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=2, report_to=[], disable_tqdm=True, use_cpu=True, **given
    )
    return kind(model(), args, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=list(callbacks))


def logged(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def windows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]


def steps(out: Path) -> list[Any]:
    return [entry["steps"] for entry in windows(out)]


def has_no_hooks(trained: Trainer) -> bool:
    """Return whether a Trainer, its model and its classes have no hook of this library."""
    methods = {*integration.REGIONS, *integration.LOOPS}
    hooks = [module for module in trained.model.modules() if module._forward_pre_hooks or module._forward_hooks]
    return not methods & {*vars(trained)} and hooks == []


class FailingCallback(TrainerCallback):
    """Raises ``error`` at an event."""

    def __init__(self, event: str, error: BaseException) -> None:
        self.error: BaseException | None = error
        setattr(self, event, self.fail)

    def fail(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        error, self.error = self.error, None
        if error is not None and state.global_step >= 2:
            raise error
        self.error = error


def test_the_first_steps_of_epochs(tmp_path: Path) -> None:
    """The lengths of a run say with which updates epochs begin; an evaluation begins none."""
    callback = InstrumentCallback(tmp_path / "out", at="4")
    arguments = {"gradient_accumulation_steps": 8, "eval_strategy": "steps", "eval_steps": 3}
    trainer(tmp_path, callback, **arguments).train()  # epochs of two updates
    (window,) = windows(tmp_path / "out")
    assert [0, 2, 4] == window["timing"]["lengths"]["epochs"]


def test_logs_of_the_trainer(tmp_path: Path) -> None:
    """`trainer.log` takes the numbers, and the Trainer logs the losses that it logs without it."""

    def history(log: Callable[..., Any]) -> list[dict[str, Any]]:
        callback = InstrumentCallback(
            tmp_path / "out", at="3", on_steps=every(1, lambda numbers: log(trained, numbers))
        )
        trained = trainer(tmp_path, callback, logging_steps=1)
        trained.train()
        return list(trained.state.log_history)

    plain, logged = history(lambda *_: None), history(lambda trained, numbers: trained.log(numbers))
    losses = [{each["step"]: each["loss"] for each in found if "loss" in each} for found in (plain, logged)]
    assert losses[0] == losses[1] != {}
    assert any("instrument/step" in each for each in logged)


def test_no_micro_steps_without_accumulation(tmp_path: Path) -> None:
    """Without accumulation, steps contain the forward and the backward directly."""
    trained = trainer(tmp_path, InstrumentCallback(tmp_path / "out", wait=1, warmup=0, active=2))
    trained.train()
    step = "step\n  forward\n    GPT2LMHeadModel\n  backward\n  clip_grad_norm_\n  Optimizer.step#AdamW.step\n"
    assert step * 2 == tree(recorded(tmp_path / "out"), NAMES - {"enumerate(DataLoader)"}) + "\n"


def test_callback_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class itself works as a callback, with default arguments."""
    monkeypatch.chdir(tmp_path)
    trainer(tmp_path, InstrumentCallback).train()
    assert [[2, 4]] == steps(tmp_path / "runs" / "instrument")


def test_wrong_arguments() -> None:
    """Wrong arguments fail in the constructor."""
    with pytest.raises(ValueError, match='"modules" must be'):
        InstrumentCallback(modules=-1)
    with pytest.raises(TypeError, match='unknown option "waiting"'):
        InstrumentCallback(waiting=1)


def test_second_training(tmp_path: Path) -> None:
    """A second training restarts the schedule, and no hook stays after either."""
    callback = InstrumentCallback(tmp_path / "out", wait=1, warmup=0, active=1, repeat=4)
    trained = trainer(tmp_path, callback, max_steps=4)
    for _ in range(2):
        trained.train()
        assert has_no_hooks(trained)
    assert [[1, 1], [3, 3], [1, 1], [3, 3]] == [entry for entry in steps(tmp_path / "out") if entry]


class FailsToStart(TrainerCallback):
    """Raises as training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        raise RuntimeError("no training")


def test_callback_that_fails_to_start(tmp_path: Path) -> None:
    """A training without an end event is ended by the next one on its thread, whose windows are recorded."""
    with pytest.raises(RuntimeError, match="no training"):
        trainer(tmp_path, InstrumentCallback(tmp_path / "a", at="0-9"), FailsToStart()).train()
    trained = trainer(tmp_path, InstrumentCallback(tmp_path / "b", at="1"))
    trained.train()
    assert [[1, 1]] == steps(tmp_path / "b")
    assert has_no_hooks(trained)


def test_copying_and_pickling(tmp_path: Path) -> None:
    """A callback can be copied and pickled with its Trainer's parts, before and after training."""
    callback = InstrumentCallback(tmp_path / "out", at="1")
    trained = trainer(tmp_path, callback)
    for _ in range(2):
        assert not copy.deepcopy(callback).loop.running
        assert not pickle.loads(pickle.dumps(callback)).loop.running
        trained.train()


def test_resumed_run(tmp_path: Path) -> None:
    """Steps are numbered over the whole run, in a new process and after a return to a checkpoint."""
    trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=2).train()
    callback = InstrumentCallback(tmp_path / "out", at=[2, 5], active=1)
    trained = trainer(tmp_path, callback, FailingCallback("on_step_end", RuntimeError("lost")), max_steps=6)
    with pytest.raises(RuntimeError, match="lost"):
        trained.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    trained.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    found = [(entry["steps"], entry["status"]) for entry in windows(tmp_path / "out") if entry["steps"]]
    assert [([2, 2], "recorded"), ([5, 5], "recorded")] == found
    assert {"step": 2} == counts(recorded(tmp_path / "out"), ["step"])


@pytest.mark.parametrize(
    ("event", "error"),
    [("on_step_begin", RuntimeError("lost")), ("on_epoch_end", RuntimeError("lost")),
     ("on_evaluate", RuntimeError("lost")), ("on_log", KeyboardInterrupt())],
)  # fmt: skip
def test_error_of_another_callback(tmp_path: Path, event: str, error: BaseException) -> None:
    """A training that fails leaves no running profiler, and the same Trainer trains again."""
    callback = InstrumentCallback(tmp_path / "out", wait=1, warmup=0, active=100)
    trained = trainer(tmp_path, callback, FailingCallback(event, error), eval_strategy="steps", eval_steps=2)
    with pytest.raises(type(error)):
        trained.train()
    assert not torch.autograd._profiler_enabled()
    assert not callback.loop.running
    assert has_no_hooks(trained)
    assert ["partial"] == [entry["status"] for entry in windows(tmp_path / "out")]
    trained.train()
    assert has_no_hooks(trained)


def test_error_inside_the_model(tmp_path: Path) -> None:
    """Regions that an error leaves open are closed, so the trace before the error is complete."""
    trained = trainer(tmp_path, InstrumentCallback(tmp_path / "out", wait=0, warmup=0, active=100), max_steps=4)
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("lost")

    trained.model.transformer.h[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="lost"):
        trained.train()
    (entry,) = windows(tmp_path / "out")
    assert "the loop ended in step 2: RuntimeError: lost" == entry["reason"]
    assert {"step": 3, "forward": 3, "backward": 2} == counts(
        recorded(tmp_path / "out"), ["step", "forward", "backward"]
    )


class OwnLoss(Trainer):
    """A Trainer with its own loss, which calls the inherited one."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def test_overridden_method(tmp_path: Path) -> None:
    """An overridden method is one region."""
    trained = trainer(tmp_path, InstrumentCallback(tmp_path / "out", wait=0, warmup=0, active=2), kind=OwnLoss)
    trained.train()
    assert {"forward": 2} == counts(recorded(tmp_path / "out"), ["forward"])
    assert OwnLoss.compute_loss is vars(OwnLoss)["compute_loss"]


def test_nested_trainer(tmp_path: Path) -> None:
    """A Trainer that runs inside a callback of another has no regions."""
    other = trainer(tmp_path / "other")

    class Evaluates(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            other.evaluate()

    out = tmp_path / "out"
    trainer(tmp_path, InstrumentCallback(out, wait=0, warmup=0, active=2), Evaluates()).train()
    assert {"evaluation": 0, "forward": 2} == counts(recorded(out), ["evaluation", "forward"])


def test_evaluation_outside_of_training(tmp_path: Path) -> None:
    """An evaluation outside training has no steps, and nothing is recorded."""
    trained = trainer(tmp_path, InstrumentCallback(tmp_path / "out"))
    assert 0 < trained.evaluate()["eval_loss"]
    assert not (tmp_path / "out").exists()


def test_prediction_and_evaluation_at_the_start(tmp_path: Path) -> None:
    """Prediction and evaluation are the region "evaluation", at any time in training."""

    class Predicts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trained.predict(Tokens())

    callback = InstrumentCallback(tmp_path / "out", wait=0, warmup=0, active=2)
    trained = trainer(tmp_path, callback, Predicts(), max_steps=2, eval_on_start=True)
    trained.train()
    assert {"evaluation": 2, "step": 2} == counts(recorded(tmp_path / "out"), ["evaluation", "step"])


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of a Trainer without this library."""
    trained = trainer(tmp_path_factory.mktemp("plain"))
    trained.train()
    return logged(trained)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("internal")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(integration, "_callers"), (integration.TrainerAdapter, "install_hooks"), (integration.Adapter, "wrap"),
     (Profile, "step"), (Profile, "start"), (Loop, "start")],
)  # fmt: skip
@pytest.mark.usefixtures("lenient")
def test_failures_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_losses: list[float], owner: Any, name: str
) -> None:
    """If any part of this library fails, the training has the same losses."""
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, broken)
        callback = InstrumentCallback(tmp_path / "out")
        trained = trainer(tmp_path, callback)
        trained.train()
    assert plain_losses == logged(trained)
    callback.loop.stop()  # may have started before the failure


def test_sync_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At level "error" a synchronization ends the training, and no hook stays."""

    def synchronizes(_: Profile) -> None:
        raise SyncError("waited")

    monkeypatch.setattr(Profile, "step", synchronizes)
    trained = trainer(tmp_path, InstrumentCallback(tmp_path / "out", syncs="error"))
    with pytest.raises(SyncError):
        trained.train()
    assert has_no_hooks(trained)


def test_summary_shows_at_any_verbosity(tmp_path: Path) -> None:
    """A requested summary is logged even if Transformers is set to be silent."""
    logger = logging.getLogger("transformers.trainer")
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    before = transformers.logging.get_verbosity()
    logger.addHandler(handler)
    try:
        transformers.logging.set_verbosity_error()
        trainer(tmp_path, InstrumentCallback(tmp_path / "out"), log_level="error").train()
    finally:
        transformers.logging.set_verbosity(before)
        logger.removeHandler(handler)
    assert "Where the step went" in text.getvalue()


@pytest.fixture
def requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of the loop that the environment requests."""
    out = tmp_path / "automatic"
    monkeypatch.setenv("INSTRUMENT_RUN", json.dumps({"out": str(out), "wait": 1, "warmup": 0, "active": 2}))
    loop.loop_from_environment.cache_clear()
    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", list(transformers.trainer.DEFAULT_CALLBACKS))
    yield out
    loop.loop_from_environment.cache_clear()


def test_installed_for_every_trainer(tmp_path: Path, requested: Path) -> None:
    """Trainers created after `install`, however often it is called, drive the loop of the environment."""
    integration.install()
    integration.install()
    trained = trainer(tmp_path)
    trained.train()
    assert [[1, 2]] == steps(requested)
    assert {"step": 2, "forward": 2} == counts(recorded(requested), ["step", "forward"])
    assert has_no_hooks(trained)


def test_explicit_callback_takes_precedence(tmp_path: Path, requested: Path) -> None:
    """A Trainer with its own callback is recorded by that callback alone."""
    integration.install()
    trainer(tmp_path, InstrumentCallback(tmp_path / "own", wait=0, warmup=0, active=1)).train()
    assert [[0, 0]] == steps(tmp_path / "own")
    assert not requested.exists()


def test_not_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the environment variable nothing is installed."""
    monkeypatch.delenv("INSTRUMENT_RUN", raising=False)
    loop.loop_from_environment.cache_clear()
    before = list(transformers.trainer.DEFAULT_CALLBACKS)
    integration.install()
    assert before == transformers.trainer.DEFAULT_CALLBACKS
