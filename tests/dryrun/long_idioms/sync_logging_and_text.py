"""Idioms that synchronize: logging, guards, metrics, text generation, masks, experts."""

from tests.dryrun.unseen_idioms import Idiom

IDIOMS: dict[str, Idiom] = {
    # Logging
    "average_meter": Idiom(
        "class Meter:\n"
        "    total, count = 0.0, 0\n\n"
        "    def update(self, value, n):\n"
        "        self.total += value.item() * n\n"
        "        self.count += n\n\n\n"
        "meter = Meter()\n"
        "meter.update(F.cross_entropy(m(x), i[:3] % 2), len(x))",
        "the meter takes the loss by item",
    ),
    "progress_postfix": Idiom(
        'stats = {"loss": m(x).pow(2).mean(), "lr": 0.1}\n'
        'postfix = ", ".join(f"{k}={v:.3f}" for k, v in stats.items())',
        "a format specification reads the tensor back",
    ),
    "metrics_to_numbers": Idiom(
        'logs = {"loss": t.mean(), "lr": 0.1, "tokens": x.numel()}\n'
        "logs = {k: v.item() if torch.is_tensor(v) else v for k, v in logs.items()}",
        "each tensor of the dict is read by item",
    ),
    "smoothed_loss": Idiom(
        "smooth = None\n"
        "for row in x:\n"
        "    loss = m(row).pow(2).sum()\n"
        "    value = float(loss.detach())\n"
        "    smooth = value if smooth is None else 0.9 * smooth + 0.1 * value",
        "the average is kept as a Python float",
    ),
    "print_every_other_step": Idiom(
        'running = torch.zeros((), device="cuda")\n'
        "for step in range(4):\n"
        "    running += t.mean()\n"
        "    if (step + 1) % 2 == 0:\n"
        '        print(f"{step}: {running / 2:.4f}", file=io.StringIO())\n'
        "        running.zero_()",
        "the due steps format the average",
    ),
    "csv_row": Idiom(
        "import csv\n\ncsv.writer(io.StringIO()).writerow([1, m(x).pow(2).mean()])",
        "the writer takes str of the tensor",
    ),
    "logger_at_warning": Idiom(
        'import logging\n\nlogging.getLogger("train").warning("loss went up to %s", t.mean())',
        "the record is formatted, and so the tensor",
    ),
    "json_predictions": Idiom(
        'import json\n\njson.dumps({"step": 3, "logits": m(x).detach().cpu().tolist()})',
        "the outputs are copied to the host for the list",
    ),
    "gradient_norms_by_name": Idiom(
        "{name: q.grad.norm().item() for name, q in m.named_parameters()}",
        "the norm of each parameter is read by item",
    ),
    "total_gradient_norm": Idiom(
        "total = 0.0\n"
        "for q in m.parameters():\n"
        "    total += q.grad.detach().norm(2).item() ** 2\n"
        "total = total**0.5",
        "the squares are added up in Python",
    ),
    "weight_histograms": Idiom(
        "for name, q in m.named_parameters():\n    np.histogram(q.detach().cpu().numpy(), bins=4)",
        "the weights are copied to the host for NumPy",
    ),
    "epoch_mean_by_numpy": Idiom(
        "losses = [m(row).sum().detach() for row in x]\nnp.mean(torch.stack(losses).cpu().numpy())",
        "the stacked losses are copied to the host",
    ),
    "gan_history": Idiom(
        "history = []\n"
        "d_loss, g_loss = F.softplus(-t).mean(), F.softplus(t).mean()\n"
        "history.append((d_loss.item(), g_loss.item()))",
        "both losses are read by item",
    ),
    # Guards and early stopping
    "early_stopping": Idiom(
        'best, patience = float("inf"), 0\n'
        "loss = m(x).pow(2).mean()\n"
        "if loss < best:\n"
        "    best, patience = loss.detach(), 0\n"
        "else:\n"
        "    patience += 1",
        "the comparison with the best loss is tested for truth",
    ),
    "stop_on_nan": Idiom(
        "loss = F.cross_entropy(m(x), i[:3] % 2)\n"
        "if not torch.isfinite(loss):\n"
        '    raise FloatingPointError("the loss is not finite")',
        "the check of the loss is tested for truth",
    ),
    "skip_a_bad_step": Idiom(
        "o = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "norm = nn.utils.clip_grad_norm_(m.parameters(), 1.0)\n"
        "if norm.isfinite():\n"
        "    o.step()",
        "whether the norm is finite decides on the host",
    ),
    "labels_in_range": Idiom(
        'assert i.min() >= 0 and i.max() < 3, "a label is out of range"',
        "both bounds are tested for truth",
    ),
    "convergence_loop": Idiom(
        "v = F.normalize(t, dim=0)\n"
        "for _ in range(3):\n"
        "    new = F.normalize(x.T @ (x @ v), dim=0)\n"
        "    shift, v = (new - v).norm(), new\n"
        "    if shift < 1e-4:\n"
        "        break",
        "the shift of each round is compared on the host",
    ),
    # Metrics
    "running_accuracy": Idiom(
        "correct = total = 0\npred = m(x).argmax(1)\ncorrect += (pred == i[:3] % 2).sum().item()\ntotal += len(x)",
        "the number of hits is read by item",
    ),
    "top_k_accuracy": Idiom(
        "top = x.topk(2, dim=1).indices\n"
        "hits = (top == i[:3, None]).any(1).float().mean()\n"
        'logs = {"top2": round(hits.item() * 100, 2)}',
        "the mean is read by item to be rounded",
    ),
    "confusion_by_bincount": Idiom(
        "pred = i.flip(0)\nconfusion = torch.bincount(i * 3 + pred, minlength=9).view(3, 3)",
        "bincount reads the extremes back, whatever minlength is",
    ),
    "confusion_by_loop": Idiom(
        "confusion = np.zeros((3, 3), dtype=int)\n"
        "for truth, pred in zip(i, i.flip(0)):\n"
        "    confusion[int(truth), int(pred)] += 1",
        "int reads each label back",
    ),
    "f1_by_numpy": Idiom(
        "y, z = i.cpu().numpy(), i.flip(0).cpu().numpy()\n"
        "hits = ((y == 1) & (z == 1)).sum()\n"
        "f1 = 2 * hits / max(1, (y == 1).sum() + (z == 1).sum())",
        "labels and predictions are copied to the host",
    ),
    "collect_predictions": Idiom(
        "preds = []\nfor batch in x.split(2):\n    preds.extend(m(batch).argmax(1).tolist())",
        "each batch of predictions becomes a list",
    ),
    "mean_iou_of_present_classes": Idiom(
        'inter = torch.zeros(3, device="cuda").index_add_(0, i, b.float())\n'
        'union = torch.zeros(3, device="cuda").index_add_(0, i, torch.ones_like(t))\n'
        "miou = (inter / union)[union > 0].mean()",
        "the classes are selected by a mask",
    ),
    "accuracy_by_class": Idiom(
        "for c in i.unique():\n    (t * (i == c)).sum()",
        "unique has a size that depends on the data",
    ),
    "correlation_of_features": Idiom(
        'off = torch.corrcoef(x) - torch.eye(3, device="cuda")\nloss = off.pow(2).sum()',
        "corrcoef calls cov, which compares a device tensor on the host",
    ),
    # Text generation
    "greedy_until_eos": Idiom(
        'ids = torch.zeros(3, 1, dtype=torch.long, device="cuda")\n'
        "for _ in range(2):\n"
        "    nxt = (m(x) + ids[:, -1:]).argmax(1)\n"
        "    ids = torch.cat([ids, nxt[:, None]], dim=1)\n"
        "    if (nxt == 1).all():\n"
        "        break",
        "whether all have ended is tested for truth",
    ),
    "unfinished_sequences": Idiom(
        'unfinished = torch.ones(3, dtype=torch.long, device="cuda")\n'
        "for _ in range(2):\n"
        "    unfinished = unfinished.mul((x.argmax(1) != 2).long())\n"
        "    if unfinished.max() == 0:\n"
        "        break",
        "the loop tests a tensor for truth",
    ),
    "top_k_sampling": Idiom(
        "floor = x.topk(2, dim=-1).values[:, -1:]\n"
        'logits = x.masked_fill(x < floor, -float("inf"))\n'
        "nxt = torch.distributions.Categorical(logits=logits).sample()",
        "the distribution checks its logits by all",
    ),
    "token_is_eos": Idiom(
        "eos_ids = {1, 2}\nnxt = t.argmax()\nfinished = nxt.item() in eos_ids",
        "the token is read by item",
    ),
    "decode_the_ids": Idiom(
        'vocabulary = ["a", "b", "c"]\ntext = " ".join(vocabulary[k] for k in i.tolist())',
        "the ids become a list",
    ),
    "suppress_one_token": Idiom(
        'scores = x.softmax(-1)\nscores[0, 2] = -float("inf")',
        "the number becomes a CPU tensor that is copied to one element (up to torch 2.13)",
    ),
    "banned_tokens": Idiom(
        "scores = x.clone()\n"
        "for row, banned in enumerate([[0], [1, 2], [3]]):\n"
        '    scores[row, banned] = -float("inf")',
        "each list of indices is copied to the device",
    ),
    "beam_bookkeeping": Idiom(
        "scores, flat = x.view(-1).topk(2)\n"
        "beams = [(s.item(), k.item() // 4, k.item() % 4) for s, k in zip(scores, flat)]",
        "scores and indices of the beams are read by item",
    ),
    "beam_is_done": Idiom(
        "worst, length = -3.0, 5\ndone = bool(t.log_softmax(0).max() / length**0.6 <= worst)",
        "the best score is compared with a number on the host",
    ),
    "speculative_decoding": Idiom(
        'accept = torch.rand(4, device="cuda") < t.sigmoid()\n'
        "n = accept.long().cumprod(0).sum().item()\n"
        "accepted = i[:n]",
        "the number of accepted tokens is read by item",
    ),
    "collapse_repeats": Idiom(
        "ids = x.argmax(1).tolist()\ntext = [k for k, before in zip(ids, [-1, *ids]) if k != before and k != 0]",
        "the ids become a list before repeats are dropped",
    ),
    # Masks and ragged batches
    "drop_a_full_mask": Idiom(
        'mask = torch.ones(3, 4, dtype=torch.bool, device="cuda")\nif mask.all():\n    mask = None',
        "whether the mask is full decides on the host",
    ),
    "unpad_for_varlen_attention": Idiom(
        "mask = x > 0\n"
        "lengths = mask.sum(-1, dtype=torch.int32)\n"
        "indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()\n"
        "longest = lengths.max().item()\n"
        "cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))",
        "nonzero reads its count back, and max is read by item",
    ),
    "mean_over_masked": Idiom(
        'loss = F.mse_loss(x, x.neg(), reduction="none")\nloss = loss[x > 0].mean()',
        "the elements are selected by a mask",
    ),
    "trim_the_padding": Idiom(
        "lengths = (x > 0).sum(1)\ntrimmed = x[:, : lengths.max()]",
        "the end of the slice is read by __index__",
    ),
    "split_by_lengths": Idiom(
        "parts = t.split(i.tolist())\nmeans = [part.sum() / max(1, part.numel()) for part in parts]",
        "the lengths become a list",
    ),
    "pairs_above_the_diagonal": Idiom(
        "dist = torch.cdist(x, x)\npairs = dist[torch.ones_like(dist, dtype=torch.bool).triu(1)]",
        "the pairs are selected by a mask",
    ),
    "encoder_with_padding_in_eval": Idiom(
        'layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, device="cuda")\n'
        "encoder = nn.TransformerEncoder(layer, 1).eval()\n"
        'encoder(x[None], src_key_padding_mask=torch.zeros(1, 3, dtype=torch.bool, device="cuda"))',
        "whether the mask is left aligned is computed on the device and returned as a bool",
    ),
    "pack_with_device_lengths": Idiom(
        "lengths = (x == x).sum(1)\n"
        "nn.utils.rnn.pack_padded_sequence(x.unsqueeze(-1), lengths.cpu(), batch_first=True)",
        "the lengths have to be copied to the host",
    ),
    "number_of_segments": Idiom(
        'n = int(i.max()) + 1\npooled = torch.zeros(n, device="cuda").index_add_(0, i, t)',
        "the number of segments is read by int",
    ),
    # Mixture of experts
    "experts_by_where": Idiom(
        "expert = x.argmax(1) % 2\n"
        'out = torch.zeros(3, 2, device="cuda")\n'
        "for e in range(2):\n"
        "    rows = torch.where(expert == e)[0]\n"
        "    out.index_add_(0, rows, m(x[rows]).detach())",
        "where with a condition only is nonzero",
    ),
    "hit_experts": Idiom(
        "mask = F.one_hot(i, num_classes=3).T\n"
        "hit = torch.greater(mask.sum(dim=-1), 0).nonzero()\n"
        "for e in hit:\n"
        "    mask[e].sum()",
        "nonzero finds the experts that have tokens",
    ),
    "skip_idle_experts": Idiom(
        "out = torch.zeros_like(t)\n"
        "for e in range(3):\n"
        "    chosen = i == e\n"
        "    if chosen.any():\n"
        "        out += torch.where(chosen, t * e, 0.0)",
        "whether an expert has tokens is tested for truth",
    ),
    "tokens_per_expert_to_split": Idiom(
        'counts = torch.zeros(3, dtype=torch.long, device="cuda").scatter_add_(0, i, torch.ones_like(i))\n'
        "chunks = t[i.argsort()].split(counts.tolist())",
        "the counts become a list of sizes",
    ),
    "capacity_from_the_load": Idiom(
        "load = torch.bincount(i, minlength=3)\nover = (load - 1).clamp(min=0).sum()",
        "bincount reads the extremes back",
    ),
    "drop_over_capacity": Idiom(
        "slot = F.one_hot(i, 3).cumsum(0).gather(1, i[:, None]).squeeze(1)\nkept = t[slot <= 1]",
        "the tokens within capacity are selected by a mask",
    ),
}
