"""A hand-written loop of seven steps with two micro-steps each."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for batch in range(14):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    if batch % 2:
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item())
