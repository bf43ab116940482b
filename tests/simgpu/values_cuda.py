"""Operators that have kernels for CUDA alone, computed on the CPU: attention, cells of LSTM and GRU, RMS norms.

Each takes and returns what torch's does; None stands for an output that the operator of CUDA has set by itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Tensor = torch.Tensor
Some = Tensor | None


class Attention:
    """The probabilities of one attention, in 32 bits."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Some, dropout: float, causal: bool,
        scale: float | None, state: tuple[int, int],
    ) -> None:  # fmt: skip
        self.heads = key.size(-3)
        self.query = query.float()
        self.groups = query.size(-3) // self.heads
        self.key = key.float().repeat_interleave(self.groups, -3)
        self.value = value.float().repeat_interleave(self.groups, -3)
        self.scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        scores = self.query @ self.key.mT * self.scale
        if bias is not None:
            scores = scores + bias.float()
        if causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~allowed, -math.inf)
        self.logsumexp = scores.logsumexp(-1)
        self.probabilities = torch.exp(scores - self.logsumexp.unsqueeze(-1)).nan_to_num(0)
        self.kept = torch.ones(())
        if dropout:
            seed, offset = state
            generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + offset) % (1 << 63))
            kept = torch.rand(self.probabilities.shape, generator=generator) >= dropout
            self.kept = kept.float() / (1 - dropout)

    def output(self) -> Tensor:
        output: Tensor = (self.probabilities * self.kept) @ self.value
        return output

    def gradients(self, of_output: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return those of the query, the key, the value and the scores."""
        of_output = of_output.float()
        of_value = (self.probabilities * self.kept).mT @ of_output
        of_probabilities = (of_output @ self.value.mT) * self.kept
        of_scores = self.probabilities * (
            of_probabilities - (of_probabilities * self.probabilities).sum(-1, keepdim=True)
        )
        of_query = of_scores @ self.key * self.scale
        of_key = of_scores.mT @ self.query * self.scale
        return of_query, self.of_group(of_key), self.of_group(of_value), of_scores

    def of_group(self, gradient: Tensor) -> Tensor:
        groups: Tensor = gradient.unflatten(-3, (self.heads, self.groups))
        return groups.sum(-3)


def state_of_generator() -> tuple[int, int]:
    """Return what an attention with dropout keeps for its backward pass: the seed and the offset."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return generator.initial_seed(), generator.get_offset()


def numbers_in(*tensors: Tensor) -> tuple[int, int]:
    seed, offset = (number for tensor in tensors for number in tensor.view(torch.int64).flatten().tolist())
    return seed, offset


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Some, compute_log_sumexp: bool, dropout: float = 0.0,
    causal: bool = False, *, scale: float | None = None,
) -> tuple[Some, ...]:  # fmt: skip
    seed, offset = state = state_of_generator()
    attention = Attention(query, key, value, bias, dropout, causal, scale, state)
    logsumexp = padded(attention.logsumexp) if compute_log_sumexp else None
    return attention.output(), logsumexp, torch.tensor(seed), torch.tensor(offset)


def padded(logsumexp: Tensor) -> Tensor:
    """Return it with the rows that the kernel adds up to a multiple of 32."""
    rows = logsumexp.size(-1)
    return torch.nn.functional.pad(logsumexp, (0, -rows % 32), value=math.inf)


def efficient_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Some, out: Tensor, logsumexp: Tensor,
    seed: Tensor, offset: Tensor, dropout: float, wanted: list[bool], causal: bool = False, *,
    scale: float | None = None,
) -> tuple[Some, ...]:  # fmt: skip
    attention = Attention(
        query, key, value, bias, dropout, causal, scale, numbers_in(seed, offset) if dropout else (0, 0)
    )
    *of_inputs, of_scores = attention.gradients(gradient)
    of_bias = of_scores.sum_to_size(bias.shape) if bias is not None and wanted[3] else None
    return (*(each if want else None for each, want in zip(of_inputs, wanted, strict=False)), of_bias)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Some, ...]:  # fmt: skip
    state = state_of_generator()
    attention = Attention(query, key, value, None, dropout, causal, scale, state)
    return attention.output(), attention.logsumexp, *[None] * 4, torch.tensor(state), None, None


def flash_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, _q: Some,
    _k: Some, _max_q: int, _max_k: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor, *,
    scale: float | None = None,
) -> tuple[Some, ...]:  # fmt: skip
    attention = Attention(query, key, value, None, dropout, causal, scale, numbers_in(seed) if dropout else (0, 0))
    return attention.gradients(gradient)[:3]


