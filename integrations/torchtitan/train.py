"""Train a small Llama on random tokens with torchtitan's own Trainer, on a CPU as well."""

import argparse
import os
from dataclasses import dataclass
from types import SimpleNamespace

import cpu  # before torchtitan, whose import looks up the device
import torch

try:
    from torchtitan.components import metrics
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config.configs import DebugConfig, TrainingConfig
    from torchtitan.distributed import utils
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer
except ModuleNotFoundError as error:
    needed = "pip install torchtitan triton; trainer.py, beside this file, needs PyTorch alone"
    raise SystemExit(f"{error}. This script needs it: {needed}") from None

from instrument.integrations.torchtitan import attach

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", default="runs/torchtitan")
attach(parser.parse_args().out, wait=2, active=2)

for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
    os.environ.setdefault(name, value)  # as torchrun sets them
os.environ.setdefault("MASTER_PORT", "0")

VOCABULARY = 2048  # of the debug model


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    encode = decode = get_vocab_size = lambda self, *_, **__: None


class Tokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, seq_len, local_batch_size, **_):
        self.shape = local_batch_size, seq_len + 1

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            tokens = torch.randint(VOCABULARY, self.shape, generator=generator)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    state_dict = load_state_dict = lambda self, *_: {}


model = model_registry("debugmodel")
model.model.layers = model.model.layers[:2]
for layer in model.model.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
if cpu.ALONE:
    model.parallelize_fn = lambda model, **_: model
    stats = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
    monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: stats, reset_peak_stats=lambda: None)
    metrics.build_device_memory_monitor = lambda: monitor
    utils.set_pg_timeouts = lambda **_: None
trainer = Trainer.Config(
    model_spec=model,
    tokenizer=Tokenizer.Config(),
    dataloader=Tokens.Config(),
    loss=CrossEntropyLoss.Config(),
    optimizer=default_adamw(lr=1e-3),
    debug=DebugConfig(seed=0),
    metrics=metrics.MetricsProcessor.Config(log_freq=1),
    training=TrainingConfig(
        local_batch_size=2, global_batch_size=4, seq_len=16, steps=6, disable_cuda_graphs=True
    ),
).build()
trainer.metrics_processor.log = lambda step, loss, *_, **__: print(f"step {step} loss {loss!r}")
trainer.train()
trainer.close()
torch.distributed.destroy_process_group()
