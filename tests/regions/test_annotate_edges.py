"""`annotate` when windows open inside a region, with wrong arguments, copies, threads and limits."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import pickle
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import instrument
from instrument.record.regions import dispatch
from instrument.record.regions.torch_emitters import TorchProfilerEmitter
from tests.regions.annotated import Recorded, names


def child(code: str, **variables: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path), **variables})


def test_window_opens_or_closes_in_a_region(recorded: Recorded) -> None:
    """A region is recorded if the profiler ran when it was entered, otherwise not at all."""
    straddling = instrument.annotate("straddling")
    with straddling:
        assert names(recorded(lambda: None)) == []

    def leave_open() -> weakref.ref[Any]:
        straddling.__enter__()
        return weakref.ref(dispatch.current)

    held: list[weakref.ref[Any]] = []
    assert names(recorded(lambda: held.append(leave_open()))) == ["straddling"]
    with straddling:  # not recorded; the earlier one is still open, and has its emitter
        pass
    gc.collect()
    assert held[0]() is not None
    straddling.__exit__()
    gc.collect()
    assert held[0]() is None


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
    before = repr(gc.get_referents(idle))
    with idle:
        assert before == repr(gc.get_referents(idle))
    assert before == repr(gc.get_referents(idle))
    assert not dispatch.recording


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"message": 3}, r'"message" must be a string, or the object to decorate: 3'),
        ({"message": "x", "color": "no such color"}, r'"color" must be an integer.*: \'no such color\''),
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


@pytest.mark.process
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


@pytest.mark.process
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

    emitters: list[weakref.ref[Any]] = []

    def use() -> None:
        emitters.append(weakref.ref(dispatch.current))
        iterator = items()
        next(iterator)
        thread = threading.Thread(target=lambda: list(iterator))
        thread.start()
        thread.join()

    assert names(recorded(use)) == ["shared"]
    gc.collect()
    assert emitters[0]() is None  # an entry that is not closed would have it


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
