"""Records each operator that a dry run calls on the GPU; costs 10 us an operator."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, NoneType
from typing import Any, Protocol

import torch

from ...base.guard import guard
from ...base.patch import Patch
from .calls import Call, CallRecord, Memory, TensorInfo
from .places import Places, ThreadPlaces, patches

FEATURE = "counting operators"
_TO_COPY = torch.ops.aten._to_copy.default
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_VALUES = frozenset((
    int, float, bool, complex, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format,
))  # fmt: skip


class Steps(Protocol):
    """Says in which step the program is."""

    step: int | None
    in_step: bool  # whether the step of the last update may have ended unnoticed
    in_unwanted_step: bool

    def look(self, frame: FrameType | None) -> None:
        """Find out whether the program, at ``frame``, has left the step of the last update."""


class CallRecorder:
    """Records the calls of a run.

    Args:
        steps: says in which step the program is.
        path: returns the names of the regions that are open on this thread.
        memory: returns where a tensor is.

    Attributes:
        record: what was recorded so far.
    """

    def __init__(
        self, steps: Steps, path: Callable[[], tuple[str, ...]], memory: Callable[[Any], Memory]
    ) -> None:
        self._steps = steps
        self._places = Places(path)
        self._memory = memory
        self.record = CallRecord(places=self._places.places)
        self._index_of: dict[tuple[Any, ...], int] = {}
        self._has_dynamic_results: dict[Any, bool] = {}
        self._looked_at: set[int] = set()  # places since the last update
        self._threads = _Threads()

    def add(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, *, mixed: bool, name: str = ""
    ) -> None:
        """Record one operator that ran.

        Args:
            func: the operator.
            args: its arguments.
            kwargs: its arguments by keyword.
            out: its results.
            mixed: whether its tensors may be on the GPU and elsewhere.
            name: the operator that a GPU runs in its place; empty for the same.
        """
        self._add(lambda: self._call(func, args, kwargs, out, mixed, name))

    def _add(self, call: Callable[[], int]) -> None:
        """Record a call, of which ``call`` returns the index, with its place."""
        try:
            frame = sys._getframe(2)
            place = self._places.find(self._threads.places, frame)
            steps = self._steps
            if steps.in_step and place not in self._looked_at:
                self._looked_at.add(place)
                steps.look(frame)
            if steps.in_unwanted_step:
                return
            record = self.record
            if not record.marks or record.marks[-1][1] != steps.step:
                self._looked_at.clear()
                record.marks.append((len(record), steps.step))
            record.order.extend((call(), place))
        except Exception as error:
            guard.failed(FEATURE, error)

    def _call(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, mixed: bool, name: str
    ) -> int:
        ids: list[int] = []
        parts: list[Any] = [func, name]
        self._key(args, parts, ids, mixed)
        if kwargs:
            parts += kwargs
            self._key(kwargs.values(), parts, ids, mixed)
        if len(ids) > 1 and len(set(ids)) < len(ids):
            first: dict[int, int] = {}
            parts.append(tuple(first.setdefault(each, len(first)) for each in ids))
        dynamic = self._has_dynamic_results.get(func)
        if dynamic is None:
            dynamic = self._has_dynamic_results[func] = torch.Tag.dynamic_output_shape in func.tags
        if dynamic:
            self._key([out], parts, [], False)
        key = tuple(parts)
        index = self._index_of.get(key)
        if index is None:
            call = _Description(self._memory).call(func, args, kwargs, out, name)
            self.record.calls.append(call)
            index = self._index_of[key] = len(self.record.calls) - 1
        return index

    def add_copy(
        self, source: TensorInfo, target: Memory, *, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> None:
        """Record a copy to or from the GPU that no operator makes in a dry run.

        Args:
            source: what is copied.
            target: where to.
            dtype: the type of the copy; None for that of ``source``.
            non_blocking: whether the CPU goes on meanwhile.
        """
        copied = TensorInfo(source.shape, source.stride, dtype or source.dtype, 1, target)
        self._add(lambda: self._copy(source, copied, non_blocking))

    def _copy(self, source: TensorInfo, copied: TensorInfo, non_blocking: bool) -> int:
        key = source, copied, non_blocking
        index = self._index_of.get(key)
        if index is None:
            arguments = (source, str(copied.dtype), None, None, None, non_blocking, None)
            self.record.calls.append(Call("aten::_to_copy", _TO_COPY, arguments, (copied,)))
            index = self._index_of[key] = len(self.record.calls) - 1
        return index

    def _key(self, values: Any, parts: list[Any], ids: list[int], mixed: bool) -> None:
        """Append what tells calls apart; shapes, strides and types of tensors."""
        for value in values:
            kind = type(value)
            if kind in _PLAIN or isinstance(value, torch.Tensor):
                shape = value.shape
                parts += (shape, value.dtype, _stride(value))
                ids.append(id(value))
                if mixed or not shape:
                    parts.append(self._memory(value))
            elif kind in _VALUES:
                parts += (kind, value)
            elif kind is list or kind is tuple:
                parts.append(len(value))
                self._key(value, parts, ids, mixed)
            else:
                parts.append(_value(value))

    def restart(self, step: int | None) -> None:
        """Make all operators so far a part of the step with this number."""
        self.record.marks[:] = [(0, step)]

    def clear(self) -> None:
        """Drop all operators so far."""
        del self.record.order[:]
        self.record.marks.clear()

    def patches(self) -> Iterator[Patch]:
        """Return what must be patched."""
        return patches(self._places, self._threads.get)

    def watch_thread(self) -> None:
        """Record the operators of the calling thread."""
        self._threads.places = ThreadPlaces()


class _Threads(threading.local):
    places: ThreadPlaces

    def get(self) -> ThreadPlaces | None:
        return getattr(self, "places", None)


class _Description:
    """Describes one call."""

    def __init__(self, memory: Callable[[Any], Memory]) -> None:
        self._memory = memory
        self._numbers: dict[int, int] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, name: str) -> Call:
        """Return the call, with its arguments in the order of the schema."""
        arguments = []
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            arguments.append(self._describe(value))
        results = out if isinstance(out, (list, tuple)) else [out]
        described = tuple(self._describe(result) for result in results)
        tensors = tuple(each if isinstance(each, TensorInfo) else None for each in _flat(described))
        return Call(name or func._schema.name, func, tuple(arguments), tensors)

    def _describe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = self._numbers.setdefault(id(value), len(self._numbers))
            return TensorInfo(tuple(map(int, value.shape)), _stride(value), value.dtype, number, self._memory(value))
        if isinstance(value, (list, tuple)):
            return tuple(map(self._describe, value))
        return _value(value)


def _flat(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple) and not isinstance(value, TensorInfo):
            yield from _flat(value)
        else:
            yield value


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return tensor.stride()
    except RuntimeError:  # sparse tensors have none
        return ()


def _value(value: Any) -> Any:
    """Return a value that is not a tensor as a `Call` has it."""
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return str(value)
    return type(value).__name__ if isinstance(value, torch.Generator) else str(value)
