"""What to write instead: a suggestion for each operation that waits, with a line before and after."""

from __future__ import annotations

from ..findings import Fix

_LATER = "Keep the numbers on the GPU and read them only every so many steps."
_COPY = "Copy without waiting, and read the copy when an event says that it has arrived."
_HOST = 'host = x.to("cpu", non_blocking=True)\ndone = torch.cuda.Event()\ndone.record()  # read when done.query()'
_PIN = (
    "Let the DataLoader pin its batches (pin_memory=True), and copy without waiting. What stays the same, "
    "as a model, belongs before the loop."
)
_WHERE = "total = torch.where(mask, x, 0.0).sum()"
_MASKED = "How many elements are chosen is only known on the GPU. Compute with the mask itself."
_READ_ALL = "Let the GPU compare, and keep the answer there."
_CHECKED = "It reads whether it succeeded. The variant *_ex leaves that on the GPU."
_NO_CODE = "The CPU reads back whether it succeeded, and no variant skips that check: keep it out of most steps."

BY_OP = {
    "item": Fix(_LATER, "total += loss.item()", "total += loss.detach()"),
    "float": Fix(_LATER, "total += float(loss)", "total += loss.detach()"),
    "int": Fix("Keep the number on the GPU, as a tensor.", "right += int(mask.sum())", "right += mask.sum()"),
    "bool": Fix(
        "Let the GPU decide: torch.where takes one of two values by the condition.",
        "if loss > 10: loss = limit",
        "loss = torch.where(loss > 10, limit, loss)",
    ),
    "format": Fix(
        "Collect the numbers on the GPU and format them only every so many steps.",
        'line = f"loss {loss:.3f}"',
        "losses.append(loss.detach())",
    ),
    "print": Fix(
        "Collect the numbers on the GPU and print them only every so many steps.",
        "print(loss)",
        "losses.append(loss.detach())",
    ),
    "tolist": Fix(_COPY, "values = x.tolist()", _HOST),
    "cpu": Fix(_COPY, "host = x.cpu()", _HOST),
    "nonzero": Fix(_MASKED, "total = x[mask.nonzero()].sum()", _WHERE),
    "where": Fix(_MASKED, "total = x[torch.where(mask)].sum()", _WHERE),
    "getitem": Fix(_MASKED, "total = x[mask].sum()", _WHERE),
    "masked_select": Fix(_MASKED, "total = x.masked_select(mask).sum()", _WHERE),
    "setitem": Fix(
        "A mask with a tensor as value is turned into indices. A Python number, or torch.where, is not.",
        "x[mask] = scale",
        "x = torch.where(mask, scale, x)",
    ),
    "unique": Fix(
        "How many there are is only known on the GPU. Mark those of a known number of classes.",
        "classes = torch.unique(labels)",
        "present = torch.nn.functional.one_hot(labels, 10).any(0)",
    ),
    "unique_consecutive": Fix(
        "How many there are is only known on the GPU. Mark where a run starts.",
        "values = torch.unique_consecutive(labels)",
        "starts = torch.diff(labels, prepend=labels[:1] - 1) != 0",
    ),
    "repeat_interleave": Fix(
        "Say how long the result is.",
        "y = torch.repeat_interleave(x, repeats)",
        "y = torch.repeat_interleave(x, repeats, output_size=16)",
    ),
    "tensor": Fix(
        "Make it once before the loop, or let the GPU fill it: torch.full, torch.zeros, torch.arange.",
        'scale = torch.tensor(0.1, device="cuda")',
        'scale = torch.full((), 0.1, device="cuda")',
    ),
    "new_tensor": Fix(
        "Make it once before the loop, or let the GPU fill it.",
        "scale = x.new_tensor(0.1)",
        "scale = x.new_full((), 0.1)",
    ),
    "equal": Fix(_READ_ALL, "same = torch.equal(x, y)", "same = (x == y).all()"),
    "allclose": Fix(_READ_ALL, "close = torch.allclose(x, y)", "close = torch.isclose(x, y).all()"),
    "contains": Fix(_READ_ALL, "found = 1.0 in x", "found = (x == 1.0).any()"),
    "isin": Fix("It sorts and counts large inputs. Compare every pair instead: (x[:, None] == y).any(-1)."),
    "bincount": Fix(
        "It reads the largest value. Add ones into a known number of bins.",
        "counts = torch.bincount(labels, minlength=10)",
        "counts = torch.zeros(10, dtype=torch.long, device=labels.device)\n"
        "counts.scatter_add_(0, labels, torch.ones_like(labels))",
    ),
    "histc": Fix(
        "Without bounds it reads the least and the largest value. Add ones into bins of known bounds.",
        "counts = torch.histc(x, bins=10)",
        "bins = (x.clamp(0, 0.999) * 10).long()\n"
        "counts = torch.zeros(10, device=x.device).scatter_add_(0, bins, torch.ones_like(x))",
    ),
    "one_hot": Fix(
        "Without the number of classes it reads the largest label.",
        "y = torch.nn.functional.one_hot(labels)",
        "y = torch.nn.functional.one_hot(labels, num_classes=10)",
    ),
    "inv": Fix(_CHECKED, "inverse = torch.linalg.inv(a)", "inverse, info = torch.linalg.inv_ex(a)"),
    "cholesky": Fix(_CHECKED, "factor = torch.linalg.cholesky(a)", "factor, info = torch.linalg.cholesky_ex(a)"),
    "solve": Fix(_CHECKED, "y = torch.linalg.solve(a, x)", "y, info = torch.linalg.solve_ex(a, x)"),
    "lu_factor": Fix(
        _CHECKED, "lu, pivots = torch.linalg.lu_factor(a)", "lu, pivots, info = torch.linalg.lu_factor_ex(a)"
    ),
    "ldl_factor": Fix(
        _CHECKED, "ld, pivots = torch.linalg.ldl_factor(a)", "ld, pivots, info = torch.linalg.ldl_factor_ex(a)"
    ),
    **dict.fromkeys(
        ["svd", "svdvals", "eig", "eigvals", "eigh", "eigvalsh", "lstsq", "pinv", "matrix_rank", "norm", "cond"],
        Fix(_NO_CODE),
    ),
    "clip_grad_norm_": Fix(
        "Do without the check: a norm that is not finite shows in the loss, and a GradScaler skips the step.",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    ),
    "empty_cache": Fix(
        "Leave it out of the step: it frees what the next step allocates again.",
        "torch.cuda.empty_cache()",
        "pass  # the allocator uses freed memory again by itself",
    ),
    "save": Fix(
        "Copy without waiting, and let a thread write the file when an event says that the copy has arrived.",
        "torch.save(model.state_dict(), path)",
        'state = {name: value.to("cpu", non_blocking=True) for name, value in model.state_dict().items()}',
    ),
    "load": Fix("Load once, before the loop."),
    "free": Fix("Memory is given back to the driver. Keep buffers, and leave empty_cache() out of the step."),
    "ctc_loss": Fix("Pass the lengths as CPU tensors; it still waits for the lengths that it copies to the GPU."),
    "barrier": Fix("Collectives order the GPUs by themselves: leave the barrier out of the step."),
}

