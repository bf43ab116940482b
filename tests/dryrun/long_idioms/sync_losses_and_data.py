"""Idioms that synchronize: losses, detection, reinforcement learning, diffusion, data, optimizers."""

from tests.dryrun.unseen_idioms import Idiom

IDIOMS: dict[str, Idiom] = {
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
        'a = alphas[torch.randint(0, 3, (20_000, 1))].to("cuda", non_blocking=True)\n'
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
        'batch = {"input": torch.zeros(300, 400), "target": torch.zeros(3)}\n'
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
