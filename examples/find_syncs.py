"""Find three lines that make the CPU wait for the GPU, on a machine without one."""

import torch
from torch import nn

import instrument


def train(steps: int = 4) -> None:
    with torch.device("cuda"):
        model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        batch = torch.randint(256, (8, 32))
        tokens = batch.to("cuda")
        with instrument.annotate("forward"):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
            loss = loss / len(tokens[tokens != 0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f}")


def train_without_waiting(steps: int = 4) -> None:
    with torch.device("cuda"):
        model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history = []
    for _ in range(steps):
        batch = torch.randint(256, (8, 32)).pin_memory()  # in training: DataLoader(..., pin_memory=True)
        tokens = batch.to("cuda", non_blocking=True)
        with instrument.annotate("forward"):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
            loss = loss / (tokens != 0).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.detach())
    with instrument.allow_sync("once, after the last step"):
        print("losses", torch.stack(history).tolist())


if __name__ == "__main__":
    print(instrument.dry_run(train), end="\n\n")
    instrument.dry_run(train_without_waiting).assert_max(0)
    print("Without the three, no step waits.")