def gates_of(first: Tensor, second: Tensor, *biases: Some) -> Tensor:
    return sum((bias.float() for bias in biases if bias is not None), first.float() + second.float())


def lstm_cell(
    from_input: Tensor, from_hidden: Tensor, cell: Tensor, input_bias: Some = None, hidden_bias: Some = None
) -> tuple[Tensor, ...]:
    i, f, g, o = gates_of(from_input, from_hidden, input_bias, hidden_bias).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell.float() + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    of_hidden: Some, of_cell: Some, before: Tensor, after: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Some, ...]:
    i, f, g, o = workspace.float().chunk(4, 1)
    hidden = torch.zeros_like(o) if of_hidden is None else of_hidden.float()
    tanh = after.float().tanh()
    through = hidden * o * (1 - tanh * tanh) + (0 if of_cell is None else of_cell.float())
    gates = torch.cat(
        [
            through * g * i * (1 - i),
            through * before.float() * f * (1 - f),
            through * i * (1 - g * g),
            hidden * tanh * o * (1 - o),
        ],
        1,
    )
    return gates, through * f, gates.sum(0) if has_bias else None


def gru_cell(
    from_input: Tensor, from_hidden: Tensor, hidden: Tensor, input_bias: Some = None, hidden_bias: Some = None
) -> tuple[Tensor, ...]:
    added = 0 if input_bias is None else input_bias.float()
    added_to_hidden = 0 if hidden_bias is None else hidden_bias.float()
    r_in, z_in, n_in = (from_input.float() + added).chunk(3, 1)
    r_hid, z_hid, n_hid = (from_hidden.float() + added_to_hidden).chunk(3, 1)
    r, z = (r_in + r_hid).sigmoid(), (z_in + z_hid).sigmoid()
    n = (n_in + r * n_hid).tanh()
    return n + z * (hidden.float() - n), torch.cat([r, z, n, hidden.float(), n_hid], 1)


def gru_cell_backward(of_hidden: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Some, ...]:
    r, z, n, hidden, n_hid = workspace.float().chunk(5, 1)
    gradient = of_hidden.float()
    of_n = gradient * (1 - z) * (1 - n * n)
    of_z = gradient * (hidden - n) * z * (1 - z)
    of_r = of_n * n_hid * r * (1 - r)
    of_input = torch.cat([of_r, of_z, of_n], 1)
    of_hidden_gates = torch.cat([of_r, of_z, of_n * r], 1)
    biases = (of_input.sum(0), of_hidden_gates.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden_gates, gradient * z, *biases


def rms_norm_backward(
    gradient: Tensor, data: Tensor, shape: list[int], rstd: Tensor, weight: Some, wanted: list[bool]
) -> tuple[Some, ...]:
    normalized = list(range(data.dim() - len(shape), data.dim()))
    scaled = data.float() * rstd.float()
    weighted = gradient.float() * (1 if weight is None else weight.float())
    of_data = (weighted - scaled * (weighted * scaled).mean(normalized, keepdim=True)) * rstd.float()
    of_weight = (gradient.float() * scaled).sum_to_size(shape) if wanted[1] else None
    return of_data if wanted[0] else None, of_weight


def softmax(data: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.softmax(data.float() if half_to_float else data, dim)


def log_softmax(data: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.log_softmax(data.float() if half_to_float else data, dim)


def softmax_backward(gradient: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Any:
    return torch.ops.aten._softmax_backward_data(gradient, output, dim, output.dtype)


def log_softmax_backward(gradient: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Any:
    return torch.ops.aten._log_softmax_backward_data(gradient, output, dim, output.dtype)


substitutes = {
    "aten::_scaled_dot_product_efficient_attention": efficient_attention,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
    "aten::_scaled_dot_product_flash_attention": flash_attention,
    "aten::_scaled_dot_product_flash_attention_backward": flash_attention_backward,
    "aten::_thnn_fused_lstm_cell": lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": gru_cell,
    "aten::_thnn_fused_gru_cell_backward": gru_cell_backward,
    "aten::_fused_rms_norm_backward": rms_norm_backward,
    "aten::_softmax": softmax,
    "aten::_log_softmax": log_softmax,
    "aten::_softmax_backward_data": softmax_backward,
    "aten::_log_softmax_backward_data": log_softmax_backward,
}
