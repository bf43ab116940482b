"""Small typical trainings, and the outcome of each."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.net import Net

Outcome = dict[str, Any]
BATCHES = 8
PLAN = {"wait": 1, "warmup": 1, "active": 2}
MODULES = {
    "transformers": ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "accelerate"),
    "accelerate": ("accelerate",),
    "lightning": ("lightning.pytorch",),
    "lightning_profiler": ("lightning.pytorch",),
}
"""The modules to import before the processes of a scenario are forked."""


def outcome(losses: list[float], model: nn.Module, calls: Counter[str]) -> Outcome:
    """Return the losses, a digest of the parameters, and the numbers of calls of the user's functions."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return {"losses": [float(loss).hex() for loss in losses], "parameters": digest.hexdigest(), "calls": calls}


def batches(count: int = BATCHES) -> Any:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.DataLoader(torch.randn(4 * count, 4, generator=generator), batch_size=4)


def steps(plain: bool) -> Outcome:
    """Train in a hand-written loop with regions, modules, step parts and `steps`."""
    torch.manual_seed(0)
    model, calls = Net(), Counter[str]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def augmented(batch: torch.Tensor) -> Iterator[torch.Tensor]:
        calls["augmented"] += 1
        yield batch * 2
        yield batch + 1

    def loss_of(batch: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        calls["loss_of"] += 1
        return model(batch).square().mean() * scale

    class Metrics:
        def __init__(self) -> None:
            self.losses: list[float] = []

        def update(self, loss: torch.Tensor) -> None:
            calls["update"] += 1
            self.losses.append(loss.item())

    def train(iterable: Any, annotate: Any, mark: Any) -> list[float]:
        metrics = Metrics()
        for batch in iterable:
            with annotate("forward"):
                loss: Any = sum(loss_of(part, scale=0.5) for part in augmented(batch))
            loss.backward()
            with annotate("clipping"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            metrics.update(loss)
            mark("updated")
        return metrics.losses

    if plain:
        losses = train(batches(), contextlib.nullcontext, lambda name: None)
        return outcome(losses, model, calls)
    import instrument

    augmented = instrument.annotate("augmented", color="green")(augmented)
    loss_of = instrument.annotate(loss_of)
    Metrics = instrument.annotate(Metrics)  # type: ignore[misc]
    modules = instrument.annotate_modules(model, depth=2, shapes=True)
    with instrument.annotate_step():
        losses = train(instrument.steps(batches(), "out", **PLAN), instrument.annotate, instrument.mark)
    modules.remove()
    return outcome(losses, model, calls)


def memory(plain: bool) -> Outcome:
    """Train with the memory of each window, by a stub of torch's allocator, in which an allocation fails."""
    torch.manual_seed(0)
    model, losses, failures = Net(), [], Counter[str]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    allocator: Any = None
    if not plain:
        import pytest

        from tests.support.allocator import Allocator

        allocator = Allocator()
        allocator.install(pytest.MonkeyPatch())

    def train(step: Any, annotate: Any) -> Outcome:
        for number, batch in enumerate(batches()):
            with annotate("forward"):
                loss = model(batch).square().mean()
            try:
                if number == 5:
                    if not plain:
                        allocator.run_out()
                    raise torch.OutOfMemoryError
                if not plain:
                    allocator.allocate()
            except torch.OutOfMemoryError:
                failures["out of memory"] += 1
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step()
        return outcome(losses, model, failures)

    if plain:
        return train(lambda: None, contextlib.nullcontext)
    import instrument

    history = instrument.memory_history(every="0.001s", size="1kB")
    with instrument.profile("out", schedule="2-3,6-7", memory=history, exporter="none") as prof:
        found = train(prof.step, instrument.annotate)
    assert not allocator.on
    return found


def plain_loop(calls: Counter[str]) -> Outcome:
    """Train in a loop without any call of the library."""
    torch.manual_seed(0)
    model, losses = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, batch in enumerate(batches(2 * BATCHES)):
        calls["batch"] += 1
        loss = model(batch).square().mean()
        loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return outcome(losses, model, calls)


def run(plain: bool) -> Outcome:
    """Train in a script as `instrument run` starts it."""
    if not plain:
        options = {"out": str(Path("out").absolute()), "names": "class", "modules": 4, **PLAN}
        os.environ["INSTRUMENT_RUN"] = json.dumps(options)
        os.environ["INSTRUMENT_RUN_PROCESS"] = str(os.getpid())
        _site()
    return plain_loop(Counter())


def _site() -> None:
    """Import ``sitecustomize`` as Python does at its start: errors in it are printed and ignored."""
    sys.modules["sitecustomize"] = types.ModuleType("sitecustomize")
    with contextlib.suppress(KeyboardInterrupt):
        try:
            importlib.import_module("instrument.start.bootstrap.site.sitecustomize")
        except Exception:
            sys.excepthook(*sys.exc_info())


def transformers(plain: bool) -> Outcome:
    """Train with the Trainer: accumulated gradients, evaluations and checkpoints."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Tokens(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": tokens, "labels": tokens}

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    calls = Counter[str]()

    class CountingTrainer(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            calls["compute_loss"] += 1
            return super().compute_loss(*args, **kwargs)

    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    args = TrainingArguments(
        "trained", max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
        eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=3, report_to=[], disable_tqdm=True,
        use_cpu=True,
    )  # fmt: skip
    callbacks: list[Any] = []
    if not plain:
        from instrument.integrations.transformers import InstrumentCallback

        callbacks.append(InstrumentCallback("out", **PLAN))
    trainer = CountingTrainer(model, args, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=callbacks)
    trainer.train()
    losses = [
        entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry
    ]
    return outcome(losses, model, calls)


def accelerate(plain: bool) -> Outcome:
    """Train in a loop with an Accelerator: accumulated gradients and a checkpoint."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if not plain:
        from instrument.integrations.accelerate import attach

        attach("out", accelerator=accelerator, **PLAN)
    net, losses, calls = Net(), [], Counter[str]()
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2), batches(2 * BATCHES)
    )
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            calls["batch"] += 1
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if number == 5:
            accelerator.save_state("state")
    accelerator.end_training()
    return outcome(losses, net, calls)


