"""Lookalikes that do not synchronize: losses, detection, reinforcement learning, data, autograd."""

from tests.dryrun.unseen_idioms import Idiom

IDIOMS: dict[str, Idiom] = {
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
