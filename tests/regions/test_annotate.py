"""`annotate` as a decorator and as a context manager, under a real torch profiler."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import pickle
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import instrument
from instrument.regions import dispatch
from instrument.regions.emitters.torch_profiler import TorchProfilerEmitter

Recorded = Callable[..., list[dict[str, Any]]]


def names(events: list[dict[str, Any]]) -> list[str]:
    return [event["name"] for event in events]


def child(code: str, **variables: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path), **variables})


@instrument.annotate
def bare(a: int, b: int = 2, /, *rest: int, c: int = 3, **others: int) -> tuple[object, ...]:
    """The documentation."""
    return a, b, rest, c, others


@instrument.annotate("named", color="green", category="compute", payload=1)
def named() -> int:
    return 1


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

    def spread() -> None:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()

    assert len(recorded(spread)) == 200 * (2 + 3)  # the profiler records only the thread that started it
    assert shared._open == {}


def test_window_opens_or_closes_in_a_region(recorded: Recorded) -> None:
    """A region is recorded if the profiler ran when it was entered, otherwise not at all."""
    straddling = instrument.annotate("straddling")
    with straddling:
        assert names(recorded(lambda: None)) == []

    def leave_open() -> None:
        straddling.__enter__()

    assert names(recorded(leave_open)) == ["straddling"]
    with straddling:  # not recorded; the earlier one is still open
        pass
    assert len(straddling._open) == 1
    straddling.__exit__()
    assert straddling._open == {}


def test_entered_on_two_threads_around_the_window_start(recorded: Recorded) -> None:
    """Leaving a block that was entered before the recording does not close another thread's range."""
    shared = instrument.annotate("shared")
    entered, leave = threading.Event(), threading.Event()

    def wait_inside() -> None:
        with shared:
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=wait_inside)
    thread.start()
    entered.wait(10)

    def use() -> None:
        with shared:
            leave.set()
            thread.join()
            with instrument.annotate("still inside"):
                pass

    outer, inner = recorded(use)
    assert outer["ts"] + outer["dur"] >= inner["ts"] + inner["dur"]


def test_idle_context_manager() -> None:
    """Without a profiler, a with block does not change its object."""
    idle = instrument.annotate("idle")
    with idle:
        pass
    assert idle._open == {}
    assert not dispatch.recording


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"message": 3}, r'"message" must be a string, or what is to be decorated: 3'),
        ({"message": "x", "color": "no such colour"}, r'"color" must be an integer.*: \'no such colour\''),
        ({"message": "x", "color": 1.5}, r'"color" must be a string or an integer: 1.5'),
        ({"message": "x", "color": -1}, r'"color" must be within 0 .. 0xFFFFFFFF: -1'),
        ({"message": "x", "domain": 1}, r'"domain" must be a string: 1'),
        ({"message": "x", "category": 1.5}, r'"category" must be a string or an integer: 1.5'),
        ({"message": "x", "payload": "1"}, r'"payload" must be a number, or numbers in a list.*: \'1\''),
    ],
)
def test_wrong_attributes(arguments: dict[str, Any], message: str) -> None:
    """A wrong argument raises at the call, with its name and value."""
    with pytest.raises((TypeError, ValueError), match=message):
        instrument.annotate(**arguments)


def test_wrong_use() -> None:
    """Objects that cannot be decorated, and with blocks without a name, raise an error that says what to do."""
    with pytest.raises(TypeError, match="for other code use"):
        instrument.annotate("x")(3)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="for other code use"):
        instrument.annotate(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r'with instrument.annotate\("name"\)'), instrument.annotate():
        pass


def test_mark(recorded: Recorded) -> None:
    """An instant shows as a range of almost no length."""
    (event,) = recorded(lambda: instrument.mark("checkpoint written"))
    assert event["name"] == "checkpoint written"
    instrument.mark("no profiler")
    with pytest.raises(TypeError, match='"message" must be a string: 3'):
        instrument.mark(3)  # type: ignore[arg-type]


def test_off() -> None:
    """Under INSTRUMENT=0, the decorator returns the same object and context managers do nothing."""
    code = """
import instrument, sys
def function(): pass
class Thing:
    def method(self): pass
method = Thing.__dict__["method"]
assert instrument.annotate(function) is function
assert instrument.annotate("x", color="red")(function) is function
assert instrument.annotate(Thing) is Thing and Thing.__dict__["method"] is method
with instrument.annotate("x"): instrument.mark("y")
assert not {"torch", "nvtx", "wrapt"} & set(sys.modules), sys.modules
"""
    child(code, INSTRUMENT="0")


def test_torch_imported_later() -> None:
    """Functions decorated before torch is imported are recorded, and are traced by torch.compile."""
    code = """
import sys, instrument
@instrument.annotate("early")
def early(x): return x + 1
assert "torch" not in sys.modules
early(1)
import torch
from torch.profiler import profile
with profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
    early(1)
assert [e.name for e in prof.events()] == ["early"], prof.events()
assert torch.compile(early, fullgraph=True, backend="eager")(torch.ones(2)).tolist() == [2, 2]
"""
    child(code)


def test_first_annotation_under_a_profiler() -> None:
    """The first annotation of a process is recorded if a torch profiler is running."""
    code = """
import instrument, torch
from torch.profiler import profile
with profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
    with instrument.annotate("late"): pass
with instrument.annotate("after"): pass
assert [e.name for e in prof.events()] == ["late"], prof.events()
"""
    child(code)