TO_GPU = Fix(
    _PIN,
    'batch = batch.to("cuda")',
    'batch = batch.pin_memory()  # better: DataLoader(..., pin_memory=True)\n'
    'batch = batch.to("cuda", non_blocking=True)',
)  # fmt: skip
PAGEABLE = Fix(
    "Without pinned memory, non_blocking=True waits all the same. Let the DataLoader pin its batches.",
    'batch = batch.to("cuda", non_blocking=True)',
    'batch = batch.pin_memory().to("cuda", non_blocking=True)',
)
FILL = Fix(
    "Copy from pinned memory, without waiting.",
    "buffer.copy_(batch)",
    "buffer.copy_(batch.pin_memory(), non_blocking=True)",
)
EMPTY = Fix(
    "Copy into pinned memory without waiting, and read it when an event says that it has arrived.",
    "host.copy_(x)",
    "host = torch.empty(x.shape, pin_memory=True)\nhost.copy_(x, non_blocking=True)",
)
CPU_INDEX = Fix(
    "An index on the CPU is copied to the GPU first. Make it there.",
    "rows = x[torch.arange(2)]",
    "rows = x[torch.arange(2, device=x.device)]",
)
NUMBER = Fix(
    "A tensor of one number is copied to the GPU first. Give a Python number.",
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
INIT = Fix("Initialize the module on the CPU, and move it to the GPU afterwards, once, before the loop.")
SLICE = Fix(
    "A size or an index must be a Python number. Keep the size, and mask what is beyond.",
    "total = x[:n].sum()",
    "total = torch.where(torch.arange(len(x), device=x.device) < n, x, 0.0).sum()",
)
DEVICE = Fix(
    "Leave it out: what reads a result waits by itself. To measure time, record events.",
    "torch.cuda.synchronize()",
    "end = torch.cuda.Event(enable_timing=True)\nend.record()",
)
PINNED = Fix(
    "The memory is pinned: only non_blocking=True is missing.",
    'x = batch.pin_memory().to("cuda")',
    'x = batch.pin_memory().to("cuda", non_blocking=True)',
)
CREATED = Fix(
    "Create it on the GPU.",
    'x = torch.zeros(4).to("cuda")',
    'x = torch.zeros(4, device="cuda")',
)
GUARD = Fix(
    "Gather what is wrong on the GPU, and look at it only every so many steps.",
    "if torch.isnan(loss): raise ValueError(loss)",
    "total += torch.isnan(loss)",
)
LIBRARY = Fix("A line of a library waits: see whether an option of it, or a newer version, does without.")
EVENT = Fix(
    "Let the GPU wait for it, not the CPU.",
    "done.synchronize()",
    "torch.cuda.current_stream().wait_event(done)",
)
STREAM = Fix(
    "Let the other stream wait for it, not the CPU.",
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
SCALE = Fix("It reads the scale: log it only every so many steps.")
VALIDATE = Fix(
    "It reads whether its arguments are valid. Check them while you develop only.",
    "noise = torch.distributions.Normal(x, scale)",
    "noise = torch.distributions.Normal(x, scale, validate_args=False)",
)
PACK = Fix("Give the lengths on the CPU, and the sequences sorted by length (enforce_sorted=True).")
TESTING = Fix("A check for tests: keep it out of the step.")
