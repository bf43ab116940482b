"""`annotate` as a decorator and as a context manager, under a real torch profiler."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

import instrument
from instrument.record.regions import dispatch
from tests.regions.annotated import Recorded, named, names


@instrument.annotate
def bare(a: int, b: int = 2, /, *rest: int, c: int = 3, **others: int) -> tuple[object, ...]:
    """The documentation."""
    return a, b, rest, c, others


class Model:
    @instrument.annotate
    def method(self) -> str:
        return "method"

    @instrument.annotate
    @classmethod
    def above_class(cls) -> str:
        return cls.__name__

    @classmethod
    @instrument.annotate
    def below_class(cls) -> str:
        return cls.__name__

    @instrument.annotate
    @staticmethod
    def above_static() -> str:
        return "static"

    @staticmethod
    @instrument.annotate
    def below_static() -> str:
        return "static"

    @property
    @instrument.annotate("getter")
    def below_property(self) -> str:
        return "property"

    @instrument.annotate("getter above")
    @property
    def above_property(self) -> str:
        """The documentation."""
        return "property"

    @instrument.annotate("cached")
    @functools.cached_property
    def cached(self) -> str:
        return "cached"


@instrument.annotate
class Whole:
    shared = 1

    def __init__(self) -> None:
        self.count = 0

    def public(self) -> int:
        return self._private()

    def _private(self) -> int:
        return 1

    @instrument.annotate("own name")
    def already(self) -> int:
        return 2

    @classmethod
    def make(cls) -> Whole:
        return cls()

    @staticmethod
    def static() -> int:
        return 3

    @property
    def size(self) -> int:
        return 4

    class Inner:
        def method(self) -> int:
            return 5


@instrument.annotate("prefix")
class Prefixed:
    def __call__(self) -> int:
        return 6


def test_bare_and_called(recorded: Recorded) -> None:
    """A region is named after the function or by the argument, and is recorded once per call."""
    events = recorded(lambda: (bare(1), named(), named()))
    assert names(events) == ["bare", "named", "named"]


def test_region_spans_the_call(recorded: Recorded) -> None:
    """The operators of the body lie inside the region."""

    @instrument.annotate("outer")
    def outer() -> None:
        with instrument.annotate("inner"):
            torch.ones(10)

    outer_event, inner_event = recorded(outer)
    assert outer_event["ts"] <= inner_event["ts"]
    assert outer_event["ts"] + outer_event["dur"] >= inner_event["ts"] + inner_event["dur"]


@pytest.mark.parametrize("recording", [False, True])
def test_arguments_pass_unchanged(recorded: Recorded, recording: bool) -> None:
    """Parameters and defaults of every kind are passed on as without the decorator."""

    def call() -> None:
        assert bare(1) == (1, 2, (), 3, {})
        assert bare(1, 5, 6, 7, c=8, d=9) == (1, 5, (6, 7), 8, {"d": 9})

    recorded(call) if recording else call()


def test_wrong_call() -> None:
    """A wrong call raises a TypeError that names the function itself."""
    with pytest.raises(TypeError, match=r"bare\(\) missing 1 required positional argument: 'a'"):
        bare()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"named\(\) takes 0 positional arguments but 1 was given"):
        named(1)  # type: ignore[call-arg]


def test_parameters_named_like_internals(recorded: Recorded) -> None:
    """Parameters may have the names that the wrapper uses internally."""

    @instrument.annotate("taken")
    def taken(recording: int, tracing: int = 2, *, leave: int = 3, _function_: int = 4) -> tuple[int, ...]:
        return recording, tracing, leave, _function_

    assert taken(1) == (1, 2, 3, 4)
    assert names(recorded(lambda: taken(0, leave=1))) == ["taken"]


def test_defaults_are_the_same_objects() -> None:
    """A mutable default stays shared between calls."""
    seen: list[int] = []

    @instrument.annotate
    def default(a: list[int] = seen, *, b: list[int] = seen) -> tuple[list[int], list[int]]:
        return a, b

    first, second = default()
    assert first is seen
    assert second is seen


def test_metadata_of_the_function() -> None:
    """Signature, name, documentation, module and kind match the original function."""
    assert inspect.signature(bare) == inspect.signature(bare.__wrapped__)
    assert (bare.__name__, bare.__qualname__, bare.__module__) == ("bare", "bare", __name__)
    assert inspect.getdoc(bare) == "The documentation."
    assert "return a, b, rest, c, others" in inspect.getsource(bare)
    assert Model.above_property.__doc__ == "The documentation."


def test_pickling() -> None:
    """An annotated function pickles by its qualified name."""
    assert pickle.loads(pickle.dumps(bare)) is bare


def test_class_members(recorded: Recorded) -> None:
    """Methods, class methods, static methods and properties work above and below the decorator."""
    model = Model()

    def call() -> list[str]:
        return [
            model.method(), model.above_class(), Model.below_class(), model.above_static(), Model.below_static(),
            model.below_property, model.above_property, model.cached, model.cached,
        ]  # fmt: skip

    assert call() == ["method", "Model", "Model", "static", "static", "property", "property", "cached", "cached"]
    del model.__dict__["cached"]
    assert names(recorded(call)) == [
        "Model.method", "Model.above_class", "Model.below_class", "Model.above_static", "Model.below_static",
        "getter", "getter above", "cached",
    ]  # fmt: skip


def test_public_methods_of_a_class(recorded: Recorded) -> None:
    """The public methods of a class are annotated; private, inherited and already annotated ones are not."""

    def call() -> None:
        whole = Whole.make()
        assert (whole.public(), whole.already(), whole.static(), whole.size) == (1, 2, 3, 4)
        assert whole.Inner().method() == 5
        assert Prefixed()() == 6

    assert names(recorded(call)) == ["Whole.make", "Whole.public", "own name", "Whole.static", "prefix.__call__"]


def test_other_callables(recorded: Recorded) -> None:
    """Built-in functions and partial objects can be annotated."""
    length = instrument.annotate("len")(len)
    partial = instrument.annotate("partial")(functools.partial(pow, 2))
    bound = instrument.annotate([3, 1].index)
    assert names(recorded(lambda: (length([1]), partial(3), bound(1)))) == ["len", "partial", "list.index"]
    assert (length([1]), partial(3), bound(1)) == (1, 8, 1)


def test_coroutine(recorded: Recorded) -> None:
    """A coroutine's region lasts while it runs, awaits included, and the function stays a coroutine function."""

    @instrument.annotate("fetch")
    async def fetch(value: int) -> int:
        await asyncio.sleep(0.02)
        return value

    assert inspect.iscoroutinefunction(fetch)
    assert asyncio.run(fetch(3)) == 3
    (event,) = recorded(lambda: asyncio.run(fetch(3)))
    assert event["name"] == "fetch"
    assert event["dur"] > 15_000


