"""Train a small GPT with only megatron-core: its pipeline schedule, data parallelism and optimizer.

python train.py --cpu                                      # on a laptop
torchrun --nproc-per-node 2 train.py --pipeline 2          # on GPUs
"""

import argparse
import contextlib
import os

import torch
from cpu import no_cuda
from torch.utils.data import DataLoader

try:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}. This script needs it: pip install megatron-core") from None

from instrument.integrations.megatron import attach

VOCABULARY, LENGTH, MICROBATCHES = 128, 32, 2


def build(stages: int, chunks: int) -> list[torch.nn.Module]:
    """Return the chunks of the model on this rank."""
    config = TransformerConfig(
        num_layers=2 * stages * chunks, hidden_size=64, num_attention_heads=4, attention_dropout=0.0,
        hidden_dropout=0.0, bias_activation_fusion=False, masked_softmax_fusion=False, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, pipeline_dtype=torch.float32, pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None, batch_p2p_sync=False,
        deallocate_pipeline_outputs=stages > 1, finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip
    models = []
    for chunk in range(chunks):
        place = {"vp_stage": chunk if chunks > 1 else None}
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=chunks == 1, **place)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=chunks == 1, **place)
        layers = get_gpt_layer_local_spec()
        model = GPTModel(config, layers, VOCABULARY, LENGTH, pre_process=first, post_process=last, **place)
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=False)
        models.append(DistributedDataParallel(config, ddp, model.to(torch.cuda.current_device())))
    return models


def get_batch(data):
    """Return the next micro-batch on the device."""
    return next(data).to(torch.cuda.current_device())


def forward_step(data, model):
    """Run one micro-batch forward; the schedule calls this."""
    tokens = get_batch(data)
    positions = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=tokens.device), 1)
    output = model(tokens, positions, mask, labels=tokens)
    return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})


def main() -> None:
    """Train for some iterations and print the loss of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU, to try the script without a GPU")
    parser.add_argument("--out", default="runs/megatron")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        parser.error("megatron-core trains on a GPU and this machine has none; add --cpu to try it on the CPU")
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        os.environ.setdefault(name, str(value))

    attach(options.out, wait=1, warmup=1, active=2)  # the one line

    with no_cuda() if options.cpu else contextlib.nullcontext():
        if not options.cpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        torch.distributed.init_process_group("gloo" if options.cpu else "nccl")
        chunks = options.chunks
        parallel_state.initialize_model_parallel(1, options.pipeline, chunks if chunks > 1 else None)
        torch.manual_seed(0)
        if not options.cpu:
            model_parallel_cuda_manual_seed(0)  # attention draws from this generator
        models = build(options.pipeline, chunks)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, use_distributed_optimizer=False), models)
        run = get_forward_backward_func()
        sequences = [torch.randint(VOCABULARY, (LENGTH,)) for _ in range(8)]
        for iteration in range(options.iterations):
            for model in models:
                model.zero_grad_buffer()
            optimizer.zero_grad()
            data = [iter(DataLoader(sequences, batch_size=2)) for _ in models]
            losses = run(
                forward_step_func=forward_step, data_iterator=data if chunks > 1 else data[0],
                model=models if chunks > 1 else models[0], num_microbatches=MICROBATCHES, seq_length=LENGTH,
                micro_batch_size=2, forward_only=False,
            )  # fmt: skip
            optimizer.step()
            if losses:  # on the last stage
                print(f"iteration {iteration} loss {sum(loss['loss'].item() for loss in losses) / len(losses)!r}")
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
