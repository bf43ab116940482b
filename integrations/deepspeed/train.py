"""Train a small network with DeepSpeed's ZeRO and gradient accumulation on random data."""

import argparse
import os
import tempfile

import torch
from torch import nn

from instrument.integrations.deepspeed import attach

for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
    os.environ.setdefault(name, value)  # as torchrun and the deepspeed launcher set them
os.environ.setdefault("MASTER_PORT", "0")
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/deepspeed")
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO")
    options = parser.parse_args()
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}. This script needs it: pip install deepspeed") from None

    attach(options.out, wait=1, warmup=1, active=2)

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled now, in 40 s
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": options.stage},
        },
    )
    for _ in range(12):  # batches, two for each step
        inputs, labels = torch.randn(4, 16), torch.randint(4, (4,))
        loss = nn.functional.cross_entropy(engine(inputs.to(engine.device)), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        print(f"step {engine.global_steps} loss {loss.item()!r}")
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