def test_attributes_of_other_decorators(recorded: Recorded) -> None:
    """A function's attributes are kept, except those that would make torch.compile mistake the wrapper for it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = torch.compile(function, backend="eager")
    compiled.note = "kept"
    outside = instrument.annotate("outside")(compiled)
    assert outside.note == "kept"
    assert not [name for name in vars(outside) if name.startswith("_torchdynamo")]
    x = torch.ones(2)
    outside(x)

    def run() -> None:
        with profile(activities=[ProfilerActivity.CPU]):
            outside(x)

    run()
    assert "outside" in names(recorded(lambda: outside(x)))


def test_bound_methods() -> None:
    """A model whose forward is annotated on the instance copies and pickles as before."""
    model = Scale()
    model.forward = instrument.annotate("forward")(model.forward)  # type: ignore[method-assign]
    copied = copy.deepcopy(model)
    copied.by = 3
    assert (model.forward(2), copied.forward(2)) == (2, 6)
    assert pickle.loads(pickle.dumps(model.forward))(2) == 2


class Scale:
    def __init__(self) -> None:
        self.by = 1

    def forward(self, x: int) -> int:
        return x * self.by


def test_copying_and_pickling(recorded: Recorded) -> None:
    """A context manager that an object holds is copied and pickled with it, also after it was entered."""
    kept = instrument.annotate("kept", color="red")

    def use() -> None:
        with kept:
            for copied in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
                with copied:
                    pass

    assert names(recorded(use)) == ["kept"] * 3


def test_generator_based_coroutine() -> None:
    """The result of `types.coroutine` can still be awaited."""

    @instrument.annotate("old")
    @types.coroutine
    def old() -> Iterator[None]:
        yield
        return 3

    async def use() -> int:
        return await old()

    assert asyncio.run(use()) == 3


def test_generator_resumed_on_another_thread(recorded: Recorded) -> None:
    """A block in a generator that resumes on another thread closes the range that it opened."""
    shared = instrument.annotate("shared")

    def items() -> Iterator[int]:
        with shared:
            yield 1
            yield 2

    def use() -> None:
        iterator = items()
        next(iterator)
        thread = threading.Thread(target=lambda: list(iterator))
        thread.start()
        thread.join()

    assert names(recorded(use)) == ["shared"]
    assert shared._open == {}


def test_wrong_call_of_an_async_generator(recorded: Recorded) -> None:
    """Arguments that do not match the signature raise before the region opens."""

    @instrument.annotate("stream")
    async def stream(a: int) -> AsyncIterator[int]:
        yield a

    async def use() -> None:
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            await stream().__anext__()  # type: ignore[call-arg, attr-defined]

    assert names(recorded(lambda: asyncio.run(use()))) == []


def test_recursion_limit(recorded: Recorded) -> None:
    """Annotations keep working after a program hits the recursion limit and handles the error."""

    @instrument.annotate("down")
    def down() -> None:
        down()

    def deeper(frames: int) -> None:
        deeper(frames - 1) if frames else down()

    def use() -> None:
        for frames in range(8):  # meets the limit at each of the library's frames
            with contextlib.suppress(RecursionError):
                deeper(frames)
        with instrument.annotate("after"):
            pass

    assert names(recorded(use))[-1] == "after"


@pytest.mark.parametrize("payload", [True, numpy.int64(3), numpy.float32(2.5), [1, 2], (1.5,), range(3), b"x"])
def test_payloads(recorded: Recorded, payload: object) -> None:
    """Numbers of any type and sequences of them are accepted, as by nvtx.annotate."""
    assert names(recorded(instrument.annotate("paid", payload=payload)(lambda: None))) == ["paid"]


def test_torch_jit() -> None:
    """Annotated functions can be scripted and traced."""
    scripted = torch.jit.script(scriptable)
    assert scripted(torch.ones(2)).tolist() == scriptable(torch.ones(2)).tolist() == [2, 2]
    assert torch.jit.trace(scriptable, torch.ones(2))(torch.ones(2)).tolist() == [2, 2]


@instrument.annotate
def scriptable(x: torch.Tensor) -> torch.Tensor:
    return torch.add(x, 1)


@pytest.mark.parametrize("error", [RecursionError, MemoryError])
def test_recursion_and_memory_errors(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """An emitter stays active after a RecursionError or MemoryError, which are not its fault."""
    real = TorchProfilerEmitter.push

    def push(self: TorchProfilerEmitter, named: Any) -> Any:
        if named.name == "at the limit":
            raise error
        return real(self, named)

    def use() -> None:
        for name in ("at the limit", "after"):
            with instrument.annotate(name):
                pass

    monkeypatch.setattr(TorchProfilerEmitter, "push", push)
    assert names(recorded(use)) == ["after"]


def test_stacklevel_of_warnings() -> None:
    """A warning's ``stacklevel`` does not count the wrapper, with or without a recording."""

    @instrument.annotate
    def old() -> None:
        warnings.warn("old", DeprecationWarning, stacklevel=2)

    @instrument.annotate
    def values() -> Iterator[int]:
        warnings.warn("old", DeprecationWarning, stacklevel=2)
        yield 1

    for recording in (contextlib.nullcontext(), profile()):
        with recording, warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            line = sys._getframe().f_lineno
            old()
            next(values())
        assert [(warning.filename, warning.lineno) for warning in found] == [
            (__file__, line + 1),
            (__file__, line + 2),
        ]
