"""Expressions under autocast, for each operator that has a policy on CUDA, and some that have none."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# x, y: 4 x 4 in 32 bits; h: 4 x 4 in the lower precision; d: in 64 bits; i: indices; im: an image; w: a filter
CASES = (
    "x @ y", "torch.mm(x, y)", "torch.mv(x, x[0])", "torch.bmm(x[None], y[None])", "torch.addmm(x, x, y)",
    "torch.addmv(x[0], x, y[0])", "torch.addr(x, x[0], y[0])", "torch.baddbmm(x[None], x[None], y[None])",
    "torch.addbmm(x, x[None], y[None])", "torch.einsum('ij,jk->ik', x, y)", "F.linear(x, y, x[0])",
    "torch.linalg.vecdot(x, y)", "torch.linalg.multi_dot([x, y, x])", "torch.chain_matmul(x, y)",
    "F.prelu(x, x[0])", "F.conv1d(im[0], w[0])", "F.conv2d(im, w)", "F.conv3d(im[None], w[None])",
    "F.conv_transpose1d(im[0], w[0])",
    "F.conv_transpose2d(im, w)", "F.conv_transpose3d(im[None], w[None])",
    "F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])",
    "torch.lstm_cell(x, (x, x), s, s, b, b)[0]", "torch.gru_cell(x, x, t, t, c, c)",
    "torch.rnn_tanh_cell(x, x, x, x, b[:4], b[:4])", "torch.rnn_relu_cell(x, x, x, x, b[:4], b[:4])",
    *(f"torch.{name}(h)" for name in (
        "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
        "sinh", "tan", "sin", "cos", "sqrt", "tanh", "sigmoid", "relu", "abs", "neg", "mean", "amax", "isnan",
    )),
    "h ** 2", "h ** h", "2 ** h", "F.softplus(h)", "F.layer_norm(h, (4,))", "F.rms_norm(h, (4,))",
    "F.group_norm(h, 2)", "torch.norm(h)", "torch.norm(h, 2, 1)", "torch.norm(x, 2, 1)",
    "torch.linalg.vector_norm(h)", "torch.linalg.matrix_norm(h)", "F.cosine_similarity(h, h)",
    "F.poisson_nll_loss(h, h)", "F.cosine_embedding_loss(h, h, i)", "F.nll_loss(h, i)", "F.cross_entropy(h, i)",
    "F.hinge_embedding_loss(h, h)", "F.kl_div(h, h)", "F.l1_loss(h, h)", "F.smooth_l1_loss(h, h)",
    "F.huber_loss(h, h)", "F.mse_loss(h, h)", "F.mse_loss(h, x)", "F.margin_ranking_loss(h, h, h)",
    "F.multilabel_margin_loss(h, i[None].repeat(4, 1))", "F.soft_margin_loss(h, h)",
    "F.triplet_margin_loss(h, h, h)", "F.multi_margin_loss(h, i)", "F.binary_cross_entropy_with_logits(h, h)",
    "torch.dist(h, h)", "torch.cdist(h, h)", "F.pdist(h)", "torch.renorm(h, 2, 0, 1.0)", "torch.logsumexp(h, 0)",
    "F.interpolate(im.to(low), scale_factor=2)", "F.interpolate(im.to(low), scale_factor=2, mode='bilinear')",
    "F.interpolate(im.to(low), scale_factor=2, mode='bicubic')", "torch.prod(h)", "torch.prod(h, 1)",
    "torch.softmax(h, 1)", "F.softmax(h, 1, dtype=torch.float64)", "torch.log_softmax(h, 1)",
    "torch.cumprod(h, 0)", "torch.cumsum(h, 0)", "torch.sum(h)", "torch.sum(h, 1)", "h.sum(0, dtype=low)",
    "torch.sum(i)", "torch.addcdiv(h, x, h)", "torch.addcmul(h, h, h)", "torch.atan2(h, x)", "torch.atan2(h, h)",
    "F.bilinear(h, x, x[None])", "torch.linalg.cross(h[:, :3], x[:, :3])", "torch.cross(h[:, :3], x[:, :3], 1)",
    "torch.dot(h[0], x[0])", "torch.vdot(h[0], h[0])", "F.grid_sample(im.to(low), g)",
    "h.index_put((i,), x)", "torch.tensordot(h, x, 1)", "torch.scatter_add(h, 0, i[None], x)",
    "torch.scatter_add(h, 0, i[None], h)", "F.binary_cross_entropy(torch.sigmoid(h), h)",
    "h + x", "h + h", "h * 2.5", "x + y", "torch.cat([h, x])", "torch.stack([h, x])", "F.gelu(h)", "F.silu(x)",
    "d @ d", "d + h", "F.layer_norm(d, (4,))", "F.dropout(h)", "F.embedding(i, x)", "F.embedding(i, h)",
    "F.batch_norm(im, None, None, training=True)", "F.max_pool2d(im.to(low), 2)", "F.avg_pool2d(im.to(low), 2)",
    "torch.where(h > 0, h, x)", "x.clone()", "x.to(low)", "torch.outer(x[0], x[0])", "torch.ger(x[0], x[0])",
    "x.masked_fill(x > 0, 0.0)", "torch.std(h)", "torch.var(h)", "torch.max(h, 1)[0]", "torch.topk(h, 2)[0]",
    "F.multi_head_attention_forward(x[None], x[None], x[None], 4, 2, t, c, None, None, False, 0.0, x, b[:4])[0]",
)  # fmt: skip


def outcomes(low: torch.dtype, cases: Any = CASES) -> dict[str, str]:
    """Return by case the type of its result on the GPU under autocast, and that of a gradient; or its error."""
    torch.manual_seed(0)
    gpu = {"device": "cuda"}
    names = {
        "torch": torch, "F": F, "nn": nn, "low": low, "x": torch.rand(4, 4, **gpu), "y": torch.rand(4, 4, **gpu),
        "h": torch.rand(4, 4, **gpu).to(low), "d": torch.rand(4, 4, **gpu).double(),
        "i": torch.tensor([0, 1, 2, 3], device="cuda"), "im": torch.rand(2, 3, 8, 8, **gpu),
        "w": torch.rand(3, 3, 3, 3, **gpu), "s": torch.rand(16, 4, **gpu), "b": torch.rand(16, **gpu),
        "t": torch.rand(12, 4, **gpu), "c": torch.rand(12, **gpu), "g": torch.rand(2, 5, 5, 2, **gpu),
    }  # fmt: skip
    found = {}
    for case in cases:
        leaf = torch.rand(4, 4, **gpu, requires_grad=True)
        try:
            with torch.autocast("cuda", low):
                out = eval(case, names | {"y": leaf})
            found[case] = str(out.dtype)
            if out.requires_grad:
                found[case] += f" {torch.autograd.grad(out.sum(), leaf)[0].dtype} {out.grad_fn.name()}"
        except (RuntimeError, NotImplementedError) as error:
            found[case] = type(error).__name__
    return found
