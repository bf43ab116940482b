"""The calls of a step that a dry run recorded, and what orders them, as a forecast takes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ..syncs.counting.calls import Call, Span, TensorInfo
from ..syncs.counting.kernels import launches_of
from ..syncs.counting.streams import COMMUNICATION, DEFAULT, StreamNote
from ..syncs.counting.work import work_of
from .links import Collective, Kind
from .operations import BYTES, Tensor, operation_of
from .timeline import StepCall

_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.uint8: "int8",
}  # fmt: skip
_KINDS: tuple[tuple[str, Kind], ...] = (
    ("reduce_scatter", "reduce-scatter"), ("reducescatter", "reduce-scatter"), ("gather", "all-gather"),
    ("alltoall", "all-gather"), ("all_to_all", "all-gather"), ("reduce", "all-reduce"),
)  # fmt: skip


def step_calls(span: Span, ranks: int = 1) -> list[StepCall]:
    """Return the operators of a step in their order; those of equal arguments are one object.

    Args:
        span: the step.
        ranks: with how many ranks a collective communicates whose process group is not known.
    """
    known: dict[Call, StepCall] = {}
    calls = []
    for call, _ in span:
        if call not in known:
            known[call] = _step_call(call, group.size if (group := span.record.group_of(call)) else ranks)
        calls.append(known[call])
    return calls


def stream_notes(span: Span) -> list[StreamNote]:
    """Return what orders the calls of a step.

    C++ code that waits for a collective leaves no note, such as DDP's reducer at the end of the backward pass;
    such collectives end with the pass that sent them.
    """
    awaited = {note.event for note in span.notes if note.kind == "wait"}
    sent = [note for note in span.notes if note.stream == COMMUNICATION and note.event not in awaited]
    phases = np.array([place.phase == "forward" for place in span.record.places], bool)
    forward = np.concatenate(([0], np.cumsum(phases[span.place])))
    waits: list[StreamNote] = []
    for note in reversed(sent):
        end = waits[-1].position if waits else note.position
        end = end if forward[end] == forward[note.position] else note.position
        waits.append(StreamNote(end, "wait", DEFAULT, note.event))
    return sorted([*span.notes, *reversed(waits)], key=lambda note: note.position)


def _step_call(call: Call, ranks: int) -> StepCall:
    launches = launches_of(call).works
    if launches and launches[0].family == "collective":
        name = call.name.rpartition("::")[2]
        does: Kind = next((kind for part, kind in _KINDS if part in name), "broadcast")
        return StepCall(None, collective=Collective(does, launches[0].bytes, ranks))
    if all(launch.family == "memcpy" and launch.source != launch.target for launch in launches):
        return StepCall(None)  # launches nothing, or copies from or to the CPU
    schema = call.operator._schema.arguments
    read = tuple(value for value, of in zip(call.arguments, schema, strict=True) if of.name != "out")
    inputs = [_tensor(each) for each in replace(call, arguments=read).tensors]
    results = [_tensor(each) for each in call.results if each is not None]
    if not results:  # as those of many tensors, which write their arguments
        kind = inputs[0].type if inputs else "int8"
        results = [Tensor((work_of(call).written // BYTES.get(kind, 4),), None, kind)]
    return StepCall(operation_of(call.name, inputs, results))


def type_name(dtype: torch.dtype) -> str:
    """Return a type as `Tensor` names it."""
    return _TYPES.get(dtype) or str(dtype).removeprefix("torch.")


def _tensor(info: TensorInfo) -> Tensor:
    return Tensor(info.shape, info.stride, type_name(info.dtype))
