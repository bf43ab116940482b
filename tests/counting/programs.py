"""Small trainings whose memory is compared with that of torch's allocator."""

from __future__ import annotations

BEGIN = """
import math, torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

torch.backends.cudnn.enabled = False  # as on the GPU in software
torch.manual_seed(0)
"""

_MLP = """
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.{optimizer}
for _ in range(3):
    x = torch.randn(600, 512, device="cuda")
    optimizer.zero_grad({zero})
    loss = model(x).square().mean()
    loss.backward()
    {clip}
    optimizer.step()
"""


def _mlp(optimizer: str, zero: str = "", clip: str = "") -> str:
    return _MLP.format(optimizer=optimizer, zero=zero, clip=clip)


_GPT = """
class Block(nn.Module):
    def __init__(self, width, heads, p):
        super().__init__()
        self.heads, self.p = heads, p
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(p)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, 2)
        q, k, v = [part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p if self.training else 0.0)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))

class Gpt(nn.Module):
    def __init__(self, p, checkpointing=False, width=128, length=64):
        super().__init__()
        self.tokens, self.places = nn.Embedding(2000, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4, p) for _ in range(3))
        self.norm, self.head, self.drop = nn.LayerNorm(width), nn.Linear(width, 2000, bias=False), nn.Dropout(p)
        self.head.weight, self.checkpointing = self.tokens.weight, checkpointing

    def forward(self, i, targets):
        x = self.drop(self.tokens(i) + self.places(torch.arange(i.shape[1], device=i.device)))
        for block in self.blocks:
            run = torch.utils.checkpoint.checkpoint if self.checkpointing else lambda block, x, **_: block(x)
            x = run(block, x, use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, 2000), targets.view(-1))

def batch(rows=4):
    i = torch.randint(2000, (rows, 65)).cuda()
    return i[:, :-1].contiguous(), i[:, 1:].contiguous()

"""
_TRAINING = """
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    i, targets = batch()
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled={autocast}):
        loss = model(i, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    loss.item()
"""


def _gpt(model: str, autocast: bool = False) -> str:
    return f"{_GPT}\nmodel = {model}\n{_TRAINING.format(autocast=autocast)}"


PROGRAMS = {
    "sgd": _mlp("SGD(model.parameters(), 0.1)"),
    "momentum": _mlp("SGD(model.parameters(), 0.1, momentum=0.9)"),
    "nesterov, zeros kept": _mlp(
        "SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.1)", "set_to_none=False"
    ),
    "adam": _mlp("Adam(model.parameters())"),
    "adam, one by one": _mlp("Adam(model.parameters(), foreach=False)"),
    "adamw, fused": _mlp("AdamW(model.parameters(), fused=True)"),
    "clipping": _mlp("Adam(model.parameters())", clip="nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
    "evaluation": """
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda().eval()
with torch.no_grad():
    for _ in range(3):
        y = model(torch.randn(900, 512).cuda())
""",
    "cnn": """
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(64, 10),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for _ in range(3):
    x, y = torch.randn(8, 3, 64, 64).cuda(), torch.randint(10, (8,)).cuda()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
""",
    "encoder": """
layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.1, batch_first=True)
model, head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda(), nn.Linear(256, 1000).cuda()
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
for _ in range(3):
    x, y = torch.randn(4, 64, 256, device="cuda"), torch.randint(1000, (256,), device="cuda")
    loss = F.cross_entropy(head(model(x)).view(-1, 1000), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "gpt": _gpt("Gpt(0.0).cuda()"),
    "gpt with dropout": _gpt("Gpt(0.1).cuda()"),
    "gpt, checkpointing": _gpt("Gpt(0.0, checkpointing=True).cuda()"),
    "gpt in bfloat16": _gpt("Gpt(0.0).cuda().bfloat16()"),
    "gpt, autocast": _gpt("Gpt(0.0).cuda()", autocast=True),
    "gpt, accumulation": f"""{_GPT}
model = Gpt(0.0).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    for _ in range(3):
        i, targets = batch(2)
        loss = model(i, targets) / 3
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "gpt, float16 and scaler": f"""{_GPT}
model = Gpt(0.1).cuda()
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
for _ in range(3):
    i, targets = batch()
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = model(i, targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    "lstm": """
table, head = nn.Embedding(1000, 128).cuda(), nn.Linear(256, 1000).cuda()
rnn = nn.LSTM(128, 256, 2, batch_first=True).cuda()
optimizer = torch.optim.Adam([*table.parameters(), *rnn.parameters(), *head.parameters()])
for _ in range(2):
    i = torch.randint(1000, (16, 33)).cuda()
    y, _state = rnn(table(i[:, :-1]))
    loss = F.cross_entropy(head(y).reshape(-1, 1000), i[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "embedding": """
table, head = nn.Embedding(50000, 64).cuda(), nn.Linear(64, 50).cuda()
optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], 0.1)
for _ in range(3):
    i = torch.randint(50000, (64, 20), device="cuda")
    loss = head(table(i).mean(1)).logsumexp(-1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "contiguous heads": """
projections = nn.ModuleList(nn.Linear(128, 128) for _ in range(3)).cuda().bfloat16()
optimizer = torch.optim.SGD(projections.parameters(), 0.1)
for _ in range(2):
    x = torch.randn(4, 8, 256, 128, device="cuda", dtype=torch.bfloat16)
    loss = F.scaled_dot_product_attention(*(each(x) for each in projections)).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "matrix of scores": """
qkv = nn.Linear(128, 384).cuda()
optimizer = torch.optim.SGD(qkv.parameters(), 0.1)
for _ in range(2):
    x = torch.randn(4, 256, 128, device="cuda")
    q, k, v = qkv(x).chunk(3, -1)
    scores = (q @ k.transpose(1, 2)) / math.sqrt(128)
    scores = scores.masked_fill(torch.ones(256, 256, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    loss = ((scores.softmax(-1) @ v) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "rms norms, loss kept": """
model = nn.Sequential(*(module for _ in range(6) for module in (nn.RMSNorm(512), nn.Linear(512, 512)))).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    loss = model(torch.randn(2048, 512, device="cuda")).pow(2).mean()  # while the loss before it is there
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "norm and gate": """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(512))
        self.gate, self.up = nn.Linear(512, 1024, bias=False), nn.Linear(512, 1024, bias=False)
        self.down = nn.Linear(1024, 512, bias=False)

    def forward(self, x):
        normed = x.float()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed = (normed * self.weight).type_as(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

model = nn.Sequential(*(Layer() for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    x = torch.randn(512, 512, device="cuda")
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}


def run(program: str) -> None:
    exec(compile(BEGIN + PROGRAMS[program], "program.py", "exec"), {})
