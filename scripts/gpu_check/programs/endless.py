"""Trains six steps, starts a kernel of a minute, and sleeps until it is killed: DEVICE."""

import sys
import time

import torch

device = sys.argv[1]
model = torch.nn.Linear(64, 64).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10):
    model(torch.randn(8, 64, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 5:
        if device == "cuda":
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(120_000_000_000)  # cycles of 0.5 ns
        print("ready", flush=True)
        time.sleep(120)
