"""Common models, small and with random weights, and their training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SEED, STEPS = 7, 3
TOKENS, WIDTH, LENGTH, CLASSES = 64, 16, 6, 4
Batch = dict[str, torch.Tensor]


@dataclass
class Training:
    """A model with its batches and loss, equal each time it is built."""

    model: nn.Module
    batches: list[Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]


@dataclass
class Trained:
    """The losses and gradients of each step."""

    losses: list[torch.Tensor]
    gradients: list[dict[str, torch.Tensor | None]]  # by the name of the parameter


def train(training: Training, batches: Iterable[Batch] | None = None) -> Trained:
    """Take a step for each batch: forward, backward, optimizer.

    Args:
        training: the training, whose model changes.
        batches: the batches of ``training``, possibly wrapped to follow the steps.
    """
    torch.manual_seed(SEED)  # for dropout
    model, trained = training.model.train(), Trained([], [])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in training.batches if batches is None else batches:
        optimizer.zero_grad()
        loss = training.loss(model, batch)
        loss.backward()
        trained.losses.append(loss.detach().clone())
        trained.gradients.append(
            {
                name: None if parameter.grad is None else parameter.grad.clone()
                for name, parameter in model.named_parameters()
            }
        )
        optimizer.step()
    return trained


def same(one: Trained, other: Trained) -> bool:
    """Return whether all losses and gradients are bit-identical."""
    pairs: list[Any] = list(zip(one.losses, other.losses, strict=True))
    for gradients, others in zip(one.gradients, other.gradients, strict=True):
        assert gradients.keys() == others.keys()
        pairs += [(gradients[name], others[name]) for name in gradients]
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def build(name: str) -> Training:
    """Return one of `MODELS` in its initial state."""
    torch.manual_seed(SEED)
    return MODELS[name]()


def _its_own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def _cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["inputs"]).flatten(0, -2), batch["labels"].flatten())


def _tokens() -> torch.Tensor:
    return torch.randint(TOKENS, (2, LENGTH))


def llama(tied: bool = False, checkpointing: bool = False) -> Training:
    """Hugging Face's Llama for causal language modelling, with grouped keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if checkpointing:
        model.config.use_cache = False
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    inputs = [_tokens() for _ in range(STEPS)]
    return Training(model, [{"input_ids": tokens, "labels": tokens} for tokens in inputs], _its_own_loss)


def bert() -> Training:
    """Hugging Face's BERT for classification, with dropout and padded sentences."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=TOKENS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=32, num_labels=CLASSES,
    )  # fmt: skip
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, LENGTH // 2 :] = 0
    batches = [
        {"input_ids": _tokens(), "attention_mask": mask, "labels": torch.randint(CLASSES, (2,))}
        for _ in range(STEPS)
    ]
    return Training(BertForSequenceClassification(config), batches, _its_own_loss)


class BasicBlock(nn.Module):
    """The block of ResNet-18, whose one ReLU is called twice and works in place."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A ResNet as in torchvision, with two layers instead of four."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 4, 1))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2), BasicBlock(8, 8, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


def resnet() -> Training:
    """Classification of images."""
    batches = [{"inputs": torch.randn(2, 3, 32, 32), "labels": torch.randint(CLASSES, (2,))} for _ in range(STEPS)]
    return Training(ResNet(), batches, _cross_entropy)


class Mixture(nn.Module):
    """A mixture of experts with the best two per token; experts are called by load, and idle ones not at all."""

    def __init__(self, experts: int = 10, best: int = 2) -> None:
        super().__init__()
        self.best = best
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(inplace=True), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.best)
        out = torch.zeros_like(tokens)
        load = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        for expert in sorted(range(len(load)), key=load.__getitem__, reverse=True):
            if load[expert]:
                place, rank = torch.where(chosen == expert)
                result = self.experts[expert](tokens[place])
                out.index_add_(0, place, result * weights[place, rank, None])
        return out.view_as(x)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A transformer block; its drop path is switched off, as at a rate of 0."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.drop_path = nn.Identity()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path(self.attention(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Transformer blocks, checkpointed if ``reentrant`` is not None, and called in several rounds."""

    def __init__(self, mlps: Iterable[nn.Module], reentrant: bool | None = None, rounds: int = 1) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.rounds = rounds
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(map(Block, mlps))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in list(self.blocks) * self.rounds:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def _language(model: nn.Module) -> Training:
    return Training(model, [{"inputs": _tokens(), "labels": _tokens()} for _ in range(STEPS)], _cross_entropy)


def mixture() -> Training:
    """A transformer with a mixture of experts in each block."""
    return _language(Transformer([Mixture(), Mixture()]))


def looped() -> Training:
    """A transformer that calls its one block several times."""
    mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
    return _language(Transformer([mlp], rounds=3))


def checkpointed(reentrant: bool) -> Training:
    """A transformer with dropout and checkpointed blocks."""
    mlps = [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(3)
    ]
    return _language(Transformer(mlps, reentrant))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama-tied": lambda: llama(tied=True),
    "llama-checkpointed": lambda: llama(checkpointing=True),
    "bert": bert,
    "resnet": resnet,
    "mixture": mixture,
    "looped": looped,
    "checkpointed": lambda: checkpointed(reentrant=False),
    "checkpointed-reentrant": lambda: checkpointed(reentrant=True),
}
HUGGING_FACE = [name for name in MODELS if name.startswith(("llama", "bert"))]
