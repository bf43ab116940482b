"""The forward pass of BERT-small as `transformers` 4.49 makes it, of which a trace of an H100 is public."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, WORDS = 512, 8, 4, 30_522
TOKENS = 141


class Embeddings(nn.Module):
    """Adds the embeddings of words, types and positions."""

    order: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.types = nn.Embedding(WORDS, WIDTH), nn.Embedding(2, WIDTH)
        self.positions, self.norm = nn.Embedding(512, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("order", torch.arange(512).expand((1, -1)))

    def forward(self, tokens: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        order = self.order[:, : tokens.shape[1]]
        summed = self.words(tokens) + self.types(kinds)
        summed += self.positions(order)
        normed: torch.Tensor = self.norm(summed)
        return normed


class Layer(nn.Module):
    """Attention and two linear layers, each with a residual and a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each(x).view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)
        x = self.norms[0](self.out(attended) + x)
        normed: torch.Tensor = self.norms[1](self.down(F.gelu(self.up(x))) + x)
        return normed


class BertSmall(nn.Module):
    """Predicts masked words."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.transform, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.decoder = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, kinds: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens, kinds)
        bool(torch.all(mask == 1))  # whether attention can do without the mask
        for layer in self.layers:
            x = layer(x)
        words: torch.Tensor = self.decoder(self.norm(F.gelu(self.transform(x))))
        return words
