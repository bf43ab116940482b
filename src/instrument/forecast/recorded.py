"""The calls of a step that a dry run recorded, as a forecast takes them."""

from __future__ import annotations

import torch

from ..syncs.counting.calls import Call, Span, TensorInfo
from ..syncs.counting.kernels import launches_of
from ..syncs.counting.work import work_of
from .operations import Tensor, operation_of
from .steps import StepCall

_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.uint8: "int8",
}  # fmt: skip
_READS_RESULT = "aten::_local_scalar_dense"  # such as `.item()`


def step_calls(span: Span) -> list[StepCall]:
    """Return the operators of a step in their order; those of equal arguments are one object."""
    known: dict[Call, StepCall] = {}
    calls = []
    for call, _ in span:
        if call not in known:
            known[call] = _step_call(call)
        calls.append(known[call])
    return calls


def _step_call(call: Call) -> StepCall:
    launches = launches_of(call).works
    waits = call.name == _READS_RESULT or any(
        (launch.family, launch.source, launch.target) == ("memcpy", "gpu", "cpu") for launch in launches
    )
    if all(launch.family == "memcpy" and launch.source != launch.target for launch in launches):
        return StepCall(None, waits)  # launches nothing, or copies from or to the CPU
    inputs = [_tensor(each) for each in call.tensors]
    results = [_tensor(each) for each in call.results if each is not None]
    if not results:  # as those of many tensors, which write their arguments
        results = [Tensor((work_of(call).written,), None, "int8")]
    return StepCall(operation_of(call.name, inputs, results), waits)


def type_name(dtype: torch.dtype) -> str:
    """Return a type as `Tensor` names it."""
    return _TYPES.get(dtype) or str(dtype).removeprefix("torch.")


def _tensor(info: TensorInfo) -> Tensor:
    return Tensor(info.shape, info.stride, type_name(info.dtype))
