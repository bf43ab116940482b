"""Train a small GPT-2 on random tokens in a hand-written Accelerate loop: gradient accumulation, a checkpoint."""

import argparse
import tempfile

import torch

try:
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from transformers import GPT2Config, GPT2LMHeadModel
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}. This script needs it: pip install accelerate transformers") from None

from instrument.integrations.accelerate import attach


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/accelerate")
    options = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    attach(options.out, accelerator=accelerator, wait=1, warmup=1, active=3)

    set_seed(0)
    sizes = {"vocab_size": 512, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    loader = torch.utils.data.DataLoader(torch.randint(0, 512, (48, 32)), batch_size=4)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    for number, tokens in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print("loss", number, loss.item().hex())
        if number == 7:
            with tempfile.TemporaryDirectory() as folder:
                accelerator.save_state(folder)

    accelerator.end_training()


if __name__ == "__main__":
    main()
