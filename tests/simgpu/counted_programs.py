"""Small programs whose launches a dry run counts: each function prepares one, and returns its step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Step = Callable[[], object]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def mlp_sgd() -> Step:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
    x, y = torch.randn(2048, 64, device="cuda"), torch.randint(10, (2048,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return _train(model, optimizer, lambda: functional.cross_entropy(model(x), y))


def mlp_momentum_mse() -> Step:
    model = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 1)).cuda()
    x, y = torch.randn(100, 30, device="cuda"), torch.randn(100, 1, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    return _train(model, optimizer, lambda: functional.mse_loss(model(x), y))


def mlp_adam_copies() -> Step:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss() -> torch.Tensor:
        x = torch.randn(32, 64).cuda()
        y = torch.randint(16, (32,)).to("cuda", non_blocking=True)
        return functional.cross_entropy(model(x), y)

    return _train(model, optimizer, loss)


def mlp_fused_adamw() -> Step:
    model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 16)).cuda()
    x = torch.randn(32, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    return _train(model, optimizer, lambda: model(x).pow(2).mean())


def mlp_single_adam() -> Step:
    model = nn.Sequential(nn.Linear(64, 128), nn.Sigmoid(), nn.Linear(128, 16)).cuda()
    x = torch.randn(32, 64, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, foreach=False)
    return _train(model, optimizer, lambda: model(x).abs().mean())


def deep_foreach() -> Step:
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(60))).cuda()
    x = torch.randn(8, 24, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return _train(model, optimizer, lambda: model(x).sum())


def large_foreach() -> Step:
    model = nn.Sequential(nn.Linear(1024, 3000), nn.ReLU(), nn.Linear(3000, 1024)).cuda()
    x = torch.randn(64, 1024, device="cuda")
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    return _train(model, optimizer, lambda: model(x).mean())


def clipped() -> Step:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 4)).cuda()
    x = torch.randn(32, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.mlp(self.second(x)))


class Transformer(nn.Module):
    """A transformer over tokens."""

    def __init__(self, dropout: float = 0.0, causal: bool = True, again: bool = False) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(100, 64), nn.LayerNorm(64), nn.Linear(64, 100, bias=False)
        self.blocks = nn.ModuleList(Block(64, 4, dropout, causal) for _ in range(2))
        self.again = again

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


def _language_model(model: nn.Module, dtype: torch.dtype = torch.float32) -> Step:
    model = model.to("cuda", dtype)
    tokens = torch.randint(100, (4, 32), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return _train(
        model, optimizer, lambda: functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    )


def transformer() -> Step:
    return _language_model(Transformer())


def transformer_dropout() -> Step:
    return _language_model(Transformer(0.1, causal=False))


def transformer_bf16() -> Step:
    return _language_model(Transformer(), torch.bfloat16)


def transformer_fp16() -> Step:
    return _language_model(Transformer(0.1), torch.float16)


def transformer_checkpointed() -> Step:
    return _language_model(Transformer(0.1, again=True))


def transformer_accumulated() -> Step:
    model = Transformer().cuda()
    tokens = torch.randint(100, (4, 32), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        for part in tokens.chunk(2):
            (functional.cross_entropy(model(part).flatten(0, 1), part.flatten()) / 2).backward()
        optimizer.step()

    return step


def encoder_masked() -> Step:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()
    x = torch.randn(4, 16, 32, device="cuda")
    mask = torch.zeros(4, 16, dtype=torch.bool, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return _train(model, optimizer, lambda: model(x, src_key_padding_mask=mask).mean())


def rms_swiglu() -> Step:
    norm, gate, up, down = nn.RMSNorm(64), *(nn.Linear(64, 128, bias=False) for _ in range(2)), nn.Linear(128, 64)
    model = nn.ModuleList([norm, gate, up, down]).cuda()
    x = torch.randn(4, 32, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def loss() -> torch.Tensor:
        y = norm(x)
        return (x + down(functional.silu(gate(y)) * up(y))).float().pow(2).mean()

    return _train(model, optimizer, loss)


def autocast_attention() -> Step:
    """Queries and keys are of 32 bits after their norm, values of 16; with and without a mask."""
    project, norm = nn.Linear(64, 192).cuda(), nn.RMSNorm(16).cuda()
    x = torch.randn(2, 16, 64, device="cuda")
    mask = torch.zeros(16, 16, device="cuda")
    optimizer = torch.optim.SGD([*project.parameters(), *norm.parameters()], 0.1)

    def loss() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            q, k, v = (part.view(2, 16, 4, 16).transpose(1, 2) for part in project(x).chunk(3, -1))
            out = functional.scaled_dot_product_attention(norm(q), norm(k), v, is_causal=True)
            out = out + functional.scaled_dot_product_attention(norm(q), norm(k), v, mask)
            wide = functional.scaled_dot_product_attention(out[..., :5], out[..., :5], v, mask)  # no fused kernel
            return (out + wide).float().pow(2).mean()

    return _train(project, optimizer, loss)


def attention_layouts() -> Step:
    """Flash attention of tensors, and with gradients, that have the heads before and after the length."""
    shapes = ((2, 4, 16, 8), (2, 16, 4, 8))
    held = [torch.randn(shape, device="cuda", dtype=torch.float16, requires_grad=True) for shape in shapes]
    optimizer = torch.optim.SGD(held, 0.1)

    def loss() -> torch.Tensor:
        heads_first, transposed = held[0], held[1].transpose(1, 2)
        pairs = ((heads_first, transposed), (transposed, heads_first), (heads_first[:, :, ::2], transposed))
        return sum(
            functional.scaled_dot_product_attention(q, k, k).mul(weight).sum()
            for q, k in pairs
            for weight in (torch.ones_like(q), torch.ones_like(q.transpose(1, 2)).transpose(1, 2), 1)
        )

    return _train(nn.ParameterList(held), optimizer, loss)


def rotary() -> Step:
    project = nn.Linear(64, 64).cuda()
    x = torch.randn(2, 16, 64, device="cuda")
    optimizer = torch.optim.SGD(project.parameters(), 0.1)

    def loss() -> torch.Tensor:
        q = project(x).view(2, 16, 4, 16).transpose(1, 2)
        angles = torch.arange(16, device="cuda").float()[:, None] / 10000 ** (torch.arange(8, device="cuda") / 8)
        both = torch.cat((angles, angles), -1)
        turned = torch.cat((-q[..., 8:], q[..., :8]), -1)
        out = q * both.cos() + turned * both.sin()
        return functional.scaled_dot_product_attention(out, out, q, is_causal=True).sum()

    return _train(project, optimizer, loss)


def eager_attention() -> Step:
    project = nn.Linear(32, 96).cuda()
    x = torch.randn(4, 24, 32, device="cuda")
    optimizer = torch.optim.Adam(project.parameters(), 1e-3)

    def loss() -> torch.Tensor:
        q, k, v = (part.view(4, 24, 4, 8).transpose(1, 2) for part in project(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / 8**0.5
        scores = scores.masked_fill(torch.ones(24, 24, device="cuda").tril() == 0, float("-inf"))
        return (functional.dropout(scores.softmax(-1), 0.1) @ v).transpose(1, 2).reshape(4, 24, 32).mean()

    return _train(project, optimizer, loss)


def batch_norms() -> Step:
    model = nn.Sequential(
        nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 16), nn.BatchNorm1d(16)
    ).cuda()
    x = torch.randn(16, 8, 8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return _train(model, optimizer, lambda: model(x).sum())


def pooled_groups() -> Step:
    model = nn.Sequential(
        nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).cuda()
    x = torch.randn(4, 8, 16, 16, device="cuda", requires_grad=True)
    optimizer = torch.optim.Adam([*model.parameters(), x], 1e-3)
    return _train(model, optimizer, lambda: model(x).sum())


def embeddings() -> Step:
    tables = nn.ModuleList([nn.Embedding(5000, 16), nn.Embedding(50, 16, padding_idx=0)]).cuda()
    ids = torch.randint(50, (64, 20), device="cuda")
    optimizer = torch.optim.Adagrad(tables.parameters(), 0.1)
    return _train(tables, optimizer, lambda: (tables[0](ids) * tables[1](ids)).sum(-1).sigmoid().log().mean())


def evaluation() -> Step:
    model = Transformer(0.1).cuda().eval()
    tokens = torch.randint(100, (4, 32), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @torch.no_grad()
    def step() -> list[int]:
        logits = model(tokens)
        best = logits.argmax(-1)
        chosen: list[int] = logits.topk(5).indices[0, 0].tolist()
        correct = int((best == tokens).sum().item())
        optimizer.step()  # without gradients, it launches nothing
        return [*chosen, correct]

    return step


def scaled_fp16() -> Step:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).cuda()
    x, y = torch.randn(32, 64, device="cuda"), torch.randint(8, (32,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def vectors() -> Step:
    """Matmuls with vectors, and a sum of matmuls."""
    matrix, vector = nn.Parameter(torch.randn(6, 5, device="cuda")), torch.randn(5, device="cuda")
    batch = torch.randn(3, 6, 5, device="cuda")
    optimizer = torch.optim.SGD([matrix], 0.1)

    def loss() -> torch.Tensor:
        long = torch.addmv(torch.mv(matrix[:, ::2], vector[:3]), matrix, vector, alpha=2)
        both = torch.mv(matrix.t(), long) + torch.mv(matrix, vector.new_ones(1).expand(5))[:5]
        summed = torch.addbmm(
            matrix[:, :1], batch.transpose(1, 2).contiguous().transpose(1, 2), batch.transpose(1, 2)
        )
        return torch.dot(both, vector) + summed.sum()

    return _train(nn.ParameterList([matrix]), optimizer, loss)


def foreach_copies() -> Step:
    """Copies of lists: inside the GPU, alike or not, and between it and the CPU, as of offloaded states."""
    held = [torch.randn(3, size, device="cuda") for size in range(20, 32)]
    optimizer = torch.optim.SGD([nn.Parameter(held[0].clone())], 0.1)
    on_cpu = [torch.empty(each.shape) for each in held]

    def step() -> None:
        others = [torch.empty_like(each) for each in held]
        torch._foreach_copy_(others, held)
        torch._foreach_copy_([each.half() for each in others], held)
        torch._foreach_copy_([torch.empty(each.shape[::-1], device="cuda").t() for each in held], held)
        torch._foreach_copy_([each[:, :4] for each in others], [each[:, 4:8] for each in held])
        torch._foreach_copy_(on_cpu, held)
        torch._foreach_copy_(others, on_cpu)
        optimizer.step()

    return step


def indexing() -> Step:
    table = nn.Parameter(torch.randn(100, 32, device="cuda"))
    rows = torch.randint(100, (64,), device="cuda")
    optimizer = torch.optim.SGD([table], 0.1)

    def loss() -> torch.Tensor:
        chosen = table[rows]
        scores = torch.zeros(64, 10, device="cuda").scatter(1, rows[:, None] % 10, 1.0)
        order = torch.argsort(chosen[:, 0])
        return (chosen[order].cumsum(0)[:, :10] * scores).sum() + chosen.gather(1, rows[:, None] % 32).sum()

    return _train(nn.ParameterList([table]), optimizer, loss)


PROGRAMS: dict[str, Callable[[], Step]] = {
    function.__name__: function
    for function in (
        mlp_sgd, mlp_momentum_mse, mlp_adam_copies, mlp_fused_adamw, mlp_single_adam, deep_foreach, large_foreach,
        clipped, transformer, transformer_dropout, transformer_bf16, transformer_fp16, transformer_checkpointed,
        transformer_accumulated, encoder_masked, rms_swiglu, autocast_attention,
        attention_layouts, rotary, eager_attention, batch_norms, pooled_groups, embeddings, evaluation,
        scaled_fp16, vectors, foreach_copies, indexing,
    )
}  # fmt: skip
