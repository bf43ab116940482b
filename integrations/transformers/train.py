"""Train a small GPT-2 on random tokens with the Trainer: gradient accumulation, an evaluation, a checkpoint."""

import argparse
import os
import tempfile

import torch

try:
    import accelerate  # noqa: F401 (the Trainer needs it)
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}. This script needs it: pip install transformers accelerate") from None

from instrument.integrations.transformers import InstrumentCallback


class Tokens(torch.utils.data.Dataset):
    def __init__(self, size: int) -> None:
        self.tokens = torch.randint(0, 512, (size, 32), generator=torch.Generator().manual_seed(size))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/transformers")
    parser.add_argument("--torch-compile", action="store_true")
    options = parser.parse_args()

    set_seed(0)
    sizes = {"vocab_size": 512, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=6,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="steps",
            save_steps=4,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            torch_compile=options.torch_compile,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(
            model,
            args,
            train_dataset=Tokens(64),
            eval_dataset=Tokens(8),
            callbacks=[InstrumentCallback(options.out, wait=1, warmup=1, active=3)],
        )
        trainer.train()
    if int(os.environ.get("RANK", 0)) == 0:
        for entry in trainer.state.log_history:
            for name in ("loss", "eval_loss"):
                if name in entry:
                    print(name, entry["step"], float(entry[name]).hex())


if __name__ == "__main__":
    main()
