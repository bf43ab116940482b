"""Records each operator that a dry run calls on the GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

import torch

from ...base.guard import guard
from ...base.patch import Patch
from .calls import Call, CallRecord, Memory, TensorInfo
from .launches import contiguous_stride
from .places import Places, ThreadPlaces, patches
from .signatures import Found, Signatures, plain_value
from .streams import StreamNote

FEATURE = "counting operators"
_COPY_NAME = "_to_copy"
_TO_COPY = getattr(torch.ops.aten, _COPY_NAME).default
_VIEW, _DYNAMIC, _ORDINARY = range(3)  # kinds of operators: of the second, arguments do not determine the results


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
        on_model: as in `Places`.
        on_module: as in `Places`.

    Attributes:
        record: what was recorded so far.
    """

    def __init__(
        self,
        steps: Steps,
        path: Callable[[], tuple[str, ...]],
        memory: Callable[[Any], Memory],
        on_model: Callable[[Any, str], None],
        on_module: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._steps = steps
        self._places = Places(path, on_model, on_module)
        self._memory = memory
        self.record = CallRecord(places=self._places.places)
        self._signatures = Signatures()
        self._index_of: dict[Any, int] = {}
        self._kinds: dict[Any, int] = {}
        self._looked_at: set[int] = set()  # places since the last update
        self._step: int | None = None  # of the last mark

    def add(
        self,
        thread: ThreadPlaces,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        out: Any,
        *,
        mixed: bool,
        found: Found | None = None,
    ) -> None:
        """Record one operator that ran on ``thread``.

        Args:
            thread: the calling thread.
            func: the operator.
            args: its arguments.
            kwargs: its arguments by keyword.
            out: its results.
            mixed: whether its tensors may be on the GPU and elsewhere.
            found: its signature, if that is known, and the tensors among its arguments.
        """
        try:
            place = self._place(thread, sys._getframe(1))
            if place is None:
                return
            kind = self._kinds.get(func)
            if kind is None:
                kind = self._kinds[func] = _kind_of(func)
            key = func if kind == _VIEW else self._key(kind, func, args, kwargs, out, mixed, found)
            call = self._index_of.get(key)
            if call is None:
                view = kind == _VIEW
                made = (
                    Call(func._schema.name, func, (), ())
                    if view
                    else described(self._memory, func, args, kwargs, out)
                )
                call = self._append(key, made)
            self.record.order.extend((call, place))
        except Exception as error:
            guard.failed(FEATURE, error)

    def note_node(self, thread: ThreadPlaces) -> None:
        """Note that the autograd node that was just made belongs to the operator that is recorded next."""
        try:
            self._places.find(thread, sys._getframe(1))
        except Exception as error:
            guard.failed(FEATURE, error)

    def _place(self, thread: ThreadPlaces, frame: FrameType) -> int | None:
        """Return the index of the place of an operator; None if its step does not count."""
        place = self._places.find(thread, frame)
        steps = self._steps
        if steps.in_step and place not in self._looked_at:
            self._looked_at.add(place)
            steps.look(frame)
        if steps.in_unwanted_step:
            return None
        if self._step != steps.step or not self.record.marks:
            self._step = steps.step
            self._looked_at.clear()
            self.record.marks.append((len(self.record), steps.step))
        return place

    def _key(
        self,
        kind: int,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        out: Any,
        mixed: bool,
        found: Found | None,
    ) -> Any:
        """Return what equal calls have in common: their signature, and where their tensors are."""
        if kind == _DYNAMIC:
            found = self._signatures.find(func, [*args, out], kwargs)
        signature, given = found or self._signatures.find(func, args, kwargs)
        told_apart = given if mixed else [given[place] for place in signature.scalars]
        return (signature, *map(self._memory, told_apart)) if told_apart else signature

    def note_wait(self, stream: int, event: int, *, in_next: bool) -> None:
        """Note that the CPU waits for a stream or an event now, or in the operator that is recorded next."""
        if not self._steps.in_unwanted_step:
            self.record.notes.append(StreamNote(len(self.record) + in_next, "synchronize", stream, event))

    def _append(self, key: Any, call: Call) -> int:
        self.record.calls.append(call)
        self._index_of[key] = len(self.record.calls) - 1
        return len(self.record.calls) - 1

    def add_copy(
        self,
        thread: ThreadPlaces,
        source: TensorInfo,
        target: Memory,
        dtype: torch.dtype | None,
        non_blocking: bool,
    ) -> None:
        """Record a copy to or from the GPU that no operator makes in a dry run.

        Args:
            thread: the calling thread.
            source: what is copied.
            target: where to.
            dtype: the type of the copy; None for that of ``source``.
            non_blocking: whether the CPU goes on meanwhile.
        """
        try:
            place = self._place(thread, sys._getframe(1))
            copied = TensorInfo(source.shape, source.stride, dtype or source.dtype, 1, target)
            key = source, copied, non_blocking
            call = self._index_of.get(key)
            if call is None:
                arguments = (source, str(copied.dtype), None, None, None, non_blocking, None)
                call = self._append(key, Call("aten::_to_copy", _TO_COPY, arguments, (copied,)))
            if place is not None:
                self.record.order.extend((call, place))
        except Exception as error:
            guard.failed(FEATURE, error)

    def restart(self, step: int | None) -> None:
        """Make all operators so far a part of the step with this number."""
        self.record.marks[:] = [(0, step)]

    def clear(self) -> None:
        """Drop all operators so far."""
        del self.record.order[:]
        self.record.marks.clear()
        self.record.notes.clear()

    def patches(self, thread: Callable[[], ThreadPlaces | None]) -> Iterator[Patch]:
        """Return what must be patched; ``thread`` returns what is known of the calling thread."""
        return patches(guard.contained(FEATURE)(self._places.begin_module), thread)


def _kind_of(func: Any) -> int:
    if torch.Tag.dynamic_output_shape in func.tags:
        return _DYNAMIC
    aliases = [result.alias_info for result in func._schema.returns]
    is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    return _VIEW if is_view else _ORDINARY


def described(
    memory: Callable[[Any], Memory], func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> Call:
    """Return a call that ran; ``memory`` returns where a tensor is."""
    return _Description(memory).call(func, args, kwargs, out)


class _Description:
    """Describes one call."""

    def __init__(self, memory: Callable[[Any], Memory]) -> None:
        self._memory = memory
        self._numbers: dict[int, int] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Call:
        """Return the call, with its arguments in the order of the schema."""
        arguments = []
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            arguments.append(self._describe(value))
        results = out if isinstance(out, (list, tuple)) else [out]
        described = tuple(self._describe(result) for result in results)
        tensors = tuple(each if isinstance(each, TensorInfo) else None for each in _flat(described))
        return Call(func._schema.name, func, tuple(arguments), tensors)

    def _describe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = self._numbers.setdefault(id(value), len(self._numbers))
            return TensorInfo(
                tuple(map(int, value.shape)), stride_of(value), value.dtype, number, self._memory(value)
            )
        if isinstance(value, (list, tuple)):
            return tuple(map(self._describe, value))
        return plain_value(value)


def _flat(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple) and not isinstance(value, TensorInfo):
            yield from _flat(value)
        else:
            yield value


def stride_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor; those of a contiguous one if it has none."""
    try:
        return tensor.stride()
    except RuntimeError:  # sparse tensors have none
        return contiguous_stride(tuple(map(int, tensor.shape)))
