"""A second set of idioms, longer fragments of training and inference code, to score a detector by."""

from tests.dryrun.unseen_idioms import Idiom

SYNCHRONISING: dict[str, Idiom] = {
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
    # Losses
    "contrastive_without_diagonal": Idiom(
        "z = F.normalize(x, dim=1)\n"
        "sim = z @ z.T\n"
        'negatives = sim[~torch.eye(3, dtype=torch.bool, device="cuda")].view(3, -1)',
        "the off-diagonal elements are selected by a mask",
    ),
    "class_weights": Idiom(
        'weight = torch.tensor([0.3, 0.7]).to("cuda")\nloss = nn.CrossEntropyLoss(weight=weight)(m(x), i[:3] % 2)',
        "the weights are made on the host and copied",
    ),
    "smoothed_labels_with_weights": Idiom(
        'weight = torch.full((2,), 0.5, device="cuda")\n'
        "loss = F.cross_entropy(m(x), i[:3] % 2, weight=weight, label_smoothing=0.1)",
        "the labels that count are selected by a mask to normalise by their weights",
    ),
    "picked_by_range": Idiom(
        "loss = -x.log_softmax(1)[range(3), i[:3]].mean()",
        "the range becomes a tensor that is copied to the device",
    ),
    "normalise_by_positives": Idiom(
        "focal = (1 - t.sigmoid()).pow(2) * F.softplus(-t)\nloss = (focal * b).sum() / max(1, int(b.sum()))",
        "the number of positives is read by int",
    ),
    "hard_example_mining": Idiom(
        "losses = F.softplus(t)\nk = max(1, int(0.5 * b.sum()))\nloss = losses.topk(k).values.mean()",
        "the number of hard examples is computed in Python",
    ),
    "no_valid_triplet": Idiom(
        "dist = torch.cdist(x, x)\n"
        "valid = (dist > 0).sum()\n"
        "loss = dist.sum() / valid if valid > 0 else dist.sum() * 0.0",
        "whether any triplet is valid is tested for truth",
    ),
    # Detection and clustering
    "filter_boxes_by_score": Idiom(
        "scores = x[:, 0].sigmoid()\nkeep = scores > 0.5\nboxes, scores = x[keep], scores[keep]",
        "boxes are selected by a mask",
    ),
    "greedy_suppression": Idiom(
        "order, kept = t.argsort(descending=True), []\n"
        "while order.numel() > 0:\n"
        "    kept.append(order[0].item())\n"
        "    rest = order[1:]\n"
        "    order = rest[(t[rest] - t[order[0]]).abs() > 0.5]",
        "each round reads an index and selects by a mask",
    ),
    "label_names": Idiom(
        'names = {0: "cat", 1: "dog", 2: "bird"}\nfound = [names[int(c)] for c in i]',
        "int reads each label back",
    ),
    "positive_anchors": Idiom(
        "overlap = x.sigmoid().max(1).values\n"
        "positive = torch.nonzero(overlap > 0.5).squeeze(1)\n"
        'loss = F.smooth_l1_loss(x[positive], x[positive] * 0.5, reduction="sum")',
        "nonzero reads its count back",
    ),
    "match_on_the_host": Idiom(
        'cost = torch.cdist(x, x).cpu().numpy()\nmatched = x[torch.from_numpy(cost.argmin(1)).to("cuda")]',
        "the costs are copied to the host, and the matches back",
    ),
    "k_means_centres": Idiom(
        "assign = torch.cdist(x, x[:2]).argmin(1)\n"
        "centres = torch.stack([x[assign == k].mean(0) for k in range(2)])",
        "the members of each cluster are selected by a mask",
    ),
    "principal_components": Idiom(
        "_, _, v = torch.pca_lowrank(x, q=2)\nprojected = x @ v",
        "the decomposition of the small matrix checks its info code",
    ),
    # Reinforcement learning
    "environment_step": Idiom(
        "action = m(x).argmax(1).cpu().numpy()\n"
        "observation = np.ones((3, 4), dtype=np.float32) * action[:, None]\n"
        'x = torch.from_numpy(observation).to("cuda")',
        "actions are copied to the host and observations to the device",
    ),
    "reset_when_done": Idiom(
        "done = t > 1.0\nif done.any():\n    t.masked_fill_(done, 0.0)",
        "whether any episode ended is tested for truth",
    ),
    "stop_at_kl": Idiom(
        "old = m(x).log_softmax(1).detach()\n"
        "for _ in range(2):\n"
        "    new = m(x).log_softmax(1)\n"
        "    if (old - new).mean() > 0.02:\n"
        "        break",
        "the divergence is compared with a number on the host",
    ),
    "shuffled_minibatches": Idiom(
        "order = torch.randperm(3)\nfor start in range(0, 3, 2):\n    m(x[order[start : start + 2]])",
        "the permutation is on the host and is copied to index",
    ),
    "discounted_returns_in_python": Idiom(
        "returns, total = [], 0.0\n"
        "for reward in reversed(t):\n"
        "    total = reward.item() + 0.99 * total\n"
        "    returns.insert(0, total)",
        "each reward is read by item",
    ),
    "checked_policy": Idiom(
        "policy = torch.distributions.Categorical(logits=m(x))\n"
        "loss = -(policy.log_prob(i[:3] % 2) * t[:3]).mean()",
        "the distribution checks its logits and the value by all",
    ),
    # Diffusion and codebooks
    "schedule_on_the_host": Idiom(
        "alphas = torch.linspace(0.9, 0.1, 3).cumprod(0)\n"
        "a = alphas.to(device=i.device)[i]\n"
        "noisy = a.sqrt() * t + (1 - a).sqrt() * torch.randn_like(t)",
        "the table is copied at each lookup",
    ),
    "timesteps_on_the_host": Idiom(
        "alphas = torch.linspace(0.9, 0.1, 3)\n"
        'a = alphas[torch.randint(0, 3, (4,))].to("cuda", non_blocking=True)\n'
        "noisy = a.sqrt() * t",
        "the looked-up values are pageable, whatever non_blocking says",
    ),
    "loop_over_device_timesteps": Idiom(
        "sample = t.clone()\n"
        'for step in torch.arange(2, -1, -1, device="cuda"):\n'
        "    noise = torch.randn_like(sample) if step > 0 else torch.zeros_like(sample)\n"
        "    sample = sample - 0.1 * sample + 0.01 * noise",
        "the condition on a step is tested for truth",
    ),
    "index_of_the_timestep": Idiom(
        'timesteps = torch.arange(9, -1, -1, device="cuda")\nindex = (timesteps == 4).nonzero()[0].item()',
        "nonzero reads its count back, and item the index",
    ),
    "image_to_bytes": Idiom(
        "image = (x.clamp(-1, 1) * 127.5 + 127.5).to(torch.uint8).cpu().numpy()",
        "the image is copied to the host",
    ),
    "restart_dead_codes": Idiom(
        "book = x.clone()\n"
        'usage = torch.zeros(3, device="cuda").scatter_add_(0, i[:2], torch.ones(2, device="cuda"))\n'
        "dead = usage < 1\n"
        'book[dead] = x[torch.randint(0, 3, (int(dead.sum()),), device="cuda")]',
        "dead codes are counted by int and set by a mask",
    ),
    "queue_pointer": Idiom(
        'queue, pointer = torch.zeros(8, 4, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")\n'
        "start = int(pointer)\n"
        "queue[start : start + 3] = F.normalize(x, dim=1)",
        "int reads the pointer, a buffer on the device, back",
    ),
    # Data
    "batch_of_pageable": Idiom(
        'batch = {"input": torch.zeros(3, 4), "target": torch.zeros(3)}\n'
        'batch = {k: v.to("cuda", non_blocking=True) for k, v in batch.items()}',
        "copies from pageable memory are staged",
    ),
    "loader_over_host_data": Idiom(
        "from torch.utils.data import DataLoader, TensorDataset\n\n"
        "for (batch,) in DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=2):\n"
        '    m(batch.to("cuda"))',
        "each batch is copied from pageable memory",
    ),
    "collate_token_lists": Idiom(
        "tokens = [torch.tensor(s) for s in [[1, 2], [3]]]\n"
        'ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True).to("cuda")',
        "the padded batch is copied from pageable memory",
    ),
    "normalise_by_host_constants": Idiom(
        "mean = torch.tensor([0.1, 0.2, 0.3, 0.4]).to(x.device)\nnormalised = (x - mean) / 0.5",
        "the means are copied from pageable memory at each call",
    ),
    "random_crop_on_device": Idiom(
        'top = torch.randint(0, 2, (1,), device="cuda").item()\ncrop = x[top : top + 2]',
        "the offset is drawn on the device and read by item",
    ),
    "coin_on_device": Idiom(
        'flipped = x.flip(1) if torch.rand((), device="cuda") < 0.5 else x',
        "the coin is tested for truth",
    ),
    "mixup_by_host_permutation": Idiom(
        'perm = torch.randperm(3).to("cuda")\n'
        "lam = float(np.random.beta(0.4, 0.4))\n"
        "mixed = lam * x + (1 - lam) * x[perm]",
        "the permutation is copied to the device",
    ),
    "mixup_by_host_weights": Idiom(
        'lam = torch.distributions.Beta(0.4, 0.4).sample((3, 1)).to("cuda")\n'
        "mixed = lam * x + (1 - lam) * x.flip(0)",
        "the weights are drawn on the host and copied",
    ),
    "rotation_matrix": Idiom(
        'theta = torch.tensor([[[0.0, -1.0, 0.0], [1.0, 0.0, 0.0]]], device="cuda")\n'
        "grid = F.affine_grid(theta, (1, 1, 4, 4), align_corners=False)",
        "the matrix is made on the host and copied",
    ),
    "resize_to_a_found_size": Idiom(
        "size = int(i.max()) * 4\nF.interpolate(x[None], size=size)",
        "the size is read by int",
    ),
    "strongest_frequency": Idiom(
        "spectrum = torch.fft.rfft(t).abs()\npeak = spectrum.argmax().item()",
        "the index of the peak is read by item",
    ),
    # Optimisers, gradients and checkpoints
    "amp_step_with_clipping": Idiom(
        's = torch.amp.GradScaler("cuda")\n'
        "o = torch.optim.AdamW(m.parameters(), lr=1e-3)\n"
        "s.scale(m(x).pow(2).mean()).backward()\n"
        "s.unscale_(o)\n"
        "nn.utils.clip_grad_norm_(m.parameters(), 1.0)\n"
        "s.step(o)\n"
        "s.update()",
        "the scaler reads whether an inf was found by item",
    ),
    "scaler_checkpoint": Idiom(
        's = torch.amp.GradScaler("cuda")\n'
        "s.scale(m(x).sum()).backward()\n"
        'state = {"model": m.state_dict(), "scaler": s.state_dict()}',
        "scale and growth tracker are read by item",
    ),
    "adafactor": Idiom(
        "torch.optim.Adafactor(m.parameters(), lr=0.01).step()",
        "the norms of parameter and update are read by item",
    ),
    "layerwise_trust_ratio": Idiom(
        "for q in m.parameters():\n"
        "    w, g = q.detach().norm(), q.grad.norm()\n"
        "    if w > 0 and g > 0:\n"
        "        q.data.add_(q.grad, alpha=-0.1 * (w / g).item())",
        "norms are tested for truth, and the ratio read by item",
    ),
    "save_optimizer_state": Idiom(
        "o = torch.optim.AdamW(m.parameters())\n"
        "o.step()\n"
        'torch.save({"step": 1, "optimizer": o.state_dict()}, io.BytesIO())',
        "the moments are copied to the host",
    ),
    "best_weights_on_host": Idiom(
        "best = {k: v.detach().cpu().clone() for k, v in m.state_dict().items()}",
        "each weight is copied to the host",
    ),
    "average_on_host": Idiom(
        "shadow = {k: torch.zeros(v.shape) for k, v in m.state_dict().items()}\n"
        "for k, v in m.state_dict().items():\n"
        "    shadow[k].mul_(0.9).add_(v.detach().cpu(), alpha=0.1)",
        "each weight is copied to the host",
    ),
    "save_in_a_thread": Idiom(
        "from concurrent.futures import ThreadPoolExecutor\n\n"
        "with ThreadPoolExecutor(1) as pool:\n"
        '    pool.submit(torch.save, {"weights": t}, io.BytesIO()).result()',
        "the thread copies the storage to the host, and its result is awaited",
    ),
    "read_after_async_copy": Idiom(
        "p.copy_(t, non_blocking=True)\n"
        "copied = torch.cuda.Event()\n"
        "copied.record()\n"
        "copied.synchronize()\n"
        "values = p.tolist()",
        "the event after the queued copy is waited for",
    ),
    "activations_on_host": Idiom(
        "with torch.autograd.graph.save_on_cpu():\n    loss = m(x).pow(2).sum()\nloss.backward()",
        "saved tensors are copied to pageable memory",
    ),
    "hook_after_accumulation": Idiom(
        "norms = []\n"
        "for q in m.parameters():\n"
        "    q.register_post_accumulate_grad_hook(lambda q, norms=norms: norms.append(q.grad.norm().item()))\n"
        "m(x).sum().backward()",
        "the hook of each parameter reads its norm",
    ),
    "backward_hook_checks_nan": Idiom(
        "bad = []\n\n\n"
        "def check(module, grad_input, grad_output):\n"
        "    if grad_output[0].isnan().any():\n"
        "        bad.append(module)\n\n\n"
        "m.register_full_backward_hook(check)\n"
        "m(x.clone().requires_grad_()).sum().backward()",
        "the hook tests the gradients for truth",
    ),
    "custom_forward": Idiom(
        "class Quantise(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, v):\n"
        "        ctx.scale = v.abs().max().item() / 127\n"
        "        return (v / ctx.scale).round() * ctx.scale\n\n"
        "    @staticmethod\n"
        "    def backward(ctx, g):\n"
        "        return g\n\n\n"
        "Quantise.apply(t.clone().requires_grad_()).sum().backward()",
        "the forward of the function reads the scale back",
    ),
    "quantise_by_a_float_scale": Idiom(
        "scale = float(t.abs().max()) / 127\nq = (t / scale).round().clamp(-128, 127).to(torch.int8)",
        "the scale is read by float",
    ),
    "fake_quantise_by_channel": Idiom(
        "scale = x.abs().amax(1) / 127\n"
        'zero = torch.zeros(3, dtype=torch.int32, device="cuda")\n'
        "torch.fake_quantize_per_channel_affine(x, scale, zero, 0, -128, 127)",
        "the zero points are checked by item",
    ),
    "prune_by_magnitude": Idiom(
        "w = m.weight.detach()\n"
        "threshold = torch.quantile(w.abs().flatten(), 0.5).item()\n"
        "w.mul_(w.abs() > threshold)",
        "the threshold is read by item",
    ),
}


