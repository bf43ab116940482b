"""GPT2-large on four GPUs with torch's tensor parallelism, as a plain script: ``CONFIG BATCH SEQUENCE``.

Each block has its attention and its MLP split by columns and then by rows, as in Megatron-LM, and the output layer
by words. GPT2 of transformers has layers of a class of its own, for which torch has no such split, so that linear
ones of the same sizes take their places. Attention as in `programs`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from . import programs

RANKS = 4
_LAYERS = {
    "attn.c_attn": ColwiseParallel(), "attn.c_proj": RowwiseParallel(),
    "mlp.c_fc": ColwiseParallel(), "mlp.c_proj": RowwiseParallel(),
}  # fmt: skip


def main(config: Path, batch: int, sequence: int) -> None:
    """Run a forward and a backward pass as one of the ranks."""
    settings = transformers.GPT2Config.from_dict(json.loads(config.read_text()))
    settings._attn_implementation = programs.attention_then("gpt2")
    mesh = init_device_mesh("cuda", (RANKS,))
    model = transformers.GPT2LMHeadModel(settings).cuda()
    for block in model.transformer.h:
        for path in _LAYERS:
            owner, name = block.get_submodule(path.partition(".")[0]), path.partition(".")[2]
            rows, columns = getattr(owner, name).weight.shape
            setattr(owner, name, torch.nn.Linear(rows, columns, device="cuda"))
        parallelize_module(block, mesh, _LAYERS)
        block.attn.split_size //= RANKS
        block.attn.num_heads //= RANKS
    words = -(-settings.vocab_size // RANKS) * RANKS
    model.lm_head = torch.nn.Linear(settings.n_embd, words, bias=False, device="cuda")
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    logits = model(torch.zeros(batch, sequence, dtype=torch.long, device="cuda"), use_cache=False)[0]
    logits.backward(torch.empty_like(logits))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
