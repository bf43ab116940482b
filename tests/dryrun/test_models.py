"""Dry runs of models and training loops as people write them: every line that waits is found, and no other.

Lines that wait say so: `# waits 3: item` waits three times in all of the run.
"""

from __future__ import annotations

import inspect
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instrument.explain.waits.report import SyncReport
from instrument.syncs.dryrun.run import dry_run, dry_run_file

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.corpus, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")]

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, TOKENS = 3, 128
SIZES: dict[str, Any] = {
    "vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    ),
    "bert": lambda: transformers.BertConfig(**SIZES),
    "llama": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence Transformers, which logs through its own handler."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def build(name: str, **changes: Any) -> nn.Module:
    """Build a small model with random weights, the same each time."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    kind = (
        transformers.BertForMaskedLM
        if name == "bert"
        else transformers.AutoModelForCausalLM._model_mapping[type(config)]
    )
    return kind(config).train()


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Return the batches of a run, in memory as a DataLoader leaves them."""
    for seed in range(STEPS):
        tokens = torch.randint(TOKENS, (2, 16), generator=torch.Generator().manual_seed(seed))
        yield {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def careless(model: nn.Module, device: str, amp: bool = True) -> list[float]:
    """Train as the loops in tutorials do."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    scaler = torch.amp.GradScaler(device)
    losses = []
    for batch in batches():
        batch = {key: value.to(device) for key, value in batch.items()}  # waits 9: to
        with torch.autocast(device, dtype=torch.bfloat16, enabled=amp):
            loss = model(**batch).loss  # waits 3: bool
        if torch.isnan(loss):  # waits 3: bool
            raise RuntimeError("the loss is no number")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)  # waits 3: item
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits 3: item
        print(f"norm {norm:.3f}, rate {scheduler.get_last_lr()[0]}")  # waits 3: format
    model.eval()
    with torch.no_grad():
        logits = model(**batch).logits  # waits 1: bool
        right = logits.argmax(-1).cpu().numpy() == batch["labels"].cpu().numpy()  # waits 2: cpu
    print("accuracy", right.mean())
    return losses


def careful(model: nn.Module, device: str, amp: bool = True) -> list[torch.Tensor]:
    """Train like `careless`, without synchronizing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    scaler = torch.amp.GradScaler(device)
    losses, norms = [], []
    mask = torch.full((2, 1, 16, 16), float("-inf"), device=device).triu(1)
    for batch in batches():
        del batch["attention_mask"]  # which libraries ask whether it masks anything
        batch = {key: value.pin_memory().to(device, non_blocking=True) for key, value in batch.items()}
        with torch.autocast(device, dtype=torch.bfloat16, enabled=amp):
            loss = model(**batch, attention_mask=mask).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        logits = model(**batch, attention_mask=mask).logits
        (logits.argmax(-1) == batch["labels"]).float().mean()
    assert all(norm.shape == () for norm in norms)
    return losses


def expected(*functions: Callable[..., Any]) -> dict[tuple[int, str], int]:
    """Return how often each marked line of ``functions`` synchronizes, by its number and operation."""
    said: dict[tuple[int, str], int] = {}
    for function in functions:
        code, first = inspect.getsourcelines(function)
        for number, line in enumerate(code, first):
            for count, op in re.findall(r"(\d+): (\w+)", line.partition("# waits ")[2]):
                said[number, op] = int(count)
    return said


def found(report: SyncReport, file: str = __file__) -> dict[tuple[int, str], int]:
    """Return the same for a report, whose findings must all be at lines of ``file``."""
    assert report.error is None, report.error
    assert [str(one.cause) for one in report.not_covered] == []
    assert {one.site.file if one.site else None for one in report.syncs} <= {file}
    return {(one.site.line, one.op): one.count for one in report.syncs if one.site}


@pytest.mark.parametrize("name", CONFIGS)
def test_careless(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each synchronizing line is found with its number of times, in each step."""
    model = build(name)
    report = dry_run(lambda: careless(model, "cuda"), on_gpu=[model])
    assert found(report) == expected(careless)
    assert report.steps == STEPS
    assert capsys.readouterr().out.count("norm ") == STEPS


@pytest.mark.parametrize("name", CONFIGS)
def test_careful(name: str) -> None:
    """A loop that does not synchronize has no finding, with all that a GPU changes in it."""
    model = build(name)
    report = dry_run(lambda: careful(model, "cuda"), on_gpu=[model])
    assert found(report) == expected(careful) == {}
    report.assert_max(0)


@pytest.mark.parametrize("name", CONFIGS)
def test_losses(name: str) -> None:
    """The losses are bit for bit those of the CPU without a dry run."""
    losses: list[float] = []
    model = build(name)
    report = dry_run(lambda: losses.extend(careless(model, "cuda", amp=False)), on_gpu=[model])
    assert report.error is None
    assert losses == careless(build(name), "cpu", amp=False)
    assert model.device == torch.device("cpu")


def experts(model: nn.Module) -> None:
    """Run a step that calls the experts one by one."""
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(32, device="cuda").view(2, 16)
    mask = torch.zeros(2, 1, 16, 16, device="cuda")
    model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()  # waits 0: experts
    optimizer.step()


def test_mixtral_experts() -> None:
    """The loop over experts synchronizes at lines of the library, and the site is the user's line."""
    model = build("mixtral", _experts_implementation="eager")
    report = dry_run(lambda: experts(model), on_gpu=[model])
    ((line, _),) = expected(experts)
    assert {line} == {number for number, _ in found(report)}
    via = {one.op: one.via for one in report.syncs}
    assert set(via) == {"nonzero", "bool", "where", "getitem"}
    assert {Path(site.file).name for site in via.values() if site} == {"modeling_mixtral.py"}
    assert {op: part in site.code for op, part in PARTS.items() if (site := via[op])} == dict.fromkeys(PARTS, True)
    assert found(report)[line, "nonzero"] == 2  # one in each layer
    assert found(report)[line, "bool"] == found(report)[line, "where"] > 2


PARTS = {"nonzero": ".nonzero()", "bool": "if expert_idx == ", "where": "torch.where("}


def llama_7b() -> None:
    """Run a step of a model that this machine could not hold."""
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_738_415_616
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    tokens = torch.randint(32_000, (1, 512), pin_memory=True).to("cuda", non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)  # waits 1: bool
    optimizer.step()
    scheduler.step()
    print(loss.item())  # waits 1: item


def test_llama_7b() -> None:
    """A model of 7 billion parameters runs a step with shapes only."""
    report = dry_run(llama_7b, fake=True)
    assert found(report) == expected(llama_7b)
    assert report.steps == 1


@pytest.mark.parametrize("name", ["transformer.py", "transformer_annotated.py"])
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example runs unchanged on the pretended GPU, with its own losses; no window opens."""
    monkeypatch.chdir(tmp_path)
    path = EXAMPLES / name
    report = dry_run_file(path, None, args=["--steps", "6"])
    printed = capsys.readouterr().out
    lines = path.read_text().splitlines()
    expected = {
        ("model = nn.Sequential(*layers).to(args.device)", "to"): 27,
        ("tokens = batch.to(args.device)", "to"): 6,
        ('print(f"loss {loss.item():.4f}")', "item"): 6,
    }
    assert {
        (lines[line - 1].strip(), op): count for (line, op), count in found(report, str(path)).items()
    } == expected
    assert report.steps == 6
    assert not list(tmp_path.rglob("window-*"))
    monkeypatch.setattr(sys, "argv", [str(path), "--steps", "6"])
    runpy.run_path(str(EXAMPLES / "transformer.py"), run_name="__main__")
    assert printed == capsys.readouterr().out


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A data set of random tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(TOKENS, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(folder: str, **options: Any) -> list[float]:
    """Train and evaluate with the Trainer."""
    options = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, **options}
    arguments = transformers.TrainingArguments(folder, max_steps=STEPS, per_device_train_batch_size=4, **options)
    tokens = Tokens()
    found = transformers.Trainer(build("gpt2"), arguments, train_dataset=tokens, eval_dataset=tokens)  # to
    found.train()  # bool, item, tensor, to
    found.evaluate()  # bool, cpu, to
    return [entry["loss"] for entry in found.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "options",
    [{}, {"fp16": True}, {"bf16": True, "gradient_accumulation_steps": 2, "dataloader_num_workers": 1}],
    ids=["fp32", "fp16", "bf16"],
)
def test_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    """Transformers' Trainer trains and evaluates on the pretended GPU."""
    pytest.importorskip("accelerate")
    losses: list[float] = []
    report = dry_run(lambda: losses.extend(trainer(str(tmp_path), **options)))
    code, first = inspect.getsourcelines(trainer)
    expected = {
        (number, op)
        for number, line in enumerate(code, first)
        for op in re.findall(r"\w+", line.partition("  # ")[2])
    }
    assert {key for key in found(report) if key[1] != "empty_cache"} == expected
    assert len(losses) == report.steps == STEPS
    if not options:
        assert losses == trainer(str(tmp_path), use_cpu=True)
