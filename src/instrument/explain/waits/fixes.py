"""Chooses the fix of a finding: by operation, by the line of the library that made the call, and by cause."""

from __future__ import annotations

import re

from ...base.findings import Fix, SyncFinding
from . import operations
from .operations import CLIP, MASKED, OTHER, SAVE, TO_CPU, TO_GPU, operation

PAGEABLE = Fix(
    "Without pinned memory, a copy with non_blocking=True blocks too. Let the DataLoader pin its batches.",
    'batch = batch.to("cuda", non_blocking=True)',
    'batch = batch.pin_memory().to("cuda", non_blocking=True)',
)
GATHERED = Fix(
    "Torch first copies memory with gaps into memory that is not pinned. Make it contiguous, then pin it.",
    'x = rows[:, ::2].to("cuda", non_blocking=True)',
    'x = rows[:, ::2].contiguous().pin_memory().to("cuda", non_blocking=True)',
)
PINNED = Fix(
    "The memory is pinned: only non_blocking=True is missing.",
    'x = batch.pin_memory().to("cuda")',
    'x = batch.pin_memory().to("cuda", non_blocking=True)',
)
CREATED = Fix("Create it on the GPU.", 'x = torch.zeros(4).to("cuda")', 'x = torch.zeros(4, device="cuda")')
COPY_UP = Fix(
    "Copy from pinned memory, without blocking.",
    "buffer.copy_(batch)",
    "buffer.copy_(batch.pin_memory(), non_blocking=True)",
)
COPY_DOWN = Fix(
    "Copy into contiguous pinned memory without blocking, and read it once an event shows that it has arrived.",
    "host.copy_(x)",
    "host = torch.empty(x.shape, pin_memory=True)\nhost.copy_(x, non_blocking=True)",
)
CPU_INDEX = Fix(
    "An index on the CPU is copied to the GPU first. Create it there.",
    "rows = x[torch.arange(2)]",
    "rows = x[torch.arange(2, device=x.device)]",
)
NUMBER = Fix(
    "A tensor with one number is copied to the GPU first. Pass a Python number.",
    "x = torch.where(mask, torch.tensor(0.0), x)",
    "x = torch.where(mask, 0.0, x)",
)
ELEMENT = Fix(
    "A number that is assigned to a single element is copied to the GPU first. Let the GPU fill the element.",
    "x[0] = 1.0",
    "x[0].fill_(1.0)",
)
INDEX_FILL = Fix(
    "The number is copied to the GPU first. Let the GPU fill the elements.",
    "x[labels] = 1.0",
    "x.index_fill_(0, labels, 1.0)",
)
SLICE = Fix(
    "A size or an index must be a Python number. Keep the size, and mask the elements beyond it.",
    "total = x[:n].sum()",
    "total = torch.where(torch.arange(len(x), device=x.device) < n, x, 0.0).sum()",
)
GUARD = Fix(
    "Collect the flags on the GPU, and read them only every so many steps.",
    "if torch.isnan(loss): raise ValueError(loss)",
    "total += torch.isnan(loss)",
)
EVENT = Fix(
    "Let the GPU wait for the event, not the CPU.",
    "done.synchronize()",
    "torch.cuda.current_stream().wait_event(done)",
)
STREAM = Fix(
    "Let the other stream wait for this one, not the CPU.",
    "side.synchronize()",
    "torch.cuda.current_stream().wait_stream(side)",
)
SCALER = Fix(
    "A GradScaler reads once in a step whether the gradients are finite. A fused optimizer leaves that to the "
    "GPU, and bfloat16 needs no scaler.",
    "scaler.step(optimizer)",
    "optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # once, before the loop\n"
    "scaler.step(optimizer)",
)
VALIDATE = Fix(
    "The distribution reads whether its arguments are valid. Validate them during development only.",
    "noise = torch.distributions.Normal(x, scale)",
    "noise = torch.distributions.Normal(x, scale, validate_args=False)",
)
SCALE = Fix("get_scale() reads the scale: log it only every so many steps.")
INIT = Fix("Initialize the module on the CPU, and move it to the GPU afterwards, once, before the loop.")
PACK = Fix("Pass the lengths on the CPU, and the sequences sorted by length (enforce_sorted=True).")
TESTING = Fix("A check for tests: keep it out of the step.")
LIBRARY = Fix("A line of a library synchronizes: see whether an option, or a newer version, avoids that.")

# Path and function of a library's line, which say more than the operation on that line
_BY_LIBRARY_LINE = (
    ("torch/amp/grad_scaler.py", "get_scale", SCALE),
    ("torch/amp/grad_scaler.py", "", SCALER),
    ("torch/nn/utils/clip_grad.py", "", CLIP),
    ("torch/nn/utils/rnn.py", "", PACK),
    ("torch/distributions/", "", VALIDATE),
    ("torch/testing/", "", TESTING),
    ("torch/serialization.py", "save", SAVE),
    ("torch/nn/init.py", "", INIT),
)
_BY_DIRECTION = {None: OTHER, "H2D": TO_GPU, "D2H": TO_CPU}
_GUARDS = re.compile(r"\bis(nan|inf|finite)\b")
_CREATES = re.compile(
    r"\btorch\.(?:zeros|ones|full|empty|eye|arange|linspace|rand|randn|randint|randperm)\([^()]*\)\.(?:to|cuda)\("
)


def fix_of(found: SyncFinding) -> Fix:
    """Return what to do instead of ``found``."""
    via = f"/{found.via.file}".replace("\\", "/") if found.via else ""
    for path, function, fix in _BY_LIBRARY_LINE:
        if f"/{path}" in via and found.via and function in found.via.function:
            return fix
    if "/site-packages/" in via and "/site-packages/torch/" not in via and found.op not in ("to", "cuda"):
        return LIBRARY
    row = operation(found.op)
    by_cause = _fix_by_cause(row.name if row else found.op, found)
    if by_cause is not None:
        return by_cause
    return _BY_DIRECTION[found.direction] if row is None or row.fix is OTHER else row.fix


def _fix_by_cause(op: str, finding: SyncFinding) -> Fix | None:
    """Return the fix by cause, if the operation alone does not determine it."""
    cause, up = finding.cause.lower().replace("-", "_"), finding.direction == "H2D"
    code = finding.site.code if finding.site else ""
    if op == "bool" and _GUARDS.search(code):
        return GUARD
    if up and finding.cause == operations.GATHERED:
        return GATHERED
    if op in ("to", "cuda") and up and _CREATES.search(code):
        return CREATED
    if op in ("to", "cuda") and up and "from pinned" in cause:
        return PINNED
    if op in ("to", "cuda", "pin_memory") and up:
        return PAGEABLE if "non_blocking" in cause else TO_GPU
    if op in ("copy_", "copy"):
        return COPY_UP if up else COPY_DOWN
    if op == "setitem" and finding.backward:  # of a mask that chose elements
        return MASKED
    if op == "getitem":
        return CPU_INDEX if up else SLICE if "value" in cause else None
    if op == "where" and up:
        return NUMBER
    if op == "setitem" and up:
        if "number" in cause:
            return ELEMENT if "one element" in cause else INDEX_FILL
        return CPU_INDEX if "index" in cause else COPY_UP
    if op == "synchronize":
        return next((fix for word, fix in (("event", EVENT), ("stream", STREAM)) if word in cause), None)
    return None