def lightning(plain: bool) -> Outcome:
    """Train with a Lightning Trainer and the callback."""
    if plain:
        return fit()
    from instrument.integrations.lightning import InstrumentCallback

    return fit(callbacks=[InstrumentCallback("out", **PLAN)])


def lightning_profiler(plain: bool) -> Outcome:
    """Train with a Lightning Trainer and the profiler."""
    if plain:
        return fit()
    from instrument.integrations.lightning import InstrumentProfiler

    return fit(profiler=InstrumentProfiler("out", **PLAN))


def fit(**options: Any) -> Outcome:
    """Train with Lightning and accumulated gradients, and validate."""
    import lightning.pytorch as pl

    calls, losses = Counter[str](), []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            calls["training_step"] += 1
            loss = self.net(batch).square().mean()
            losses.append(loss.item())
            return loss

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            calls["validation_step"] += 1
            losses.append(self.net(batch).mean().item())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    module = Module()
    pl.Trainer(
        max_epochs=1, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir="lit", **options,
    ).fit(module, batches(2 * BATCHES), batches(2))  # fmt: skip
    return outcome(losses, module, calls)


def server(plain: bool) -> Outcome:
    """Serve requests, with windows that a call, a file and a signal open."""
    torch.manual_seed(0)
    model, losses, calls = Net(), [], Counter[str]()
    adapter: Any = None
    signal.signal(signal.SIGUSR1, lambda *_: calls.update(signal=1))
    if not plain:
        from instrument.integrations.server import Server

        Path("trigger").touch()
        adapter = Server("out", active=2, file="trigger", signal=signal.SIGUSR1)
        adapter.attach(model)
        adapter.start_profile()
    for number in range(BATCHES):
        losses.append(model(torch.full((2, 4), float(number))).mean().item())
        if number == 4:
            signal.raise_signal(signal.SIGUSR1)
        if adapter is not None:
            adapter.step()
    if adapter is not None:
        adapter.stop_profile()
        adapter.detach()
    return outcome(losses, model, calls)


SCENARIOS: dict[str, Callable[[bool], Outcome]] = {
    "steps": steps,
    "run": run,
    "transformers": transformers,
    "accelerate": accelerate,
    "lightning": lightning,
    "lightning_profiler": lightning_profiler,
    "server": server,
    "memory": memory,
}


def patched_attributes() -> dict[str, Any]:
    """Return the attributes that the library patches temporarily, with their current values."""
    from torch.autograd.profiler import record_function

    places: list[tuple[Any, str]] = [
        (nn.Module, "__getstate__"), (nn.Module, "compile"), (torch.autograd, "backward"), (torch.Tensor, "to"),
        (torch.Tensor, "cuda"), (torch.Tensor, "copy_"), (record_function, "__enter__"),
        (record_function, "__exit__"), (torch.no_grad, "__enter__"), (torch.no_grad, "__exit__"),
        (torch.distributed.ProcessGroup, "allreduce"), (torch.amp.GradScaler, "step"),
    ]  # fmt: skip
    for name, owner, method in (
        ("accelerate", "Accelerator", "prepare"),
        ("accelerate", "Accelerator", "accumulate"),
        ("accelerate.optimizer", "AcceleratedOptimizer", "step"),
        ("lightning.pytorch", "Trainer", "__init__"),
    ):
        kind = getattr(sys.modules.get(name), owner, None)
        if kind is not None:
            places.append((kind, method))
    return {f"{owner.__name__}.{name}": (owner, name, vars(owner).get(name)) for owner, name in places}


def leftovers(before: dict[str, Any]) -> list[str]:
    """Return the attributes that differ from ``before``, and the profiler if it still records."""
    found = [place for place, (owner, name, value) in before.items() if vars(owner).get(name) is not value]
    if (getattr(signal.getsignal(signal.SIGUSR1), "__module__", None) or "").startswith("instrument."):
        found.append("a signal handler")
    return [*found, *(["a recording"] if torch.autograd._profiler_enabled() else [])]
