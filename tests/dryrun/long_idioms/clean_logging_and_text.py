"""Lookalikes that do not synchronize: logging, metadata, metrics, text generation, masks, experts."""

from tests.dryrun.unseen_idioms import Idiom

IDIOMS: dict[str, Idiom] = {
    # Logging
    "loss_added_on_device": Idiom(
        'total = torch.zeros((), device="cuda")\n'
        "for row in x:\n"
        "    total += m(row).pow(2).sum().detach()\n"
        "mean = total / len(x)",
        "the sum stays a tensor on the device",
    ),
    "window_of_losses": Idiom(
        "from collections import deque\n\n"
        "window = deque(maxlen=2)\n"
        "for row in x:\n"
        "    window.append(m(row).sum().detach())\n"
        "mean = torch.stack(list(window)).mean()",
        "the window holds tensors and is averaged on the device",
    ),
    "print_that_is_not_due": Idiom(
        "for step in range(3):\n"
        "    loss = m(x).pow(2).mean()\n"
        "    if (step + 1) % 100 == 0:\n"
        '        print(f"{step}: {loss.item():.4f}", file=io.StringIO())',
        "the condition on the step never holds",
    ),
    "logger_at_debug": Idiom(
        'import logging\n\nlogging.getLogger("train").debug("loss is %s", t.mean())',
        "the level is off, so the record is never formatted",
    ),
    "metrics_kept_as_tensors": Idiom(
        'logs = {"loss": t.mean().detach(), "max": t.amax(), "tokens": x.numel(), "batch": x.shape[0]}\n'
        'logs = {f"train/{k}": v for k, v in logs.items()}',
        "the values are kept for later",
    ),
    "report_never_called": Idiom(
        'def report():\n    return {"loss": t.mean().item()}\n\n\nhooks = [report]',
        "the function that reads the value is only defined",
    ),
    "model_size": Idiom(
        "trained = sum(q.numel() for q in m.parameters() if q.requires_grad)\n"
        "size = sum(q.numel() * q.element_size() for q in m.parameters()) / 2**20\n"
        'print(f"{trained:,} parameters, {size:.1f} MiB", file=io.StringIO())',
        "sizes are held on the host",
    ),
    "peak_memory_line": Idiom(
        'f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"',
        "the allocator counts on the host",
    ),
    "learning_rate_line": Idiom(
        "o = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "s = torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step))\n"
        "o.step()\n"
        "s.step()\n"
        "line = f\"lr {s.get_last_lr()[0]:.2e} {o.param_groups[0]['lr']:.2e}\"",
        "the rate is a Python float",
    ),
    "launch_time": Idiom(
        "import time\n\n"
        "start = time.perf_counter()\n"
        "m(x)\n"
        'print(f"{time.perf_counter() - start:.6f}", file=io.StringIO())',
        "the clock is read without waiting for the device",
    ),
    "gradient_norm_of_norms": Idiom(
        "total = torch.stack([q.grad.detach().norm(2) for q in m.parameters()]).norm(2)",
        "the norms are stacked on the device",
    ),
    "host_losses": Idiom(
        "losses = torch.tensor([0.3, 0.2])\n"
        'line = f"{losses.mean().item():.3f} {losses.mean():.3f}"\n'
        "if losses[-1] < losses[0]:\n"
        "    best = float(losses.min())",
        "the tensor is on the CPU",
    ),
    "item_of_one_element_only": Idiom(
        "value = t.item() if t.numel() == 1 else t.mean()",
        "the other branch is taken, as there are four elements",
    ),
    # Metadata
    "check_the_shapes": Idiom(
        'if x.shape[0] > 3 or x.dtype != torch.float32 or x.device.type == "meta":\n'
        '    raise ValueError(f"unexpected input {tuple(x.shape)}, {x.dtype}")',
        "sizes, types and devices are held on the host",
    ),
    "optional_mask": Idiom(
        "mask = None\n"
        "if mask is None and torch.is_tensor(x):\n"
        "    mask = x.new_ones(x.shape[:2], dtype=torch.bool)\n"
        "scores = x.masked_fill(~mask, -1.0)",
        "identity and isinstance read no value",
    ),
    "freeze_and_select": Idiom(
        "for q in m.parameters():\n"
        "    q.requires_grad_(q.dim() > 1)\n"
        "chosen = [q for q in m.parameters() if q.requires_grad]",
        "requires_grad is a Python bool",
    ),
    "parameters_by_identity": Idiom(
        "decayed = {q for q in m.parameters() if q.dim() > 1}\n"
        "rest = [q for q in m.parameters() if q not in decayed]",
        "tensors hash by identity, and a set compares hashes first",
    ),
    "tied_weights": Idiom(
        'head = nn.Linear(4, 2, bias=False, device="cuda")\n'
        "head.weight = m.weight\n"
        "tied = head.weight is m.weight and head.weight.data_ptr() == m.weight.data_ptr()",
        "identity and addresses are held on the host",
    ),
    "minibatches_by_slices": Idiom(
        "outputs = []\n"
        "for start in range(0, x.shape[0], 2):\n"
        "    outputs.append(m(x[start : start + 2]))\n"
        "out = torch.cat(outputs)",
        "the bounds are Python numbers",
    ),
    "rows_by_unbind": Idiom(
        "out = torch.stack([row * k for k, row in enumerate(x.unbind(0))])",
        "unbind makes views of known sizes",
    ),
    "parameters_with_gradients": Idiom(
        "grads = [q.grad for q in m.parameters()]\n"
        "with torch.no_grad():\n"
        "    for q, g in zip(m.parameters(), grads):\n"
        "        q.sub_(g, alpha=0.1)",
        "zip takes tensors without reading them",
    ),
    # Metrics
    "hits_on_device": Idiom(
        'correct = torch.zeros((), dtype=torch.long, device="cuda")\n'
        "for batch, target in zip(x.split(2), (i[:3] % 2).split(2)):\n"
        "    correct += (m(batch).argmax(1) == target).sum()",
        "the count stays a tensor on the device",
    ),
    "confusion_by_scatter": Idiom(
        'flat = torch.zeros(9, dtype=torch.long, device="cuda")\n'
        "flat.scatter_add_(0, i * 3 + i.flip(0), torch.ones_like(i))\n"
        "confusion = flat.view(3, 3)\n"
        "union = confusion.sum(0) + confusion.sum(1) - confusion.diagonal()\n"
        "iou = confusion.diagonal() / union.clamp(min=1)",
        "the number of classes is given",
    ),
    "precision_at_k": Idiom(
        "_, pred = x.topk(2, 1, True, True)\n"
        "correct = pred.t().eq(i[:3].view(1, -1).expand(2, -1))\n"
        "precision = correct[:1].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / 3)",
        "the percentage stays a tensor on the device",
    ),
    "area_under_the_curve": Idiom(
        "hits = b[t.argsort(descending=True)]\n"
        "tpr = hits.cumsum(0) / hits.sum()\n"
        "fpr = (~hits).cumsum(0) / (~hits).sum().clamp(min=1)\n"
        "area = torch.trapezoid(tpr, fpr)",
        "sorting and adding need no value on the host",
    ),
    "mean_of_valid": Idiom(
        'mean = x.masked_fill(x < 0, float("nan")).nanmean(1)',
        "invalid elements become nan and are skipped by the kernel",
    ),
    "host_predictions": Idiom(
        "truth, pred = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, 1, 1])\n"
        "confusion = torch.bincount(truth * 3 + pred, minlength=9).view(3, 3)\n"
        "accuracy = (truth == pred).float().mean().item()\n"
        "wrong = (truth != pred).nonzero().flatten().tolist()",
        "the tensors are on the CPU",
    ),
    # Text generation
    "greedy_for_a_fixed_length": Idiom(
        'ids = torch.zeros(3, 1, dtype=torch.long, device="cuda")\n'
        'finished = torch.zeros(3, dtype=torch.bool, device="cuda")\n'
        "for _ in range(3):\n"
        "    nxt = (m(x) + ids[:, -1:]).argmax(1).masked_fill(finished, 0)\n"
        "    finished |= nxt == 1\n"
        "    ids = torch.cat([ids, nxt[:, None]], dim=1)",
        "the number of steps is given",
    ),
    "top_p_filter": Idiom(
        "ordered, order = x.sort(descending=True)\n"
        "remove = ordered.softmax(-1).cumsum(-1) > 0.9\n"
        "remove[:, 1:] = remove[:, :-1].clone()\n"
        "remove[:, 0] = False\n"
        'logits = x.masked_fill(remove.scatter(1, order, remove), -float("inf"))',
        "the removed tokens are filled, not selected",
    ),
    "repetition_penalty": Idiom(
        "score = x.gather(1, i[:3, None])\n"
        "score = torch.where(score < 0, score * 1.2, score / 1.2)\n"
        "logits = x.scatter(1, i[:3, None], score)",
        "gather, where and scatter have known shapes",
    ),
    "sample_by_exponential_noise": Idiom(
        "probs = x.softmax(-1)\nnxt = (probs / torch.empty_like(probs).exponential_(1)).argmax(-1, keepdim=True)",
        "argmax takes the place of multinomial",
    ),
    "min_p_filter": Idiom(
        "probs = x.softmax(-1)\n"
        "floor = 0.1 * probs.amax(-1, keepdim=True)\n"
        'logits = x.masked_fill(probs < floor, -float("inf"))',
        "the floor is a tensor on the device",
    ),
    "suppress_a_column": Idiom(
        'scores = x.log_softmax(-1)\nscores[:, 2] = -float("inf")',
        "a number fills the column by a kernel",
    ),
    "beam_step": Idiom(
        "best, flat = (x + x[:, :1]).view(-1).topk(3)\n"
        'beam = torch.div(flat, 4, rounding_mode="floor")\n'
        "token = flat % 4\n"
        "reordered = x.index_select(0, beam)",
        "beams and tokens are computed on the device",
    ),
    "cache_by_position": Idiom(
        'cache = torch.zeros(3, 4, device="cuda")\n'
        "for pos in range(3):\n"
        "    cache[pos] = x[pos]\n"
        "    weights = (cache[: pos + 1] @ x[pos]).softmax(0)\n"
        "    out = weights @ cache[: pos + 1]",
        "the positions are Python numbers",
    ),
    "last_token_of_each_row": Idiom(
        'last = (x == x).sum(1) - 1\npicked = x[torch.arange(x.shape[0], device="cuda"), last]',
        "the indices are on the device",
    ),
    # Masks and positions
    "position_ids": Idiom(
        "mask = (x > 0).long()\nposition = mask.cumsum(-1) - 1\nposition.masked_fill_(mask == 0, 1)",
        "the padding is filled by a kernel",
    ),
    "causal_attention": Idiom(
        'mask = torch.full((3, 3), -float("inf"), device="cuda").triu(1)\n'
        "out = (x @ x.T / 2.0 + mask).softmax(-1) @ x",
        "the mask is built on the device",
    ),
    "mean_over_lengths": Idiom(
        'mask = torch.arange(4, device="cuda")[None] < (i[:3, None] + 1)\n'
        "pooled = (x * mask).sum(1) / mask.sum(1).clamp(min=1)",
        "the mask multiplies, and selects nothing",
    ),
    "attention_with_padding": Idiom(
        'attention = nn.MultiheadAttention(4, 2, batch_first=True, device="cuda")\n'
        "query = x[None]\n"
        'padding = torch.zeros(1, 3, dtype=torch.bool, device="cuda")\n'
        "out, weights = attention(query, query, query, key_padding_mask=padding)",
        "in training the padding is added to the scores",
    ),
    "rotary_embedding": Idiom(
        'inv = 1.0 / 10000 ** (torch.arange(0, 2, device="cuda") / 2)\n'
        'angle = torch.outer(torch.arange(3, device="cuda"), inv).repeat(1, 2)\n'
        "left, right = x.chunk(2, dim=-1)\n"
        "out = x * angle.cos() + torch.cat([-right, left], dim=-1) * angle.sin()",
        "the angles are computed on the device",
    ),
    "sinusoids": Idiom(
        "import math\n\n"
        'table = torch.zeros(3, 4, device="cuda")\n'
        'position = torch.arange(3, device="cuda")[:, None]\n'
        'rate = torch.exp(torch.arange(0, 4, 2, device="cuda") * (-math.log(10000.0) / 4))\n'
        "table[:, 0::2] = torch.sin(position * rate)\n"
        "table[:, 1::2] = torch.cos(position * rate)",
        "slices with a step are filled from the device",
    ),
    "longest_of_host_lengths": Idiom(
        "lengths = torch.tensor([3, 1, 2])\n"
        "longest = int(lengths.max())\n"
        'mask = torch.zeros(3, longest, device="cuda")\n'
        "for row, n in enumerate(lengths.tolist()):\n"
        "    mask[row, :n] = 1.0",
        "the lengths are on the CPU",
    ),
    "recurrent_cell_over_time": Idiom(
        'cell = nn.GRUCell(4, 2, device="cuda")\n'
        'state = torch.zeros(1, 2, device="cuda")\n'
        "for step in x.split(1):\n"
        "    state = cell(step, state)",
        "each step is a fused kernel",
    ),
    # Mixture of experts
    "every_expert_on_every_token": Idiom(
        'experts = [m, nn.Linear(4, 2, device="cuda")]\n'
        "gate = x[:, :2].softmax(-1)\n"
        "out = sum(gate[:, e : e + 1] * experts[e](x) for e in range(2))",
        "the gate multiplies, and selects nothing",
    ),
    "offsets_of_sorted_tokens": Idiom(
        'counts = torch.zeros(3, dtype=torch.long, device="cuda").scatter_add_(0, i, torch.ones_like(i))\n'
        "offsets = counts.cumsum(0, dtype=torch.int32)\n"
        "tokens = t[i.argsort()]",
        "counts and offsets stay on the device",
    ),
    "slots_within_capacity": Idiom(
        "slot = F.one_hot(i, 3).cumsum(0).gather(1, i[:, None]).squeeze(1) - 1\n"
        "flat = i * 2 + slot.clamp(max=1)\n"
        'buffer = torch.zeros(6, device="cuda").index_add(0, flat, t * (slot < 2))',
        "the capacity is a number, and tokens over it are zeroed",
    ),
    "load_balancing_loss": Idiom(
        "probs = x.softmax(-1)\n"
        "share = F.one_hot(probs.argmax(-1), 4).float().mean(0)\n"
        "loss = 4 * (share * probs.mean(0)).sum()",
        "the fractions stay on the device",
    ),
}
