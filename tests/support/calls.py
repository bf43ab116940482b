"""The tree of module calls, forward and backward, found without the library.

`Calls` replaces ``nn.Module.__call__``. For the backward it finds the calls in which each node of the autograd
graph was created, by a search for new nodes after every torch function, and hooks the start and end of each node.
The backward of a call goes from the start of the first of its nodes that runs to the end of the last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.support.ranges import Range, outline

T = TypeVar("T")


@dataclass(frozen=True)
class Trees:
    """The calls and nodes of a step, as text.

    Attributes:
        regions: the calls and their backwards.
        nodes: the same with the autograd nodes in the order in which they ran, without those of leaves.
    """

    regions: str
    nodes: str


@dataclass
class Span:
    """A call and its backward, if any; moments are counted in events."""

    name: str
    start: int
    end: int = -1
    first: int | None = None
    last: int | None = None


class Calls:
    """A context that records the calls of the modules of ``model``."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name or type(module).__name__ for name, module in model.named_modules()}
        self._moment = 0
        self._stack: list[Span] = []
        self._spans: list[Span] = []
        self._ran: list[Span] = []  # nodes
        self._known: set[Any] = set()  # nodes; kept alive, so that each stays one object
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> Calls:
        original, calls = nn.Module.__call__, self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return calls._call(lambda: original(module, *args, **kwargs), module, (args, kwargs))

        self._contexts.enter_context(mock.patch.object(nn.Module, "__call__", call))
        self._contexts.enter_context(Functions(self.look))
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.__exit__(*error)

    def steps(self, batches: Iterable[T], into: list[Trees]) -> Iterator[T]:
        """Yield each of ``batches``, and append the calls until the next one to ``into``."""
        for batch in batches:
            self._spans.clear()
            self._ran.clear()
            self._known.clear()
            yield batch
            into.append(self._trees())

    def look(self, values: object) -> None:
        """Record new nodes among those behind the tensors in ``values``."""
        with torch._C.DisableTorchFunction():
            pending = [tensor.grad_fn for tensor in _tensors(values)]
            while pending:
                node = pending.pop()
                if (
                    node is None or node in self._known or hasattr(node, "variable")
                ):  # a leaf's node belongs to no call
                    continue
                self._known.add(node)
                self._follow(node, tuple(self._stack))
                pending += [following for following, _ in node.next_functions]

    def _call(self, call: Callable[[], Any], module: nn.Module, inputs: object) -> Any:
        if module not in self._names:
            return call()
        self.look(inputs)  # nodes made outside torch functions, as by an autograd function, are new
        span = Span(self._names[module], self._tick())
        self._spans.append(span)
        self._stack.append(span)
        try:
            output = call()
            self.look(output)
            return output
        finally:
            self._stack.remove(span)
            span.end = self._tick()

    def _follow(self, node: Any, inside: tuple[Span, ...]) -> None:
        ran = Span(node.name(), -1)

        def before(_: object) -> None:
            ran.start = self._tick()
            self._ran.append(ran)
            for span in inside:
                span.first = ran.start if span.first is None else span.first

        def after(*_: object) -> None:
            ran.end = self._tick()
            for span in inside:
                span.last = ran.end

        node.register_prehook(before)
        node.register_hook(after)

    def _tick(self) -> int:
        self._moment += 1
        return self._moment

    def _trees(self) -> Trees:
        found: list[Range] = []
        for order, span in enumerate(self._spans):
            found.append(self._range(span.name, span.start, span.end, order))
            if span.first is not None and span.last is not None:
                found.append(self._range(f"{span.name} (backward)", span.first, span.last, order))
        ran = [self._range(node.name, node.start, node.end, len(self._spans)) for node in self._ran]
        return Trees(outline(nested(found)), outline(nested(found + ran)))

    def _range(self, name: str, start: int, end: int, order: int) -> Range:
        # Of ranges that begin or end at one moment, the outer one, which has the lower order, is made longer.
        most = len(self._spans) + 1
        return Range(name, start * 2 * most + order, (end * 2 + 1) * most - order, "push_pop", 0, 0)


class Functions(TorchFunctionMode):
    """A context that passes the arguments and results of every torch function to ``look``."""

    def __init__(self, look: Callable[[object], None]) -> None:
        super().__init__()
        self._look = look

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.backward:
            with self:  # modules may be called inside
                return torch.autograd.backward(args[0])
        result = function(*args, **(kwargs or {}))
        self._look((result, args, kwargs))
        return result


def nested(ranges: list[Range]) -> list[Range]:
    """Return ``ranges`` of one thread; fail if one overlaps the end of another."""
    around: list[Range] = []
    for current in sorted(ranges, key=lambda r: (r.start, -r.end)):
        while around and around[-1].end <= current.start:
            around.pop()
        if around and around[-1].end < current.end:
            raise AssertionError(f"{current.name!r} begins in {around[-1].name!r} and ends after it")
        around.append(current)
    return ranges


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
