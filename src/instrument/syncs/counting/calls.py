"""The record of a dry run: which operators were called on the GPU, where, and in which order.

Equal calls are one `Call`, and equal places one `Place`, so that a long run stays small: the order is a sequence
of pairs of numbers.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ...base.compat.distributed import Group
from ...base.findings import Site
from .streams import StreamNote

Phase = Literal["forward", "backward", "recomputed", "optimizer"]
GROUP = "group "
"""Begins the name of a process group among the arguments of a call."""
PHASES: tuple[Phase, ...] = ("forward", "backward", "recomputed", "optimizer")
Memory = Literal["gpu", "cpu", "pinned"]

TYPE_NAMES = {
    torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16",
    torch.int64: "long int", torch.int32: "int", torch.int16: "short int", torch.int8: "signed char",
    torch.uint8: "unsigned char", torch.bool: "bool", torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>", torch.float8_e4m3fn: "c10::Float8_e4m3fn",
    torch.float8_e5m2: "c10::Float8_e5m2", torch.float8_e4m3fnuz: "c10::Float8_e4m3fnuz",
    torch.float8_e5m2fnuz: "c10::Float8_e5m2fnuz",
}  # fmt: skip
"""The types of tensors, as torch.profiler names them."""


class TensorInfo(NamedTuple):
    """A tensor that an operator takes or returns.

    Attributes:
        shape: its sizes.
        stride: its strides, in elements.
        dtype: the type of its elements.
        number: identifies the tensor within the call; an argument and the result that is written into it share a
            number, a view has its own.
        memory: where it is on a machine with a GPU.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    number: int
    memory: Memory

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of the elements; those along an expanded dimension count once."""
        result: int = self.dtype.itemsize
        for size, step in zip(self.shape, self.stride, strict=True):
            if step or not size:
                result *= size
        return result


Argument = Any  # a TensorInfo, a number, a text, None, or a tuple of these


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """An operator with its arguments; equal calls of one run are one object.

    Operators that only make a view launch nothing on a GPU, and are recorded without arguments and results.

    Attributes:
        name: the operator as torch.profiler names it, such as "aten::addmm".
        operator: torch's object for its overload.
        arguments: in the order of its schema, with the defaults: a `TensorInfo` for each tensor, a tuple for each
            list; devices, types and the like are texts.
        results: the tensors that it returns; None for results that are none.
    """

    name: str
    operator: Any
    arguments: tuple[Argument, ...]
    results: tuple[TensorInfo | None, ...]

    @property
    def tensors(self) -> list[TensorInfo]:
        """The tensors among the arguments, also those in lists."""
        return list(tensors_in(self.arguments))

    @property
    def shapes(self) -> str:
        """The shapes of the arguments, as torch.profiler records them, in JSON."""
        return json.dumps([_shape(value) for value in self.arguments])

    @property
    def types(self) -> str:
        """The types of the arguments, as torch.profiler records them, in JSON."""
        return json.dumps([_type(value) for value in self.arguments])

    @property
    def scalars(self) -> str:
        """The values of the other arguments, as torch.profiler records them, in JSON."""
        return json.dumps(["" if _has_tensor(value) else _text(value) for value in self.arguments])

    def __repr__(self) -> str:
        return f"<{self.name} {self.shapes}>"


class Place(NamedTuple):
    """Where a program calls an operator.

    Attributes:
        phase: the pass; "recomputed" is the forward pass that the backward pass runs again, as under
            checkpointing. What is in no pass, such as the copies of a batch, is in "forward"; the clipping of
            gradients is in "optimizer".
        region: the names of the open regions, outermost first; in the backward pass those of the forward operator.
        module: the path of the innermost module, such as "Model.layers.0.attention"; empty outside modules.
        site: the user's line; in the backward pass, that of the forward operator. None if it is not known.
        via: the innermost line of a library below the user's line; None if there is none.
        compiled: whether it belongs to a graph of torch.compile, or to the backward pass of one.
    """

    phase: Phase
    region: tuple[str, ...]
    module: str
    site: Site | None
    via: Site | None
    compiled: bool = False


@dataclass(frozen=True)
class Span:
    """A stretch of a record, in order.

    Attributes:
        record: the record.
        call: for each operator, its index in `CallRecord.calls`.
        place: for each operator, its index in `CallRecord.places`.
        notes: what orders the work of streams; the positions are those in this stretch.
    """

    record: CallRecord
    call: np.ndarray[Any, np.dtype[np.int32]]
    place: np.ndarray[Any, np.dtype[np.int32]]
    notes: tuple[StreamNote, ...] = ()

    def __len__(self) -> int:
        return len(self.call)

    def __iter__(self) -> Iterator[tuple[Call, Place]]:
        calls, places = self.record.calls, self.record.places
        return (
            (calls[call], places[place])
            for call, place in zip(self.call.tolist(), self.place.tolist(), strict=True)
        )

    def counted(self) -> Iterator[tuple[Call, Place, int]]:
        """Yield each pair of call and place with the number of times that it occurs, in order of the first."""
        pairs = self.call.astype(np.int64) << 32 | self.place
        distinct, first, times = np.unique(pairs, return_index=True, return_counts=True)
        calls, places = self.record.calls, self.record.places
        for index in np.argsort(first).tolist():
            pair = int(distinct[index])
            yield calls[pair >> 32], places[pair & 0xFFFFFFFF], int(times[index])


@dataclass
class CallRecord:
    """What a dry run called on the GPU.

    Attributes:
        calls: the distinct calls.
        places: the distinct places.
        order: the index of a call and of its place, for each operator in order.
        marks: where steps begin: a number of operators, and the number of the step (1 is the first; 0 before the
            first update, None before an optimizer is made).
        notes: what orders the work of streams.
        groups: the process groups that collectives took, by their names.
    """

    calls: list[Call] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    order: array[int] = field(default_factory=lambda: array("i"))
    marks: list[tuple[int, int | None]] = field(default_factory=list)
    notes: list[StreamNote] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.order) // 2

    def group_of(self, call: Call) -> Group | None:
        """Return the process group of a collective; None if it is not known."""
        names = [each.removeprefix(GROUP) for each in call.arguments if isinstance(each, str)]
        return next((self.groups[name] for name in names if name in self.groups), None)

    def span(self, begin: int = 0, end: int | None = None) -> Span:
        """Return the operators from the one with number ``begin`` to the one before ``end``."""
        pairs = np.array(self.order, np.int32).reshape(-1, 2)[begin:end]
        return Span(self, pairs[:, 0], pairs[:, 1])

    def step(self, number: int) -> Span:
        """Return the operators of a step; the first step begins where the run or its optimizer does."""
        wanted = (number,) if number != 1 else (1, 0) if any(step == 0 for _, step in self.marks) else (1, None)
        ends = [*(mark for mark, _ in self.marks[1:]), len(self)]
        parts = [(begin, end) for (begin, step), end in zip(self.marks, ends, strict=False) if step in wanted]
        pairs = np.array(self.order, np.int32).reshape(-1, 2)
        chosen = np.concatenate([pairs[begin:end] for begin, end in parts]) if parts else pairs[:0]
        return Span(self, chosen[:, 0], chosen[:, 1], tuple(self._notes_in(parts)))

    def _notes_in(self, parts: list[tuple[int, int]]) -> Iterator[StreamNote]:
        before = 0
        for begin, end in parts:
            for note in self.notes:
                after = note.kind == "synchronize"  # the operators before it
                if begin + after <= note.position < end + after or note.position == end == len(self):
                    yield note._replace(position=note.position - begin + before)
            before += end - begin


def tensors_in(value: Argument) -> Iterator[TensorInfo]:
    """Yield the tensors in an argument, also those in lists."""
    if isinstance(value, TensorInfo):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)


def _has_tensor(value: Argument) -> bool:
    return next(tensors_in(value), None) is not None


def _shape(value: Argument) -> Any:
    if isinstance(value, TensorInfo):
        return value.shape
    return [_shape(item) for item in value] if isinstance(value, tuple) and _has_tensor(value) else []


def _type(value: Argument) -> str:
    if isinstance(value, TensorInfo):
        return TYPE_NAMES.get(value.dtype, str(value.dtype))
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "TensorList" if _has_tensor(value) else "ScalarList"
    return "Scalar"


def _text(value: Argument) -> str:
    if value is None:
        return ""
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, tuple) else str(value)
