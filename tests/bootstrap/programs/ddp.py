"""DDP on two ranks under torchrun, seven steps."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for _ in range(7):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
    if dist.get_rank() == 0:
        print(loss.item())
dist.destroy_process_group()
