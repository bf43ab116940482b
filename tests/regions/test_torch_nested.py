"""Regions that overlap, in a recording that has a GPU: its lane shows no region that is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.autograd.profiler import emit_nvtx
from torch.profiler import ProfilerActivity, profile

from instrument import annotate, compat
from instrument.regions.emitters.torch_nested import NestedTorchProfilerEmitter
from instrument.regions.region import Region, make
from tests.conftest import annotations

THREADS = 2


class Ids:
    """What torch and CUPTI do: a stack of ids on each thread, of which the end of any range pops the last."""

    def __init__(self) -> None:
        self.stacks: dict[int, list[list[Any]]] = {}
        self.entered = 0

    def enter(self, name: str, *_: Any) -> list[Any]:
        record = [name, get_ident()]
        self.entered += 1
        self.stacks.setdefault(get_ident(), []).append(record)
        return record

    def exit(self, record: list[Any]) -> None:
        assert record[1] == get_ident(), "ended on another thread than it began on"
        assert self.stacks[get_ident()].pop() is record, "ended out of order"

    def names(self, thread: int) -> list[str]:
        return [name for name, _ in self.stacks.get(thread, [])]


def region(name: str) -> Region:
    return make(name, None, None, None, None)


@pytest.fixture
def ids(monkeypatch: pytest.MonkeyPatch) -> Ids:
    """The ids that regions push, in place of torch's own functions."""
    ids = Ids()
    monkeypatch.setattr(torch.autograd, "_record_function_with_args_enter", lambda *args: ids.enter(*args))
    monkeypatch.setattr(torch.autograd, "_record_function_with_args_exit", lambda record: ids.exit(record))
    return ids


@pytest.fixture
def nested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every recording keep the order that one of a GPU needs."""
    monkeypatch.setattr(compat, "stacks_ranges", lambda profiler: True)


@pytest.fixture
def threads() -> Iterator[list[Callable[..., Any]]]:
    """Functions that call another one, each on a thread of its own."""
    pools = [ThreadPoolExecutor(1) for _ in range(THREADS)]
    yield [lambda call, *args, pool=pool: pool.submit(call, *args).result() for pool in pools]
    for pool in pools:
        pool.shutdown()


# Which thread opens a region of which name; or which thread closes one, counted among those that are open.
opening = st.tuples(st.just("open"), st.integers(0, THREADS - 1), st.sampled_from("abc"))
closing = st.tuples(st.just("close"), st.integers(0, THREADS - 1), st.integers(0, 5))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(opening | closing, max_size=25))
def test_any_order(ids: Ids, threads: list[Callable[..., Any]], steps: list[tuple[str, int, Any]]) -> None:
    """Ranges end innermost first, on their own thread; a thread has those of its open regions, in their order."""
    emitter = NestedTorchProfilerEmitter()
    idents = [call(get_ident) for call in threads]
    regions: list[tuple[int, str, Any]] = []  # that are open, with the threads that opened them
    for what, at, which in steps:
        if what == "open":
            regions.append((at, which, threads[at](emitter.start, region(which))))
        elif regions:
            *_, handle = regions.pop(which % len(regions))
            threads[at](emitter.end, handle)
        else:
            continue
        assert ids.names(idents[at]) == [name for thread, name, _ in regions if thread == at]
    for at, _, handle in reversed(regions):
        threads[at](emitter.end, handle)
    for call in threads:  # one that another thread ended may be left, up to the next range
        call(lambda: emitter.end(emitter.start(region("last"))))
    assert not any(ids.stacks.values())


def test_in_order(ids: Ids) -> None:
    """Nested regions take one range each."""
    emitter = NestedTorchProfilerEmitter()
    for _ in range(3):
        handles = [emitter.push(region(name)) for name in "abc"]
        for handle in reversed(handles):
            emitter.pop(handle)
    assert ids.entered == 9


def test_after_the_recording(ids: Ids) -> None:
    """Regions that outlive their recording end with it, and leave those of the next one alone."""
    emitter = NestedTorchProfilerEmitter()
    outer, inner = emitter.push(region("outer")), emitter.push(region("inner"))
    NestedTorchProfilerEmitter.end_all()
    assert not ids.names(get_ident())
    following = NestedTorchProfilerEmitter()
    handle = following.push(region("next"))
    emitter.pop(outer)
    emitter.pop(inner)
    assert ids.names(get_ident()) == ["next"]
    following.pop(handle)
    assert ids.entered == 3


def overlapping() -> None:
    outer, inner = annotate("outer"), annotate("inner")
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)


def generators() -> None:
    @annotate("outer")
    def outer() -> Generator[int]:
        yield 1

    @annotate("inner")
    def inner() -> Generator[int]:
        yield from (1, 2)

    first, second = outer(), inner()
    next(first), next(second)
    assert next(first, None) is None
    second.close()


def tasks() -> None:
    async def task(name: str, opened: asyncio.Event, go_on: asyncio.Event) -> None:
        async with annotate(name):
            opened.set()
            await go_on.wait()

    async def main() -> None:
        one, two, three = asyncio.Event(), asyncio.Event(), asyncio.Event()
        outer = asyncio.create_task(task("outer", one, two))
        await one.wait()
        inner = asyncio.create_task(task("inner", two, three))
        await outer
        three.set()
        await inner

    asyncio.run(main())


@pytest.mark.usefixtures("nested")
@pytest.mark.parametrize("run", [overlapping, generators, tasks])
def test_a_recording(recorded: Callable[..., list[dict[str, Any]]], run: Callable[[], None]) -> None:
    """What is inside of a region that ends first is shown in two ranges, which touch the end of that."""
    outer, first, second = recorded(run)
    assert [outer["name"], first["name"], second["name"]] == ["outer", "inner", "inner"]
    assert outer["ts"] <= first["ts"]
    assert first["ts"] + first["dur"] <= outer["ts"] + outer["dur"] <= second["ts"]


def test_which_recordings() -> None:
    """One of the CPU alone shows every region in one range; one with a GPU, or into NVTX, keeps the order."""
    found = torch.autograd.profiler.profile(use_kineto=True)
    assert not compat.stacks_ranges(found)
    found.kineto_activities.add(ProfilerActivity.CUDA)
    assert compat.stacks_ranges(found)
    assert compat.stacks_ranges(emit_nvtx())
    assert compat.stacks_ranges(None)


@pytest.mark.gpu
def test_the_lane_of_a_gpu(tmp_path: Path) -> None:
    """A kernel shows under the region that is open, and no more under one that ended around it."""
    x = torch.ones(1024, device="cuda")
    work = [x.sin, x.cos, x.exp, x.sigmoid]
    for operator in work:
        operator()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        for _ in range(20):
            x.neg()  # the first kernels of a recording may be missing
        outer, inner = annotate("outer"), annotate("inner")
        outer.__enter__()
        inner.__enter__()
        work[0]()
        outer.__exit__(None, None, None)
        work[1]()
        inner.__exit__(None, None, None)
        work[2]()
        with annotate("last"):
            work[3]()
        torch.cuda.synchronize()
    trace = tmp_path / "trace.json"
    prof.export_chrome_trace(str(trace))
    lane = annotations(trace, "gpu_user_annotation")
    shown = []
    for kernel in annotations(trace, "kernel")[-len(work) :]:
        middle = kernel["ts"] + kernel["dur"] / 2
        shown.append([event["name"] for event in lane if 0 < middle - event["ts"] < event["dur"]])
    assert shown == [["inner"], ["inner"], [], ["last"]]
