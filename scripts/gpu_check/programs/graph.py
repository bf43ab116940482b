"""Captures a whole step with its update in a CUDA graph and replays it: DEVICE WARM-UPS REPLAYS."""

import sys

import torch

device, warm_ups, replays = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = [torch.randn(32, 64, device=device) for _ in range(warm_ups + replays)]
static = data[0].clone()


def step() -> torch.Tensor:
    """Train on the content of `static`."""
    optimizer.zero_grad(set_to_none=True)
    loss = model(static).square().mean()
    loss.backward()
    optimizer.step()
    return loss


if device == "cpu":
    for batch in data:
        static.copy_(batch)
        print(f"loss {step().item()}")
    sys.exit()

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for batch in data[:warm_ups]:
        static.copy_(batch)
        print(f"loss {step().item()}")
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    result = step()
for batch in data[warm_ups:]:
    static.copy_(batch)
    graph.replay()
    print(f"loss {result.item()}")
