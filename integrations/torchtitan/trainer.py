"""Train a small model on random tokens with a trainer in the style of torchtitan."""

import argparse

import torch
from torch import nn

from instrument.integrations.torchtitan import attach


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens)))


class Checkpointer:
    enable = True

    def save(self, step, last_step=False):
        return step % 3 == 0


class Validator:
    def validate(self, model_parts, step):
        with torch.no_grad():
            model_parts[0](torch.zeros(1, 8, dtype=torch.long))


class Trainer:
    gradient_accumulation_steps = 2

    def __init__(self, step=0):
        self.step = step  # more than 0 after loading a checkpoint
        self.model_parts = [Model()]
        self.optimizer = torch.optim.AdamW(self.model_parts[0].parameters(), lr=1e-2)
        self.checkpointer, self.validator = Checkpointer(), Validator()

    def batch_generator(self):
        while True:
            yield torch.randint(64, (2, 9))

    def forward_backward_step(self, tokens):
        logits = self.model_parts[0](tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss / self.gradient_accumulation_steps).backward()
        return loss.detach()

    def train_step(self, batches):
        self.optimizer.zero_grad()
        batches = [next(batches) for _ in range(self.gradient_accumulation_steps)]
        losses = [self.forward_backward_step(batch) for batch in batches]
        nn.utils.clip_grad_norm_(self.model_parts[0].parameters(), 1.0)
        self.optimizer.step()
        print(f"step {self.step} loss {sum(losses).item()!r}")

    def train(self, steps):
        batches = self.batch_generator()
        for _ in range(steps):
            self.step += 1
            self.train_step(batches)
            self.checkpointer.save(self.step)
            self.validator.validate(self.model_parts, self.step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/torchtitan")
    parser.add_argument("--resume", type=int, default=0, help="the step of the checkpoint")
    options = parser.parse_args()
    torch.manual_seed(0)
    attach(options.out, wait=2, active=2, trainer=Trainer)
    Trainer(options.resume).train(8)