CLEAN: dict[str, Idiom] = {
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
    # Losses
    "contrastive_loss": Idiom(
        "z = F.normalize(x, dim=1)\n"
        "logits = z @ z.T / 0.07\n"
        "loss = F.cross_entropy(logits, torch.arange(z.shape[0], device=z.device))",
        "the labels are made on the device",
    ),
    "learned_temperature": Idiom(
        'scale = nn.Parameter(torch.ones([], device="cuda") * np.log(1 / 0.07))\n'
        "logits = scale.exp().clamp(max=100) * (x @ x.T)",
        "the NumPy number is a Python float",
    ),
    "focal_loss": Idiom(
        "target = b.float()\n"
        'bce = F.binary_cross_entropy_with_logits(t, target, reduction="none")\n'
        "loss = ((1 - torch.exp(-bce)).pow(2) * bce).sum() / target.sum().clamp(min=1)",
        "the positives stay a tensor on the device",
    ),
    "dice_loss": Idiom(
        "prob, target = t.sigmoid(), b.float()\n"
        "loss = 1 - (2 * (prob * target).sum() + 1) / (prob.sum() + target.sum() + 1)",
        "sums and quotients stay on the device",
    ),
    "smoothed_labels": Idiom(
        'target = torch.full((3, 4), 0.1 / 3, device="cuda").scatter_(1, i[:3, None], 0.9)\n'
        "loss = -(target * x.log_softmax(1)).sum(1).mean()",
        "scatter fills by a number",
    ),
    "ignored_and_weighted_labels": Idiom(
        "labels = (i[:3] % 2).masked_fill(b[:3], -100)\n"
        'weight = torch.full((2,), 0.5, device="cuda")\n'
        "loss = F.cross_entropy(m(x), labels, weight=weight, ignore_index=-100)",
        "the kernel skips the ignored label",
    ),
    "smoothing_without_weights": Idiom(
        "labels = (i[:3] % 2).masked_fill(b[:3], -100)\nloss = F.cross_entropy(m(x), labels, label_smoothing=0.1)",
        "the labels that count are counted on the device",
    ),
    "mean_by_multiplying": Idiom(
        'loss = F.mse_loss(x, x.neg(), reduction="none")\n'
        "keep = (x > 0).float()\n"
        "loss = (loss * keep).sum() / keep.sum().clamp(min=1)",
        "the mask multiplies, and selects nothing",
    ),
    "distillation": Idiom(
        "student, teacher = m(x), m(x).detach()\n"
        'soft = F.kl_div((student / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean")\n'
        "loss = 4 * soft + F.cross_entropy(student, i[:3] % 2)\n"
        "loss.backward()",
        "both terms stay on the device",
    ),
    "variational_loss": Idiom(
        "mu, logvar = m(x).chunk(2, dim=1)\n"
        "z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()\n"
        "kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum()",
        "the noise is drawn on the device",
    ),
    "gradient_penalty": Idiom(
        "inputs = x.detach().requires_grad_()\n"
        "(g,) = torch.autograd.grad(m(inputs).pow(2).sum(), inputs, create_graph=True)\n"
        "(g.norm(2, dim=1) - 1).pow(2).mean().backward()",
        "the norms of the gradients stay on the device",
    ),
    # Detection and clustering
    "intersection_over_union": Idiom(
        "boxes = torch.cat([x[:, :2], x[:, :2] + x[:, 2:].abs()], dim=1)\n"
        "low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])\n"
        "high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])\n"
        "inter = (high - low).clamp(min=0).prod(2)\n"
        "area = (boxes[:, 2:] - boxes[:, :2]).prod(1)\n"
        "iou = inter / (area[:, None] + area[None] - inter)",
        "boxes are compared by broadcasting",
    ),
    "zero_the_weak_boxes": Idiom(
        "keep = x[:, 0].sigmoid() > 0.5\n"
        "boxes = torch.where(keep[:, None], x, 0.0)\n"
        "best = boxes[x[:, 0].topk(2).indices]",
        "boxes below the threshold are zeroed, and the best ones have a given number",
    ),
    "cluster_means_by_index_add": Idiom(
        "assign = torch.cdist(x, x[:2]).argmin(1)\n"
        'sums = torch.zeros(2, 4, device="cuda").index_add_(0, assign, x)\n'
        'counts = torch.zeros(2, device="cuda").index_add_(0, assign, torch.ones(3, device="cuda"))\n'
        "centres = sums / counts.clamp(min=1)[:, None]",
        "the number of clusters is given",
    ),
    "softmax_over_segments": Idiom(
        'top = torch.full((3,), -float("inf"), device="cuda").scatter_reduce(0, i, t, "amax")\n'
        "e = (t - top[i]).exp()\n"
        'total = torch.zeros(3, device="cuda").index_add_(0, i, e)\n'
        "weights = e / total[i]",
        "the number of segments is given",
    ),
    "codebook_lookup": Idiom(
        'book = torch.randn(5, 4, device="cuda")\n'
        "codes = torch.cdist(x, book).argmin(1)\n"
        "quantised = F.embedding(codes, book)\n"
        "straight = x + (quantised - x).detach()\n"
        "loss = F.mse_loss(quantised, x.detach()) + 0.25 * F.mse_loss(x, quantised.detach())",
        "the codes are indices on the device",
    ),
    # Reinforcement learning
    "generalised_advantages": Idiom(
        'values, not_done = torch.zeros(5, device="cuda"), b.float()\n'
        'advantages, last = torch.zeros_like(t), torch.zeros((), device="cuda")\n'
        "for k in reversed(range(4)):\n"
        "    delta = t[k] + 0.99 * values[k + 1] * not_done[k] - values[k]\n"
        "    last = delta + 0.99 * 0.95 * not_done[k] * last\n"
        "    advantages[k] = last\n"
        "advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)",
        "the steps are Python numbers, and the rewards stay on the device",
    ),
    "clipped_policy_loss": Idiom(
        "policy = torch.distributions.Categorical(logits=m(x), validate_args=False)\n"
        "ratio = (policy.log_prob(i[:3] % 2) - t[:3]).exp()\n"
        "loss = -torch.min(ratio * t[:3], ratio.clamp(0.8, 1.2) * t[:3]).mean() - 0.01 * policy.entropy().mean()",
        "the distribution is told to check nothing",
    ),
    "divergence_of_normals": Idiom(
        "p0 = torch.distributions.Normal(t, t.exp(), validate_args=False)\n"
        "q0 = torch.distributions.Normal(0.5 * t, t.exp() + 1.0, validate_args=False)\n"
        "kl = torch.distributions.kl_divergence(p0, q0).sum()",
        "the distributions are told to check nothing",
    ),
    "temporal_difference_target": Idiom(
        "with torch.no_grad():\n"
        "    target = t[:3] + 0.99 * m(x).max(1).values * (~b[:3]).float()\n"
        "value = m(x).gather(1, (i[:3] % 2)[:, None]).squeeze(1)\n"
        "F.smooth_l1_loss(value, target).backward()",
        "finished episodes are masked by multiplying",
    ),
    "replay_on_device": Idiom(
        'buffer = torch.randn(8, 4, device="cuda")\n'
        "idx = torch.randint(0, len(buffer), (3,), device=buffer.device)\n"
        "batch = buffer[idx]",
        "the indices are drawn on the device",
    ),
    "explore_by_python": Idiom(
        "import random\n\n"
        "action = m(x).argmax(1)\n"
        "if random.random() < 0.1:\n"
        '    action = torch.randint(0, 2, (3,), device="cuda")',
        "the coin is a Python number",
    ),
    # Diffusion and adversarial training
    "schedule_on_device": Idiom(
        'alphas = torch.linspace(0.9, 0.1, 10, device="cuda").cumprod(0)\n'
        'steps = torch.randint(0, 10, (3,), device="cuda")\n'
        "a = alphas[steps]\n"
        "while len(a.shape) < len(x.shape):\n"
        "    a = a.unsqueeze(-1)\n"
        "noisy = a.sqrt() * x + (1 - a).sqrt() * torch.randn_like(x)",
        "table and timesteps are on the device",
    ),
    "sampler_by_python_steps": Idiom(
        'betas = torch.linspace(1e-4, 0.02, 3, device="cuda")\n'
        'sample = torch.randn(3, 4, device="cuda")\n'
        "for step in reversed(range(3)):\n"
        "    sample = (sample - betas[step] * m(sample).sum(1, keepdim=True)) / (1 - betas[step]).sqrt()\n"
        "    if step > 0:\n"
        "        sample = sample + betas[step].sqrt() * torch.randn_like(sample)",
        "the steps are Python numbers",
    ),
    "sigmas_on_the_host": Idiom(
        "sigmas = torch.linspace(10.0, 0.1, 3)\n"
        "sample = x\n"
        "for k in range(len(sigmas) - 1):\n"
        "    sample = sample + (sigmas[k + 1] - sigmas[k]) * sample / sigmas[k].item()",
        "a 0-dim CPU tensor is passed as an argument of the kernel",
    ),
    "real_and_fake_labels": Idiom(
        "score = m(x).sum(1)\n"
        "real = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))\n"
        'fake = F.binary_cross_entropy_with_logits(score.detach(), torch.full((3,), 0.0, device="cuda"))\n'
        "(real + fake).backward()",
        "the labels are filled on the device",
    ),
    "moving_average_of_weights": Idiom(
        "shadow = copy.deepcopy(m).requires_grad_(False)\n"
        "for s, q in zip(shadow.parameters(), m.parameters()):\n"
        "    s.mul_(0.999).add_(q.detach(), alpha=0.001)\n"
        "for s, q in zip(shadow.buffers(), m.buffers()):\n"
        "    s.copy_(q)",
        "the decay is a number",
    ),
    "target_network": Idiom(
        "target = copy.deepcopy(m)\n"
        "with torch.no_grad():\n"
        "    torch._foreach_lerp_(list(target.parameters()), list(m.parameters()), 0.005)",
        "the weight of the average is a number",
    ),
    # Data
    "batch_of_pinned": Idiom(
        'batch = {"input": p, "id": 7, "name": "a"}\n'
        'batch = {k: v.to("cuda", non_blocking=True) if torch.is_tensor(v) else v for k, v in batch.items()}',
        "copies from pinned memory are queued",
    ),
    "prefetch_on_a_stream": Idiom(
        "side = torch.cuda.Stream()\n"
        "with torch.cuda.stream(side):\n"
        '    nxt = p.to("cuda", non_blocking=True)\n'
        "torch.cuda.current_stream().wait_stream(side)\n"
        "nxt.record_stream(torch.cuda.current_stream())\n"
        "nxt.mul_(2.0)",
        "the copy is queued on a stream for which the current one waits",
    ),
    "collate_on_device": Idiom(
        "from torch.utils.data import default_collate\n\n"
        'samples = [{"input": x[k], "target": i[k]} for k in range(2)]\n'
        "batch = default_collate(samples)",
        "the samples are stacked on the device",
    ),
    "host_preparation": Idiom(
        "kept = h[h > -10.0]\n"
        "values = kept.numpy().astype(np.float64)\n"
        "if values.size and not np.isnan(values).any():\n"
        "    mean, peak = values.mean(), kept.argmax().item()\n"
        "words, counts = torch.unique(torch.tensor([1, 1, 2]), return_counts=True)",
        "the tensors are on the CPU",
    ),
    "host_sampling": Idiom(
        "from torch.utils.data import RandomSampler, random_split\n\n"
        "order = list(RandomSampler(range(4)))\n"
        "train, valid = random_split(range(4), [3, 1])",
        "permutations and splits are made on the CPU",
    ),
    "crop_by_a_host_offset": Idiom(
        "top = torch.randint(0, 2, (1,)).item()\n"
        "left = int(torch.randint(0, 3, ()))\n"
        "crop = x[top : top + 2, left : left + 2]",
        "the offset is drawn on the CPU",
    ),
    "jitter_by_a_host_factor": Idiom(
        "factor = torch.empty(1).uniform_(0.5, 1.5).item()\n"
        "image = (x * factor).clamp(0, 1)\n"
        "if torch.rand(1) < 0.5:\n"
        "    image = image.flip(-1)",
        "factor and coin are drawn on the CPU",
    ),
    "mixup_on_device": Idiom(
        "lam = torch.distributions.Beta(0.4, 0.4).sample().item()\n"
        "perm = torch.randperm(x.shape[0], device=x.device)\n"
        "mixed = lam * x + (1 - lam) * x[perm]",
        "the permutation is drawn on the device, and the weight on the CPU",
    ),
    "flip_each_sample": Idiom(
        "coin = torch.rand(x.shape[0], 1, device=x.device) < 0.5\nflipped = torch.where(coin, x.flip(1), x)",
        "the coins are drawn and applied on the device",
    ),
    "patch_from_another_image": Idiom(
        "low = np.random.randint(0, 2)\nmixed = x.clone()\nmixed[:, low : low + 2] = x.flip(0)[:, low : low + 2]",
        "the corners are Python numbers",
    ),
    "warp_by_a_device_matrix": Idiom(
        'angle = torch.rand(1, device="cuda")\n'
        "cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)\n"
        "theta = torch.stack([torch.cat([cos, -sin, zero]), torch.cat([sin, cos, zero])])[None]\n"
        "grid = F.affine_grid(theta, (1, 1, 4, 4), align_corners=False)\n"
        'warped = F.grid_sample(torch.rand(1, 1, 4, 4, device="cuda"), grid, align_corners=False)',
        "the matrix is made on the device",
    ),
    "resize_by_a_number": Idiom(
        "image = x[None, None]\n"
        'small = F.interpolate(image, scale_factor=2.0, mode="bilinear", align_corners=False)\n'
        "pooled = F.avg_pool2d(small, 2)",
        "the sizes are numbers",
    ),
    "centre_the_spectrum": Idiom(
        'freq = torch.fft.fftshift(torch.fft.fftfreq(4, device="cuda"))',
        "the frequencies are made and rolled on the device",
    ),
    "channels_last_convolution": Idiom(
        'conv = nn.Conv2d(3, 4, 3, padding=1, device="cuda").to(memory_format=torch.channels_last)\n'
        'image = torch.rand(1, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)\n'
        "out = F.relu(conv(image)).mean((2, 3))",
        "layout and convolution need no value on the host",
    ),
    "save_host_tensors": Idiom(
        "f = io.BytesIO()\n"
        'torch.save({"step": 3, "history": torch.tensor([0.3, 0.2])}, f)\n'
        "f.seek(0)\n"
        'history = torch.load(f)["history"].tolist()',
        "the tensors are on the CPU",
    ),
    # Optimisers and gradients
    "accumulate_gradients": Idiom(
        "o = torch.optim.AdamW(m.parameters(), lr=1e-3)\n"
        "for step in range(4):\n"
        "    loss = m(x).pow(2).mean() / 2\n"
        "    loss.backward()\n"
        "    if (step + 1) % 2 == 0:\n"
        "        nn.utils.clip_grad_norm_(m.parameters(), 1.0)\n"
        "        o.step()\n"
        "        o.zero_grad(set_to_none=True)",
        "the condition is on the step",
    ),
    "groups_by_decay": Idiom(
        "decay = [q for q in m.parameters() if q.dim() > 1]\n"
        "rest = [q for q in m.parameters() if q.dim() <= 1]\n"
        'groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest}]\n'
        "o = torch.optim.RMSprop(groups, lr=0.01, momentum=0.9)\n"
        "o.step()",
        "the groups are chosen by the number of dimensions",
    ),
    "one_cycle": Idiom(
        "o = torch.optim.Adam(m.parameters(), lr=1e-3)\n"
        "s = torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=4)\n"
        "for _ in range(2):\n"
        "    o.step()\n"
        "    s.step()",
        "rates and momenta are Python floats",
    ),
    "muon": Idiom(
        "torch.optim.Muon([m.weight], lr=0.01).step()",
        "the orthogonalisation is products of matrices",
    ),
    "sharpness_aware_step": Idiom(
        "norm = torch.stack([q.grad.norm() for q in m.parameters()]).norm()\n"
        "scale = 0.05 / (norm + 1e-12)\n"
        "with torch.no_grad():\n"
        "    for q in m.parameters():\n"
        "        q.add_(q.grad * scale)",
        "the scale is a tensor on the device",
    ),
    "masked_bad_step": Idiom(
        "norm = nn.utils.get_total_norm([q.grad for q in m.parameters()])\n"
        "ok = torch.isfinite(norm)\n"
        "for q in m.parameters():\n"
        "    q.grad = torch.where(ok, q.grad, 0.0)\n"
        "nn.utils.clip_grads_with_norm_(m.parameters(), 1.0, norm)",
        "a bad gradient is zeroed on the device",
    ),
    "trust_ratio_on_device": Idiom(
        "for q in m.parameters():\n"
        "    w, g = q.detach().norm(), q.grad.norm()\n"
        "    trust = torch.where((w > 0) & (g > 0), w / g, 1.0)\n"
        "    q.data.sub_(0.1 * trust * q.grad)",
        "the condition is applied on the device",
    ),
    "restore_optimizer_state": Idiom(
        "o = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)\n"
        "o.step()\n"
        "saved = copy.deepcopy(o.state_dict())\n"
        "o.load_state_dict(saved)",
        "the state is copied on the device",
    ),
    "scaler_with_a_given_scale": Idiom(
        's = torch.amp.GradScaler("cuda", init_scale=8.0)\ns.scale(m(x).sum()).backward()\ns.update(64.0)',
        "the scale is filled by a number",
    ),
    "optimizer_in_the_hook": Idiom(
        "optimisers = {q: torch.optim.SGD([q], lr=0.1) for q in m.parameters()}\n\n\n"
        "def step(q):\n"
        "    optimisers[q].step()\n"
        "    optimisers[q].zero_grad()\n\n\n"
        "for q in m.parameters():\n"
        "    q.register_post_accumulate_grad_hook(step)\n"
        "m(x).sum().backward()",
        "the optimiser of each parameter steps without reading values",
    ),
    # Autograd and transforms
    "straight_through_function": Idiom(
        "class Sign(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, v):\n"
        "        ctx.save_for_backward(v)\n"
        "        return v.sign()\n\n"
        "    @staticmethod\n"
        "    def backward(ctx, g):\n"
        "        (v,) = ctx.saved_tensors\n"
        "        return g * (v.abs() <= 1)\n\n\n"
        "Sign.apply(t.clone().requires_grad_()).sum().backward()",
        "forward and backward keep tensors on the device",
    ),
    "activations_kept_by_a_hook": Idiom(
        "kept = {}\n"
        "handle = m.register_forward_hook(lambda *args, kept=kept: kept.update(out=args[-1].detach().mean(0)))\n"
        "m(x)\n"
        "handle.remove()",
        "the hook detaches the output",
    ),
    "saved_tensors_in_half": Idiom(
        "with torch.autograd.graph.saved_tensors_hooks(lambda v: v.bfloat16(), lambda v: v.float()):\n"
        "    loss = m(x).pow(2).sum()\n"
        "loss.backward()",
        "packing and unpacking convert on the device",
    ),
    "gradients_by_sample": Idiom(
        "weights = {k: v.detach() for k, v in m.named_parameters()}\n\n\n"
        "def loss(weights, row, label):\n"
        "    return F.cross_entropy(torch.func.functional_call(m, weights, (row[None],)), label[None])\n\n\n"
        "grads = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, x, i[:3] % 2)\n"
        "norms = {k: v.flatten(1).norm(dim=1) for k, v in grads.items()}",
        "the transforms read no value",
    ),
    "forward_derivative": Idiom(
        "out, tangent = torch.func.jvp(lambda v: v.sin().sum(), (t,), (torch.ones_like(t),))",
        "the transforms read no value",
    ),
    "ensemble_of_models": Idiom(
        'models = [nn.Linear(4, 2, device="cuda") for _ in range(2)]\n'
        "weights, buffers = torch.func.stack_module_state(models)\n"
        'base = copy.deepcopy(models[0]).to("meta")\n'
        "outs = torch.vmap(lambda w, v: torch.func.functional_call(base, (w, v), (x,)))(weights, buffers)",
        "the parameters are stacked on the device",
    ),
    "mixed_precision_loss": Idiom(
        'with torch.autocast("cuda", dtype=torch.bfloat16):\n'
        "    loss = F.cross_entropy(m(x), i[:3] % 2)\n"
        "loss.backward()",
        "autocast converts on the device",
    ),
    "inference_pass": Idiom(
        "m.eval()\n"
        "with torch.inference_mode():\n"
        "    probs = m(x).softmax(-1)\n"
        "    confidence, label = probs.max(-1)\n"
        "m.train()",
        "the modes are states of the host",
    ),
    "quantise_by_rows": Idiom(
        "scale = x.abs().amax(dim=1, keepdim=True) / 127\n"
        "q = (x / scale).round().clamp_(-128, 127).to(torch.int8)\n"
        "back = q.float() * scale",
        "the scales stay on the device",
    ),
    "fake_quantise_by_numbers": Idiom(
        "w = m.weight.detach().clone().requires_grad_()\n"
        "torch.fake_quantize_per_tensor_affine(w, 0.1, 0, -128, 127).sum().backward()",
        "scale and zero point are numbers",
    ),
}