def test_generator(recorded: Recorded) -> None:
    """A generator keeps send, throw and its return value; its region ends when it is exhausted or closed."""

    @instrument.annotate("numbers")
    def numbers() -> Iterator[Any]:
        got = yield 1
        try:
            yield got
        except ValueError:
            yield "caught"
        return "result"

    def use() -> None:
        generator = numbers()
        assert inspect.isgenerator(generator)
        assert (next(generator), generator.send("sent"), generator.throw(ValueError())) == (1, "sent", "caught")
        with pytest.raises(StopIteration) as stop:
            next(generator)
        assert stop.value.value == "result"

    use()
    assert inspect.isgeneratorfunction(numbers)
    assert names(recorded(use)) == ["numbers"]

    def close() -> None:
        generator = numbers()
        next(generator)
        generator.close()
        torch.ones(1)

    (event,) = recorded(close)
    assert event["dur"] < 10_000_000


def test_async_generator(recorded: Recorded) -> None:
    """An async generator keeps asend, athrow and aclose."""
    closed = []

    @instrument.annotate("stream")
    async def stream() -> AsyncIterator[Any]:
        try:
            got = yield 1
            try:
                yield got
            except ValueError:
                yield "caught"
        finally:
            closed.append(True)

    async def use() -> None:
        items: Any = stream()
        assert await items.asend(None) == 1
        assert await items.asend("sent") == "sent"
        assert await items.athrow(ValueError()) == "caught"
        await items.aclose()
        assert [item async for item in stream()] == [1, None]
        with pytest.raises(KeyError):
            items = stream()
            await items.asend(None)
            await items.athrow(KeyError())

    asyncio.run(use())
    assert inspect.isasyncgenfunction(stream)
    assert names(recorded(lambda: asyncio.run(use()))) == ["stream"] * 3
    assert closed == [True] * 6


def test_context_managers(recorded: Recorded) -> None:
    """`with` and `async with` nest, and one object may be entered again inside itself."""
    again = instrument.annotate("again")

    async def both() -> None:
        async with instrument.annotate("async"):
            with again, again:
                await asyncio.sleep(0)

    def use() -> None:
        asyncio.run(both())
        with contextlib.ExitStack() as stack:
            stack.enter_context(instrument.annotate("first"))
            stack.enter_context(instrument.annotate("second"))

    use()
    assert names(recorded(use)) == ["async", "again", "again", "first", "second"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_exceptions_close_the_region(recorded: Recorded, error: type[BaseException]) -> None:
    """An exception propagates unchanged and ends the region."""

    @instrument.annotate("failing")
    def failing() -> None:
        with instrument.annotate("inside"):
            raise error("as raised")

    def use() -> None:
        with pytest.raises(error, match="as raised"):
            failing()
        with instrument.annotate("after"):
            pass

    inside, after = recorded(use)[1:]
    assert (inside["name"], after["name"]) == ("inside", "after")
    assert after["ts"] >= inside["ts"] + inside["dur"]


def test_names_that_json_escapes(recorded: Recorded) -> None:
    """The trace stays readable with quotes, backslashes and control characters in a name."""

    def use() -> None:
        for name in ('say "hi"', "C:\\temp", "tab\tnewline\n", "", "naïve 模型 🔥", "\udcff"):
            with instrument.annotate(name):
                pass

    assert names(recorded(use)) == [
        "say 'hi'", "C:/temp", "tab newline ", "", "naive U+6A21U+578B U+1F525", "?",
    ]  # fmt: skip


def test_recursion_and_threads(recorded: Recorded) -> None:
    """One object can be entered at several levels and by many threads at once."""
    shared = instrument.annotate("shared")

    @instrument.annotate("level")
    def descend(depth: int) -> int:
        return descend(depth - 1) + 1 if depth else 0

    assert names(recorded(lambda: descend(3))) == ["level"] * 4

    def work() -> None:
        for _ in range(200):
            with shared, shared:
                descend(2)

    emitters: list[weakref.ref[Any]] = []

    def spread() -> None:
        emitters.append(weakref.ref(dispatch.current))
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()

    assert len(recorded(spread)) == 200 * (2 + 3)  # the profiler records only the thread that started it
    gc.collect()
    assert emitters[0]() is None  # an entry that is not closed would have it
