"""Which modules of well-known models are taken for the blocks that FSDP shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from instrument.forecast.assumed import blocks
from instrument.syncs.counting.memory import Models


def blocks_of(make: Callable[[], nn.Module]) -> tuple[str, int]:
    with torch.device("meta"):
        model = make()
    models = Models()
    models.add(model, "Model")
    kind, paths = blocks(models)
    return kind, len(paths)


@pytest.mark.parametrize(
    ("model", "config", "expected"),
    [
        ("GPT2LMHeadModel", "GPT2Config", ("GPT2Block", 12)),
        ("ViTForImageClassification", "ViTConfig", ("ViTLayer", 12)),
        ("LlamaForCausalLM", "LlamaConfig", ("LlamaDecoderLayer", 32)),
        ("BertModel", "BertConfig", ("BertLayer", 12)),
        ("T5ForConditionalGeneration", "T5Config", ("T5Block", 12)),
    ],
)
def test_transformers(model: str, config: str, expected: tuple[str, int]) -> None:
    """The layers, not the matmuls in them, which hold as many parameters together, nor what holds the layers."""
    transformers: Any = pytest.importorskip("transformers")
    assert blocks_of(lambda: getattr(transformers, model)(getattr(transformers, config)())) == expected


def test_transformer_of_torch() -> None:
    """The layers of the decoder hold more than those of the encoder."""
    assert blocks_of(lambda: nn.Transformer(batch_first=True)) == ("TransformerDecoderLayer", 6)


def test_layers_alone_are_no_blocks() -> None:
    """A list of layers without a block around them is sharded as a whole."""
    assert blocks_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))) == ("", 0)


def test_a_block_may_be_a_sequence() -> None:
    """A class of the program counts as a block even if it is a `Sequential`, unlike a plain one."""

    class Block(nn.Sequential):
        pass

    assert blocks_of(lambda: nn.Sequential(*[Block(nn.Linear(8, 8)) for _ in range(3)])) == (Block.__qualname__, 3)
    assert blocks_of(lambda: nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(3)])) == ("", 0)
