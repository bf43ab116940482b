"""Legacy tensor types, such as `torch.cuda.FloatTensor`, which CPU builds do not have."""

from __future__ import annotations

from typing import Any

import torch

DTYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "CharTensor": torch.int8,
    "ShortTensor": torch.int16, "IntTensor": torch.int32, "LongTensor": torch.int64, "BoolTensor": torch.bool,
}  # fmt: skip


class _Type(type):
    dtype: Any

    def __call__(cls, *args: Any, **options: Any) -> Any:
        device = options.get("device") or "cuda"
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            if isinstance(args[0], torch.Tensor):
                return args[0].to(device, cls.dtype)
            return torch.tensor(args[0], dtype=cls.dtype, device=device)
        size = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return torch.empty(size, dtype=cls.dtype, device=device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype


def types() -> dict[str, Any]:
    """Return the types by name; a call of a type makes a tensor on the GPU."""
    return {
        name: _Type(name, (), {"dtype": dtype, "is_cuda": True, "__module__": "torch.cuda"})
        for name, dtype in DTYPES.items()
    }
