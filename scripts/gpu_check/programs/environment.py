"""Hides the GPU after torch is imported."""

import os

import torch

os.environ["CUDA_VISIBLE_DEVICES"] = ""
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    loss = model(torch.randn(4, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item()}")
try:
    torch.ones(1, device="cuda")
except (AssertionError, RuntimeError) as error:  # a driver initialized earlier still has the GPU
    print("no GPU:", type(error).__name__)
else:
    print("a GPU")
