"""The models whose steps NeuSight measured, as plain programs of transformers, and their calls without a GPU.

Attention is that of the transformers of that time: its scores pass through other operators today. With ``today``
the programs run what the installed transformers run.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from instrument.forecast.operations import Tensor, operation_of
from instrument.forecast.timeline import StepCall

MODELS = {
    "bert_large": transformers.BertForPreTraining,
    "gpt2_large": transformers.GPT2LMHeadModel,
    "opt_13": transformers.OPTForCausalLM,
}
_LEAST_SCORE = -3e38


def _scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.matmul(query, key.transpose(-1, -2))


def _mixed(scores: torch.Tensor, value: torch.Tensor, module: torch.nn.Module, dropout: float) -> tuple[Any, None]:
    weights = functional.dropout(functional.softmax(scores, dim=-1), dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


def _gpt2(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **_: Any) -> Any:
    scores = _scores(query, key)
    scores = scores / torch.full([], value.size(-1) ** 0.5, dtype=scores.dtype, device=scores.device)
    if not hasattr(module, "causal"):
        module.causal = torch.ones(1, 1, *scores.shape[-2:], dtype=torch.bool, device=scores.device)
    scores = torch.where(
        module.causal, scores, torch.full([], _LEAST_SCORE, dtype=scores.dtype, device=scores.device)
    )
    return _mixed(scores, value, module, dropout)


def _bert(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **_: Any) -> Any:
    scores = _scores(query, key) / math.sqrt(query.size(-1))
    scores = scores + torch.zeros(query.size(0), 1, 1, key.size(-2), device=scores.device)
    return _mixed(scores, value, module, dropout)


def _opt(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **_: Any) -> Any:
    batch, _, length, _ = query.shape
    query, key, value = (each.contiguous() for each in (query, key, value))
    scores = _scores(query, key) + torch.zeros(batch, 1, length, length, device=query.device)
    scores = torch.max(scores, torch.tensor(_LEAST_SCORE, dtype=scores.dtype, device=scores.device))
    return _mixed(scores, value, module, dropout)


for _name, _attention in (("gpt2", _gpt2), ("bert", _bert), ("opt", _opt)):
    transformers.AttentionInterface.register(f"then_{_name}", _attention)


def attention_then(kind: str) -> str:
    """Return the name of the attention that models of a kind had when they were measured."""
    return f"then_{kind}"


def _network(folder: Path, model: str, today: bool) -> torch.nn.Module:
    data = json.loads((folder / "models" / f"{model}.json").read_text())
    config = transformers.CONFIG_MAPPING[data["model_type"]].from_dict(data)
    config._attn_implementation = "eager" if today else attention_then(config.model_type)
    with torch.device("meta"):
        network: torch.nn.Module = MODELS[model](config)
    return network


class Recorded(NamedTuple):
    """The calls of a model; after how many of them each gradient is complete, and its bytes."""

    calls: list[StepCall]
    ready: list[tuple[int, int]]


@lru_cache
def recorded(folder: Path, model: str, sequence: int, batch: int, train: bool, today: bool) -> Recorded:
    """Return the forward pass of a model, and its backward pass if ``train``."""
    network = _network(folder, model, today).train(train)
    tokens = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    recorder, ready = _Recorder(), list[tuple[int, int]]()
    for each in network.parameters():
        each.register_post_accumulate_grad_hook(
            lambda done: ready.append((len(recorder.calls), done.numel() * done.element_size()))
        )
    options = {} if model == "bert_large" else {"use_cache": False}
    with recorder, _dropout_as_on_cuda(), contextlib.nullcontext() if train else torch.no_grad():
        logits = network(tokens, **options)[0]
        if train:
            logits.backward(torch.empty_like(logits))
    return Recorded(recorder.calls, ready)


@contextlib.contextmanager
def _dropout_as_on_cuda() -> Any:
    original = functional.dropout

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p else input

    functional.dropout = dropout
    try:
        yield
    finally:
        functional.dropout = original


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[StepCall] = []

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name  # type: ignore[attr-defined]
        if name == "aten::_local_scalar_dense":
            return True
        out = func(*args, **(kwargs or {}))
        self.calls.append(StepCall(operation_of(name, _tensors(args), _tensors((out,)))))
        return out


_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


def _tensors(values: Any) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            kind = _TYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
            found.append(Tensor(tuple(value.shape), tuple(value.stride()), kind))
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found
