"""Trains a small network: DEVICE STEPS."""

import sys

import torch

device, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(steps):
    loss = model(torch.randn(64, 256, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item()}")
