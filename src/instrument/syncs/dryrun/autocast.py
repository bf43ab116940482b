"""Autocast on the pretended GPU: casts tensors that pretend to be on it as ``torch.autocast("cuda")`` does.

The policies are those of ``aten/src/ATen/autocast_mode.h``. While a dry run uses them, they are registered under a
dispatch key of autocast that no other device of torch uses, and a thread includes that key while autocast is
enabled for "cuda". So they apply where torch's own do: above autograd, also to the parts of composite operators,
and not in the operators of a backward pass that began outside autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel

from .state import Tags

_KEY = "AutocastIPU"
_C: Any = torch._C
_T = torch.Tensor
_INACTIVE = (torch.float64, torch.complex64, torch.complex128)

LOWER_PRECISION = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul",
    "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention", "cudnn_convolution",
    "cudnn_convolution_transpose",
)  # fmt: skip
FLOAT = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
    "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div",
    "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist",
    "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d",
    "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
FLOAT_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
NORMS = ("norm.Scalar", "norm.ScalarOpt_dim")
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip
REFUSED = ("binary_cross_entropy",)
_REFUSAL = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)

Policy = Callable[[Any, Sequence[Any], dict[str, Any]], Any]  # the operator and its arguments


def is_supported() -> bool:
    """Return whether this version of torch has what the policies need."""
    return hasattr(Library, "fallback") and all(
        hasattr(_C, name)
        for name in (
            "_dispatch_tls_set_dispatch_key_included", "_dispatch_tls_set_dispatch_key_excluded",
            "_ExcludeDispatchKeyGuard", "DispatchKeySet",
        )
    )  # fmt: skip


@functools.cache
def _fall_through() -> Library:
    """Have operators without a policy pass our key by.

    The registration stays for ever: a thread that was inside autocast when the run ended includes the key until
    it ends itself.
    """
    every = Library("_", "IMPL")
    every.fallback(fallthrough_kernel, _KEY)
    return every


class CudaAutocast:
    """Casts as autocast on CUDA does, in one dry run.

    Args:
        tags: tells which tensors pretend to be on the GPU.
        on_cast: called with each cast of a parameter.
    """

    def __init__(self, tags: Tags, on_cast: Callable[[Any], None]) -> None:
        self._device = tags.device
        self._on_cast = on_cast
        self._library: Any = None
        self._casts: dict[
            int, tuple[Any, Any]
        ] = {}  # of parameters, by their ids, until the outermost context ends
        self._key = getattr(_C.DispatchKey, _KEY)
        self._keys = _C.DispatchKeySet(self._key)

    def replacements(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        """Yield the replacements of torch's functions: owner, name and the maker of each."""
        yield torch, "set_autocast_enabled", self._make_set_enabled
        yield torch, "clear_autocast_cache", self._make_clear

    def undo(self) -> None:
        """Remove the policies, and leave autocast on this thread."""
        if self._library is not None:
            self._include(False)
            self._library._destroy()
            self._library = None
        self._casts.clear()

    def _make_set_enabled(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def set_autocast_enabled(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            enabled = torch.is_autocast_enabled("cuda")
            if enabled and self._library is None:
                self._register()
            if self._library is not None:
                self._include(enabled)

        return set_autocast_enabled

    def _make_clear(self, original: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(original)
        def clear_autocast_cache() -> None:
            self._casts.clear()
            original()

        return clear_autocast_cache

    def _include(self, enabled: bool) -> None:
        _C._dispatch_tls_set_dispatch_key_excluded(self._key, not enabled)
        _C._dispatch_tls_set_dispatch_key_included(self._key, enabled)

    def _register(self) -> None:
        _fall_through()
        library = self._library = Library("aten", "IMPL")
        policies: tuple[tuple[Sequence[str], Policy], ...] = (
            (LOWER_PRECISION, self._lower), (FLOAT, self._float), (FLOAT_RESULT, self._float_result),
            (NORMS, self._norm), (WIDEST, self._widest), (REFUSED, self._refuse),
        )  # fmt: skip
        for names, policy in policies:
            for name in names:
                packet, _, overload = name.partition(".")
                with suppress(AttributeError, RuntimeError):  # another version of torch lacks the operator
                    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
                    library.impl(name, self._kernel(operator, policy), _KEY)

    def _kernel(self, operator: Any, policy: Policy) -> Callable[..., Any]:
        exclude, keys = _C._ExcludeDispatchKeyGuard, self._keys

        def run(*args: Any, **kwargs: Any) -> Any:
            with exclude(keys):
                enabled = torch.is_autocast_enabled(
                    "cuda"
                )  # else another run ended inside autocast on this thread
                return policy(operator, args, kwargs) if enabled else operator(*args, **kwargs)

        return run

    def _is_cast(self, value: Any) -> bool:
        """Return whether autocast casts ``value``: floating-point numbers on the GPU, but for double precision."""
        if not isinstance(value, _T) or not value.is_floating_point() or value.dtype in _INACTIVE:
            return False
        return self._device(value) is not None

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return ``value`` with its tensors cast, also in lists; casts of parameters are kept."""
        if isinstance(value, (list, tuple)):
            return [self.cast(each, dtype) for each in value]
        if not self._is_cast(value) or value.dtype is dtype:
            return value
        lower = value.dtype is torch.float32 and dtype is torch.get_autocast_dtype("cuda")
        if not (lower and value.requires_grad and value.is_leaf and not value._is_view()):
            return value.to(dtype)
        kept = self._casts.get(id(value))
        if kept is not None:
            return kept[1]
        made = value.to(dtype)
        self._on_cast(made)
        if torch.is_autocast_cache_enabled():
            self._casts[id(value)] = value, made
        return made

    def _run(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
        args = [self.cast(value, dtype) for value in args]
        return operator(*args, **{name: self.cast(value, dtype) for name, value in kwargs.items()})

    def _lower(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._run(operator, args, kwargs, torch.get_autocast_dtype("cuda"))

    def _float(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._run(operator, args, kwargs, torch.float32)

    def _float_result(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Let the operator compute and return floats, unless the program names a type."""
        if not self._is_cast(args[0]):
            return operator(*args, **kwargs)
        place = [argument.name for argument in operator._schema.arguments].index("dtype")
        if len(args) > place:
            if args[place] is None:
                args = [*args[:place], torch.float32, *args[place + 1 :]]
        elif kwargs.get("dtype") is None:
            kwargs = {**kwargs, "dtype": torch.float32}
        return operator(*args, **kwargs)

    def _norm(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(("self", "p", "dim", "keepdim"), args, strict=False)) | kwargs
        dtype = torch.float32 if self._is_cast(args[0]) else args[0].dtype
        if "dim" in given:
            keepdim = given.get("keepdim", False)
            return torch.ops.aten.norm.ScalarOpt_dim_dtype(args[0], given["p"], given["dim"], keepdim, dtype=dtype)
        return torch.ops.aten.norm.ScalarOpt_dtype(args[0], given.get("p", 2), dtype=dtype)

    def _widest(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        flat = [each for value in args for each in (value if isinstance(value, (list, tuple)) else [value])]
        single = any(self._is_cast(value) and value.dtype is torch.float32 for value in flat)
        return self._run(operator, args, kwargs, torch.float32 if single else torch.get_autocast_dtype("cuda"))

    def _refuse(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._device(args[0]) is None:
            return operator(*args, **kwargs)
        raise RuntimeError(_REFUSAL)
