"""Idioms of PyTorch that make the CPU wait for the GPU, and similar ones that do not, to score a detector by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Idiom:
    """Statements to run by ``exec``, and one clause on why they wait or do not."""

    source: str
    reason: str


SYNCHRONISING: dict[str, Idiom] = {
    # Python's own protocols
    "range_of_a_tensor": Idiom("list(range(i[2]))", "__index__ reads the value back"),
    "list_indexed_by_a_tensor": Idiom('["a", "b", "c"][i[1]]', "__index__ reads the value back"),
    "math_function": Idiom(
        "import math\n\nmath.isfinite(t.sum())", "math calls __float__, which reads the value back"
    ),
    "percent_format": Idiom('"%.3f" % t.sum()', "the % operator calls __float__"),
    "repr_of_a_container": Idiom('str({"loss": t.mean()})', "repr of an element copies its values to the host"),
    "assert_all_finite": Idiom("assert torch.isfinite(t).all()", "assert takes the truth of a tensor"),
    "and_of_two_tensors": Idiom("b.any() and t.sum()", "the left side of and is tested for truth"),
    "while_loop": Idiom(
        "while (t < 100.0).all():\n    t.add_(1000.0)", "the condition is tested for truth on the host"
    ),
    "builtin_min_with_a_float": Idiom("min(1.0, t.sum())", "min tests the truth of a comparison"),
    "builtin_sorted": Idiom("sorted(t)", "each comparison of two elements is tested for truth"),
    "builtin_all": Idiom("all(b)", "each element is tested for truth"),
    "membership_in_a_list": Idiom(
        "t.sum() in [1.0, 2.0]", "the list compares by == and tests the result for truth"
    ),
    "list_comprehension_filter": Idiom("[v for v in t if v > 0]", "each condition is tested for truth"),
    "complex_of_a_tensor": Idiom("complex(t[0])", "__complex__ reads the value back"),
    # Tensors where a number is expected
    "arange_to_a_tensor": Idiom('torch.arange(i.max(), device="cuda")', "the end is a Scalar, so it is read back"),
    "full_of_a_tensor": Idiom(
        "torch.full((2,), t.mean(), device=t.device)", "the value is a Scalar, so it is read back"
    ),
    "alpha_is_a_tensor": Idiom("torch.add(t, t, alpha=t.mean())", "alpha is a Scalar, so it is read back"),
    "topk_of_a_tensor": Idiom("torch.topk(t, i[2])", "k is an int, so it is read back"),
    "pad_by_a_tensor": Idiom("F.pad(t, (0, i[1]))", "the widths are ints, so they are read back"),
    "narrow_from_a_tensor": Idiom("x.narrow(0, i[1], 1)", "the start is read back by item"),
    "linspace_to_a_tensor": Idiom(
        'torch.linspace(0.0, t.max(), 5, device="cuda")', "the end is read back by item"
    ),
    "masked_fill_by_a_tensor": Idiom("t.masked_fill(b, t.mean())", "the CUDA kernel takes value.item()"),
    "index_fill_by_a_tensor": Idiom("t.index_fill(0, i, t.mean())", "the Tensor overload calls source.item()"),
    "cpu_fill_by_a_tensor": Idiom("h.fill_(t.mean())", "the value of another device is read by item"),
    # Indexing
    "slice_from_a_tensor": Idiom("x[i[1] :]", "the bounds of a slice are read by __index__"),
    "mask_on_the_second_axis": Idiom("x[:, b]", "a bool index is expanded by nonzero"),
    "mask_with_an_ellipsis": Idiom("x[..., b]", "a bool index is expanded by nonzero"),
    "add_to_masked": Idiom("t[b] += 1.0", "the masked read expands the mask by nonzero"),
    "index_by_a_list": Idiom("t[[0, 2]]", "the list becomes a tensor that is copied to the device"),
    "index_by_an_array": Idiom("t[np.array([0, 2])]", "the array becomes a tensor that is copied to the device"),
    "cpu_tensor_by_a_gpu_scalar": Idiom("h[i[1]]", "a 0-dim integer index is read by item"),
    "set_one_element": Idiom(
        "t[0] = 5.0", "the number becomes a CPU tensor that is copied blockingly (up to torch 2.13)"
    ),
    "set_by_integer_indices": Idiom(
        "t[i] = 0.0", "index_put_ copies the number, a CPU tensor, to the device (up to torch 2.13)"
    ),
    "set_a_slice_from_the_host": Idiom("t[1:] = h[1:]", "copy_ from pageable memory blocks"),
    # Shapes that depend on the data
    "argwhere": Idiom("torch.argwhere(b)", "nonzero reads its count back"),
    "nonzero_as_tuple": Idiom("rows, cols = torch.nonzero(x > 0, as_tuple=True)", "nonzero reads its count back"),
    "unique_consecutive": Idiom("torch.unique_consecutive(i)", "the number of unique values is read back"),
    "one_hot_without_classes": Idiom("F.one_hot(i)", "the number of classes is read from max().item()"),
    "combinations": Idiom("torch.combinations(t)", "it selects by a mask, and so by nonzero"),
    "to_sparse": Idiom("x.to_sparse()", "it finds the indices by nonzero"),
    "sparse_size_inferred": Idiom(
        "torch.sparse_coo_tensor(i.unsqueeze(0), t)", "the size is computed from the largest index, read back"
    ),
    "sparse_coalesce": Idiom(
        "s = torch.sparse_coo_tensor(i.unsqueeze(0), t, (3,))\ns.coalesce()",
        "the number of distinct indices is read back",
    ),
    "isin_by_sorting": Idiom(
        "torch.isin(t, torch.rand(1000, device=t.device))", "many test elements take the path through unique"
    ),
    # Checks and statistics within operators
    "normal_with_tensor_std": Idiom("torch.normal(t, t.abs())", "std is checked by std.min().ge(0).item()"),
    "nanmedian": Idiom("t.nanmedian()", "the count of nan values is read by item"),
    "histc_without_a_range": Idiom(
        "torch.histc(t, bins=4)", "the range is the minimum and maximum, copied to the host"
    ),
    "cov": Idiom("torch.cov(x)", "the degrees of freedom are a device tensor that is compared on the host"),
    "searchsorted_with_a_sorter": Idiom(
        "torch.searchsorted(t, t, sorter=torch.argsort(t))", "the range of the sorter is checked by item"
    ),
    "segment_reduce": Idiom('torch.segment_reduce(t, "sum", lengths=i)', "the lengths are checked by item"),
    "istft": Idiom(
        'w = torch.hann_window(8, device="cuda")\n'
        'f = torch.stft(torch.randn(32, device="cuda"), 8, window=w, return_complex=True)\n'
        "torch.istft(f, 8, window=w)",
        "the overlap of the windows is checked on the host",
    ),
    "is_nonzero": Idiom("torch.is_nonzero(t[0])", "it reads the value back"),
    "assert_close": Idiom("torch.testing.assert_close(t, t.clone())", "the comparison is tested for truth"),
    # Linear algebra
    "cholesky": Idiom('torch.linalg.cholesky(x @ x.T + torch.eye(3, device="cuda"))', "the info code is checked"),
    "solve": Idiom('torch.linalg.solve(x @ x.T + torch.eye(3, device="cuda"), x)', "the info code is checked"),
    "eigh": Idiom("torch.linalg.eigh(x @ x.T)", "the info code is checked"),
    "svdvals": Idiom("torch.linalg.svdvals(x)", "the info code is checked"),
    # Construction and copies from the host
    "tensor_of_a_number": Idiom("torch.tensor(3.14, device=t.device)", "the value is made on the host and copied"),
    "as_tensor_of_a_list": Idiom(
        'torch.as_tensor([1.0, 2.0], device="cuda")', "the values are made on the host and copied"
    ),
    "as_tensor_of_an_array": Idiom('torch.as_tensor(np.ones(3), device="cuda")', "the array is pageable memory"),
    "asarray_to_device": Idiom("torch.asarray(h, device=t.device)", "copied from pageable memory"),
    "new_tensor": Idiom("t.new_tensor([1.0, 2.0])", "the values are made on the host and copied"),
    "tensor_of_device_scalars": Idiom("torch.tensor([t[0], t[1]])", "each element is read back by item"),
    "device_context": Idiom(
        'with torch.device("cuda"):\n    torch.tensor([1.0, 2.0])', "the values are made on the host and copied"
    ),
    "to_like_another": Idiom("h.to(t)", "copied from pageable memory"),
    "type_as": Idiom("h.type_as(t)", "copied from pageable memory"),
    "type_by_name": Idiom("h.type(t.type())", "copied from pageable memory"),
    "pinned_but_blocking": Idiom("t.copy_(p)", "a blocking copy waits even from pinned memory"),
    "non_blocking_from_pageable": Idiom(
        'torch.empty(20_000, device="cuda").copy_(torch.ones(20_000), non_blocking=True)',
        "the copy from pageable memory is staged",
    ),
    "pinned_but_strided": Idiom(
        'torch.ones(40_000).pin_memory()[::2].to("cuda", non_blocking=True)',
        "the source is first made contiguous in pageable memory",
    ),
    "where_with_a_host_scalar": Idiom(
        "torch.where(b, t, h[0])", "where copies the 0-dim CPU tensor to the device"
    ),
    "load_to_device": Idiom(
        'f = io.BytesIO()\ntorch.save(h, f)\nf.seek(0)\ntorch.load(f, map_location="cuda")',
        "the storage is read on the host and copied",
    ),
    "load_state_from_host": Idiom(
        "m.load_state_dict({k: torch.zeros(v.shape) for k, v in m.state_dict().items()})",
        "each parameter is copied from pageable memory",
    ),
    "build_batch_norm": Idiom(
        'nn.BatchNorm1d(4, device="cuda")', "num_batches_tracked is made by torch.tensor(0, device=...)"
    ),
    "sparse_init": Idiom("nn.init.sparse_(m.weight, 0.5)", "the rows come from a CPU permutation"),
    # Copies to the host
    "to_by_device_of_another": Idiom("t.to(h.device)", "a copy to the host waits"),
    "to_host_and_half": Idiom('t.to(device="cpu", dtype=torch.float16)', "a copy to the host waits"),
    "copy_to_pinned_blocking": Idiom("p.copy_(t)", "a blocking copy waits even to pinned memory"),
    "copy_to_pageable_non_blocking": Idiom(
        "h.copy_(t, non_blocking=True)", "a copy to pageable memory ends before it returns"
    ),
    "storage_to_host": Idiom("t.untyped_storage().cpu()", "a copy to the host waits"),
    "save": Idiom("torch.save(m.state_dict(), io.BytesIO())", "the storages are copied to the host"),
    "pickle_a_tensor": Idiom("pickle.dumps(t)", "the storage is copied to the host"),
    "module_to_host": Idiom('m.to("cpu")', "each parameter is copied to the host"),
    # torch.nn
    "batch_norm_cumulative_average": Idiom(
        'n = nn.BatchNorm1d(4, momentum=None, device="meta").to_empty(device="cuda")\nn.reset_parameters()\nn(x)',
        "the factor is 1 / float(num_batches_tracked)",
    ),
    "gaussian_nll_loss": Idiom("F.gaussian_nll_loss(t, t, t.exp())", "the variances are checked by any"),
    "adaptive_softmax": Idiom(
        'nn.AdaptiveLogSoftmaxWithLoss(4, 6, cutoffs=[2], device="cuda")(x, i[:3])',
        "targets are sorted by nonzero",
    ),
    "ctc_loss": Idiom(
        'p = torch.randn(5, 1, 4, device="cuda").log_softmax(-1)\n'
        'F.ctc_loss(p, torch.ones(1, 2, dtype=torch.long, device="cuda"), (5,), (2,))',
        "the lengths are copied to the device",
    ),
    "encoder_with_a_mask": Idiom(
        'a = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, device="cuda")\n'
        'k = nn.Transformer.generate_square_subsequent_mask(3, device="cuda")\n'
        "nn.TransformerEncoder(a, 1)(x, mask=k)",
        "without is_causal the mask is compared with a causal one, and the result tested for truth",
    ),
    "pack_unsorted": Idiom(
        "nn.utils.rnn.pack_padded_sequence(x.unsqueeze(-1), [2, 4, 1], batch_first=True, enforce_sorted=False)",
        "the permutation is made on the host and copied",
    ),
    "unpad_sequence": Idiom(
        "nn.utils.rnn.unpad_sequence(x, i[:3] + 1, batch_first=True)", "each sequence is selected by a mask"
    ),
    "forward_hook": Idiom(
        "seen = []\nm.register_forward_hook(lambda *args, seen=seen: seen.append(args[-1].tolist()))\nm(t)",
        "the hook copies the output to the host",
    ),
    "prune": Idiom(
        'import torch.nn.utils.prune\n\ntorch.nn.utils.prune.l1_unstructured(m, "weight", amount=0.5)',
        "the mask is set to a number by integer indices, which copies the number (up to torch 2.13)",
    ),
    # Backward
    "prod_backward": Idiom(
        "w = t.clone().requires_grad_()\nw.prod().backward()", "the zeros are found by nonzero"
    ),
    "masked_scatter_backward": Idiom(
        "w = t.clone().requires_grad_()\ntorch.zeros_like(t).masked_scatter(b, w).sum().backward()",
        "the gradient of the source is selected by the mask",
    ),
    "sparse_embedding_backward": Idiom(
        'w = torch.randn(3, 2, device="cuda", requires_grad=True)\n'
        "F.embedding(i, w, padding_idx=0, sparse=True).sum().backward()",
        "the padding is removed by a mask",
    ),
    "gradient_hook": Idiom(
        "norms = []\nw = t.clone().requires_grad_()\n"
        "w.register_hook(lambda g, norms=norms: norms.append(float(g.norm())))\n(w * w).sum().backward()",
        "the hook reads the norm back",
    ),
    "custom_backward": Idiom(
        "class Scaled(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, v):\n        ctx.save_for_backward(v)\n        return v * 2\n\n"
        "    @staticmethod\n    def backward(ctx, g):\n        (v,) = ctx.saved_tensors\n"
        "        return g * v.abs().max().item()\n\n\n"
        "Scaled.apply(t.clone().requires_grad_()).sum().backward()",
        "the backward of the function reads a value back",
    ),
    "anomaly_detection": Idiom(
        "with torch.autograd.detect_anomaly():\n    m(t).sum().backward()",
        "each gradient is checked for nan on the host",
    ),
    "gradcheck": Idiom(
        "torch.autograd.gradcheck(torch.sin, (t.double().requires_grad_(),))", "gradients are compared on the host"
    ),
    # Optimisers, schedulers and mixed precision
    "lbfgs": Idiom(
        "o = torch.optim.LBFGS(m.parameters(), max_iter=1)\n\n\n"
        "def closure():\n    o.zero_grad()\n    loss = m(t).pow(2).sum()\n    loss.backward()\n"
        "    return loss\n\n\n"
        "o.step(closure)",
        "the loss is converted by float, and the gradient compared with a tolerance",
    ),
    "sgd_with_a_tensor_rate": Idiom(
        'torch.optim.SGD(m.parameters(), lr=torch.full((), 0.1, device="cuda")).step()', "alpha=-lr is read back"
    ),
    "asgd": Idiom("torch.optim.ASGD(m.parameters()).step()", "its state is made by as_tensor with a device"),
    "sparse_adam": Idiom(
        'e = nn.Embedding(3, 2, sparse=True, device="cuda")\no = torch.optim.SparseAdam(e.parameters())\n'
        "e(i).sum().backward()\no.step()",
        "the gradient is coalesced",
    ),
    "reduce_on_plateau": Idiom(
        "o = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "torch.optim.lr_scheduler.ReduceLROnPlateau(o).step(m(t).pow(2).sum())",
        "the metric is converted by float",
    ),
    "averaged_model": Idiom(
        "a = torch.optim.swa_utils.AveragedModel(m)\na.update_parameters(m)\na.update_parameters(m)",
        "the count, a CPU tensor, is copied to the device from the second update on",
    ),
    "scaler_step": Idiom(
        's = torch.amp.GradScaler("cuda")\no = torch.optim.SGD(m.parameters(), lr=0.1)\n'
        "s.scale(m(t).sum()).backward()\ns.step(o)",
        "whether an inf was found is read by item",
    ),
    "scaler_get_scale": Idiom(
        's = torch.amp.GradScaler("cuda")\ns.scale(t.sum())\ns.get_scale()', "the scale is read by item"
    ),
    # Distributions and sampling
    "distribution_checks": Idiom("torch.distributions.Normal(t, t.exp())", "the arguments are checked by all"),
    "normal_sample": Idiom(
        "torch.distributions.Normal(t, t.exp(), validate_args=False).sample()", "torch.normal checks its std"
    ),
    "multivariate_normal": Idiom(
        'c = x @ x.T + torch.eye(3, device="cuda")\n'
        "torch.distributions.MultivariateNormal(t[:3], covariance_matrix=c, validate_args=False)",
        "the covariance is factorised by cholesky, which checks its info code",
    ),
    "weighted_sampler": Idiom(
        "list(torch.utils.data.WeightedRandomSampler(t.softmax(0), 3))", "the drawn indices become a list"
    ),
    # Explicit waits
    "accelerator_synchronize": Idiom("torch.accelerator.synchronize()", "it waits for the device"),
    "time_by_events": Idiom(
        "a = torch.cuda.Event(enable_timing=True)\nz = torch.cuda.Event(enable_timing=True)\n"
        "a.record()\nt.mul_(2.0)\nz.record()\nz.synchronize()\na.elapsed_time(z)",
        "the second event is waited for",
    ),
    "emit_nvtx": Idiom(
        "with torch.autograd.profiler.emit_nvtx():\n    t.mul(2.0)", "it calls torch.cuda.synchronize on entry"
    ),
}


CLEAN: dict[str, Idiom] = {
    # Python's own protocols
    "unpack": Idiom("first, second, third, fourth = t", "iteration unbinds into views"),
    "builtin_sum": Idiom("sum(t)", "iteration unbinds, and each addition runs on the device"),
    "comprehension": Idiom("[v + 1 for v in t]", "iteration unbinds into views"),
    "length_and_shape": Idiom("len(t) + x.size(1) + x.numel()", "sizes are held on the host"),
    "format_the_metadata": Idiom('f"{t.shape} {t.dtype} {t.device} {t.is_cuda}"', "only metadata are formatted"),
    "repr_of_a_module": Idiom("repr(m)", "the repr of a module shows no values"),
    "branch_on_metadata": Idiom(
        "if t.is_cuda and t.dim() == 1:\n    t.mul_(2.0)", "the condition is a Python bool"
    ),
    "branch_on_none": Idiom(
        "if t.grad is None and m.weight.grad is not None:\n    t + 1", "identity reads no value"
    ),
    "tensor_as_a_key": Idiom('{t: "t"}[t]', "tensors hash by identity"),
    "keep_the_comparison": Idiom("torch.isfinite(t).all() & (t == t).all()", "no result is tested for truth"),
    "equal_of_other_shapes": Idiom("torch.equal(t, x)", "different sizes are unequal before any kernel runs"),
    # Scalars that stay where they are
    "host_scalar_operand": Idiom(
        "t * h.mean() + h[0]", "a 0-dim CPU tensor is passed as an argument of the kernel"
    ),
    "fill_by_a_tensor": Idiom("t.fill_(x.mean())", "a value of the same device is copied on the device"),
    "clamp_by_tensors": Idiom("t.clamp(min=t.mean(), max=t.max())", "the bounds are tensors of the kernel"),
    "lerp_by_a_tensor": Idiom("t.lerp(t.neg(), t[0])", "the weight is a tensor of the kernel"),
    "power_of_a_tensor": Idiom("t.abs() ** t[0]", "the exponent is a tensor of the kernel"),
    "maximum_for_max": Idiom("torch.maximum(t.sum(), t.new_zeros(()))", "the comparison stays on the device"),
    "where_with_a_number": Idiom("torch.where(b, t, 0.0)", "the number is filled in on the device"),
    # Indexing
    "set_a_slice_to_a_number": Idiom("x[1:, ::2] = 0.5", "a slice is filled by a kernel with the number"),
    "set_a_slice_to_a_host_scalar": Idiom("t[1:] = h[0]", "a 0-dim CPU tensor fills the slice as a number"),
    "set_masked_to_a_host_scalar": Idiom("t[b] = h[0]", "it becomes masked_fill_ with a number"),
    "integer_index": Idiom("x[:, i]", "an integer index on the device has a known shape"),
    "two_integer_indices": Idiom("x[i, i]", "integer indices on the device have a known shape"),
    "set_by_indices_from_a_tensor": Idiom("t[i] = t.neg()", "indices and values are on the device"),
    "index_put_accumulate": Idiom(
        "t.index_put_((i,), t.clone(), accumulate=True)", "it sorts and adds on the device"
    ),
    "gather_and_take": Idiom(
        "t.gather(0, i) + t.take(i) + t.index_select(0, i)", "the shape is that of the index"
    ),
    "scatter_add": Idiom("torch.zeros(3, device=t.device).scatter_add_(0, i, t)", "the shape is given"),
    "ellipsis_and_none": Idiom("x[..., None, 1:-1]", "views of known sizes"),
    "split_by_host_indices": Idiom(
        "torch.tensor_split(x, torch.tensor([1, 2]), dim=1)", "the indices are on the CPU"
    ),
    # Shapes known beforehand
    "one_hot_with_classes": Idiom("F.one_hot(i, num_classes=3)", "the CUDA path leaves the check to the kernel"),
    "repeat_interleave_a_number": Idiom("t.repeat_interleave(2)", "a number of repeats is an expand and a copy"),
    "isin_by_comparing": Idiom("torch.isin(t, t[:2])", "few test elements are compared directly"),
    "bucketize": Idiom("torch.bucketize(t, t.sort().values)", "the search runs on the device"),
    "searchsorted": Idiom("torch.searchsorted(t.sort().values, t)", "without a sorter nothing is checked"),
    "median": Idiom("t.median()", "the middle element is chosen on the device"),
    "quantile": Idiom("x.quantile(0.5, dim=1)", "the range of q is checked only on the CPU"),
    "topk": Idiom("t.topk(2)", "k is a number"),
    "sparse_with_a_size": Idiom(
        "torch.sparse_coo_tensor(i.unsqueeze(0), t, (3,))", "the size is given and the indices are not checked"
    ),
    # Random numbers
    "normal_with_a_number": Idiom("torch.normal(t, 1.0)", "std is checked on the host"),
    "normal_in_place": Idiom("torch.empty_like(t).normal_(0.0, 2.0)", "it is a kernel with numbers"),
    "bernoulli": Idiom("torch.bernoulli(t.sigmoid())", "the kernel checks the probabilities itself"),
    "multinomial_with_replacement": Idiom(
        "torch.multinomial(t.softmax(0), 2, replacement=True)",
        "several draws are made by a kernel that checks itself",
    ),
    "multinomial": Idiom(
        "torch.multinomial(t.softmax(0), 2)", "since torch 2.6, a kernel checks the probabilities"
    ),
    "categorical_sample": Idiom(
        "torch.distributions.Categorical(logits=t, validate_args=False).sample()",
        "since torch 2.6, a kernel checks the probabilities",
    ),
    "gumbel_softmax": Idiom("F.gumbel_softmax(t, hard=True)", "argmax and scatter run on the device"),
    "reparameterised_sample": Idiom(
        "torch.distributions.Normal(t, t.exp(), validate_args=False).rsample()", "it draws standard normal numbers"
    ),
    "log_prob_unchecked": Idiom(
        "torch.distributions.Bernoulli(logits=t, validate_args=False).log_prob(b.float())", "nothing is checked"
    ),
    # Construction and copies
    "fill_on_device": Idiom('torch.full((3,), 2.5, device="cuda")', "the number is an argument of the kernel"),
    "new_full": Idiom("t.new_full((2,), 1.0)", "the number is an argument of the kernel"),
    "like_a_host_tensor": Idiom('torch.zeros_like(h, device="cuda")', "only the shape is taken from the host"),
    "as_tensor_already_there": Idiom('torch.as_tensor(t, device="cuda")', "the tensor is returned as it is"),
    "stack_of_scalars": Idiom("torch.stack([t[0], t[3]])", "views are joined on the device"),
    "device_context_zeros": Idiom('with torch.device("cuda"):\n    torch.zeros(3)', "filled on the device"),
    "pinned_copy": Idiom("t.copy_(p, non_blocking=True)", "a copy from pinned memory is queued"),
    "small_non_blocking_from_pageable": Idiom(
        "t.copy_(h, non_blocking=True)", "64 KiB of pageable memory are taken into the command"
    ),
    "pinned_with_dtype": Idiom(
        'p.to("cuda", torch.float16, non_blocking=True)', "a non-blocking copy converts on the device"
    ),
    "back_to_pinned": Idiom("p.copy_(t, non_blocking=True)", "a copy to pinned memory is queued"),
    "back_non_blocking": Idiom('t.to("cpu", non_blocking=True)', "the destination is allocated in pinned memory"),
    "deepcopy": Idiom("copy.deepcopy(m)", "storages are cloned on the device"),
    "shallow_copy": Idiom("copy.copy(t)", "the copy shares the storage"),
    "load_state_on_device": Idiom("m.load_state_dict(m.state_dict())", "copies within the device are queued"),
    "build_linear": Idiom('nn.Linear(4, 2, device="cuda")', "the parameters are drawn on the device"),
    "module_to_half": Idiom('m.to("cuda", torch.float16)', "the conversion runs on the device"),
    # torch.nn
    "batch_norm_default": Idiom(
        'n = nn.BatchNorm1d(4, device="meta").to_empty(device="cuda")\nn.reset_parameters()\nn(x)',
        "the momentum is a number",
    ),
    "encoder_told_causal": Idiom(
        'a = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, device="cuda")\n'
        'k = nn.Transformer.generate_square_subsequent_mask(3, device="cuda")\n'
        "nn.TransformerEncoder(a, 1)(x, mask=k, is_causal=True)",
        "the hint saves the comparison of the mask",
    ),
    "pack_sorted": Idiom(
        "nn.utils.rnn.pack_padded_sequence(x.unsqueeze(-1), [4, 2, 1], batch_first=True)",
        "the lengths stay on the host",
    ),
    "pad_sequence": Idiom("nn.utils.rnn.pad_sequence([t, t[:2]])", "the sizes are known on the host"),
    "gradient_norm_kept": Idiom(
        "nn.utils.get_total_norm([v.grad for v in m.parameters()])", "the norm stays a tensor on the device"
    ),
    "clip_by_value": Idiom("nn.utils.clip_grad_value_(m.parameters(), 0.1)", "the bounds are numbers"),
    "parameters_to_vector": Idiom(
        "nn.utils.parameters_to_vector(m.parameters())", "views are joined on the device"
    ),
    "xavier_init": Idiom("nn.init.xavier_normal_(m.weight)", "its arguments are numbers"),
    # Backward
    "embedding_backward": Idiom(
        'w = torch.randn(3, 2, device="cuda", requires_grad=True)\n'
        "F.embedding(i, w, padding_idx=0).sum().backward()",
        "the kernel skips the padding",
    ),
    "index_backward": Idiom(
        "w = t.clone().requires_grad_()\nw[i].pow(2).sum().backward()", "the gradient is added by index_put_"
    ),
    "checkpoint": Idiom(
        "import torch.utils.checkpoint\n\n"
        "torch.utils.checkpoint.checkpoint(m, t, use_reentrant=False).sum().backward()",
        "the states of the generators are kept on the host",
    ),
    "gradient_hook_on_device": Idiom(
        "norms = []\nw = t.clone().requires_grad_()\n"
        "w.register_hook(lambda g, norms=norms: norms.append(g.norm()))\n(w * w).sum().backward()",
        "the hook keeps the norm on the device",
    ),
    "vmap": Idiom("torch.vmap(lambda row: row.softmax(0))(x)", "batching changes no values"),
    # Optimisers, schedulers and mixed precision
    "adam": Idiom("torch.optim.Adam(m.parameters()).step()", "its step counts are CPU tensors"),
    "adam_fused": Idiom(
        "torch.optim.Adam(m.parameters(), fused=True).step()", "its step counts are read by the kernel"
    ),
    "sgd_with_momentum": Idiom(
        "o = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)\no.step()\no.zero_grad(set_to_none=False)",
        "the rate is a number",
    ),
    "step_scheduler": Idiom(
        "o = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "s = torch.optim.lr_scheduler.StepLR(o, 1)\no.step()\ns.step()",
        "the rate is computed in Python",
    ),
    "scaler_with_a_fused_step": Idiom(
        's = torch.amp.GradScaler("cuda")\no = torch.optim.SGD(m.parameters(), lr=0.1, fused=True)\n'
        "s.scale(m(t).sum()).backward()\ns.step(o)\ns.update()",
        "the fused kernel reads whether an inf was found",
    ),
    "scaler_unscale": Idiom(
        's = torch.amp.GradScaler("cuda")\no = torch.optim.SGD(m.parameters(), lr=0.1)\n'
        "s.scale(m(t).sum()).backward()\ns.unscale_(o)",
        "whether an inf was found stays on the device",
    ),
    # Linear algebra
    "cholesky_ex": Idiom(
        'torch.linalg.cholesky_ex(x @ x.T + torch.eye(3, device="cuda"))', "the info code stays on the device"
    ),
    "norms_and_products": Idiom(
        "torch.linalg.vector_norm(x, dim=1) * torch.dot(t, t)", "results stay on the device"
    ),
    # Data
    "loader_over_a_device_dataset": Idiom(
        "from torch.utils.data import DataLoader, TensorDataset\n\n"
        "for (batch,) in DataLoader(TensorDataset(t), batch_size=2):\n    batch * 2",
        "elements are views by Python numbers, stacked on the device",
    ),
    # Streams and events
    "stream_waits_for_a_stream": Idiom(
        "s = torch.cuda.Stream()\ns.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(s):\n    t.mul(2.0)",
        "the device waits, not the CPU",
    ),
    "event_query": Idiom("e = torch.cuda.Event()\ne.record()\ne.query()", "a query returns at once"),
    "event_wait": Idiom("e = torch.cuda.Event()\ne.record()\ne.wait()", "the current stream waits, not the CPU"),
    "nvtx_range": Idiom('with torch.cuda.nvtx.range("step"):\n    t.mul(2.0)', "a range is a mark on the host"),
    "memory_counters": Idiom("torch.cuda.memory_allocated()", "the allocator counts on the host"),
    "seed": Idiom("torch.manual_seed(0)", "the state of the generator is on the host"),
}
