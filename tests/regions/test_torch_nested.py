"""Overlapping regions in a recording with a GPU: the GPU's lane never shows a region that has ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
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

import instrument
from instrument import annotate
from instrument.base.compat import profilers
from instrument.base.trace_marks import OVERLAPPING
from instrument.record.exporters.torch_profiler import TorchProfilerExporter
from instrument.record.regions import torch_emitters
from instrument.record.regions.region import Region, make
from instrument.record.regions.torch_emitters import NestedTorchProfilerEmitter
from tests.conftest import annotations
from tests.windows.training import traces

THREADS = 2


class Ids:
    """A model of torch and CUPTI: each thread has a stack of ids, and the end of any range pops the top one.

    Attributes:
        stacks: for each thread, the names of the ranges whose ids are on its stack.
        open: the names of the ranges that have begun and not ended.
        entered: the number of ranges by name.
        operations: the number of begins and ends.
    """

    def __init__(self) -> None:
        self.stacks: dict[int, list[str]] = {}
        self.open: Counter[str] = Counter()
        self.entered: Counter[str] = Counter()
        self.operations = 0
        self._enter, self._exit = profilers.range_functions()

    def enter(self, name: str, *shown: Any) -> list[Any]:
        self.operations += 1
        self.entered[name] += 1
        self.open[name] += 1
        self.stacks.setdefault(get_ident(), []).append(name)
        return [name, get_ident(), self._enter(name, *shown)]

    def exit(self, record: list[Any]) -> None:
        name, thread, opened = record
        assert thread == get_ident(), "ended on another thread than it began on"
        record.clear()  # a second end would need it
        self.operations += 1
        self.open -= Counter([name])
        self.stacks[thread].pop()
        self._exit(opened)

    def top(self, thread: int | None = None) -> str | None:
        """Return the name under which a kernel launched now on ``thread`` (by default this one) shows."""
        stack = self.stacks.get(thread or get_ident())
        return stack[-1] if stack else None

    def left(self) -> int:
        """Return the number of ids that are on a stack."""
        return sum(map(len, self.stacks.values()))


def region(name: str) -> Region:
    return make(name, None, None, None, None)


@pytest.fixture
def ids(monkeypatch: pytest.MonkeyPatch) -> Ids:
    """Record the ids that regions push; torch's own functions are still called."""
    ids = Ids()
    monkeypatch.setattr(torch.autograd, "_record_function_with_args_enter", lambda *args: ids.enter(*args))
    monkeypatch.setattr(torch.autograd, "_record_function_with_args_exit", lambda record: ids.exit(record))
    return ids


@pytest.fixture
def nested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every recording keep the order that a GPU requires."""
    monkeypatch.setattr(profilers, "needs_nested_ranges", lambda profiler: True)


@contextlib.contextmanager
def threads() -> Iterator[list[Callable[..., Any]]]:
    """Return functions that each call a function on their own thread."""
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(THREADS)]
        yield [lambda call, *args, pool=pool: pool.submit(call, *args).result() for pool in pools]


class Model:
    """A model of the regions of one thread, as documented.

    Attributes:
        open: in order of opening; true if an enclosing region has already ended.
        late: regions ended by another thread since this thread last opened or closed one.
        crossings: the number of regions that ended before one opened inside them.
    """

    def __init__(self) -> None:
        self.open: dict[str, bool] = {}
        self.late: list[str] = []
        self.crossings = 0

    def begin(self, name: str) -> None:
        self.apply_late_ends()
        self.open[name] = False

    def end(self, name: str) -> None:
        if [*self.open][-1] != name:
            self.apply_late_ends()
        self._end(name)
        self.apply_late_ends()

    def apply_late_ends(self) -> None:
        while self.late:
            self._end(self.late.pop(0))

    def _end(self, name: str) -> None:
        names = [*self.open]
        inside = names[names.index(name) + 1 :]
        del self.open[name]
        self.open.update(dict.fromkeys(inside, True))
        self.crossings += bool(inside)

    def expected(self) -> set[str | None]:
        """Return the names under which a kernel launched now may show."""
        if not self.open:
            return {None}
        innermost, crossed = [*self.open.items()][-1]
        return {*self.open, OVERLAPPING} if crossed else {innermost}


# The thread that opens a region, or closes one of its own ("close") or of all open ones ("close any").
step = st.tuples(st.sampled_from(["open", "close", "close any"]), st.integers(0, THREADS - 1), st.integers(0, 5))


class Run:
    """Open and close regions on threads, and compare the ids of torch and CUPTI after each change."""

    def __init__(self, threads: list[Callable[..., Any]]) -> None:
        self.ids = Ids()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_emitters, "range_functions", lambda: (self.ids.enter, self.ids.exit))
            self.emitter = NestedTorchProfilerEmitter()
        self.threads = threads
        self.models = [Model() for _ in threads]
        self.regions: list[tuple[int, str, Any]] = []  # open regions, with the threads that opened them
        self.made = 0

    def open(self, at: int) -> None:
        self.made += 1
        name = f"{self.made}"
        self.regions.append((at, name, self.threads[at](self.emitter.start, region(name))))
        self.models[at].begin(name)

    def close(self, by: int, opened: tuple[int, str, Any]) -> None:
        self.regions.remove(opened)
        thread, name, handle = opened
        self.threads[by](self.emitter.end, handle)
        if thread == by:
            self.models[by].end(name)
            assert not self.ids.open[name]
        else:
            self.models[thread].late.append(name)
            self.models[by].apply_late_ends()

    def check(self, at: int) -> None:
        thread = self.threads[at](get_ident)
        assert self.ids.top(thread) in self.models[at].expected()
        assert len(self.ids.stacks.get(thread, [])) == 0 or self.models[at].open


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(step, max_size=40))
def test_any_order(steps: list[tuple[str, int, int]]) -> None:
    """A kernel shows under its innermost region; if regions overlap, under another open one or the filler.

    Each region is one range from its begin to its end, no range stays open, and the cost is linear.
    """
    with threads() as calls:
        run = Run(calls)
        for what, at, which in steps:
            candidates = [opened for opened in run.regions if what == "close any" or opened[0] == at]
            if what == "open":
                run.open(at)
            elif candidates:
                run.close(at, candidates[which % len(candidates)])
            else:
                continue
            run.check(at)
        for opened in reversed(run.regions.copy()):
            run.close(opened[0], opened)
        for at in range(THREADS):  # regions ended by another thread stay open up to the next range
            run.open(at)
            run.close(at, run.regions[-1])
            assert not calls[at](
                lambda: torch_emitters._thread_state.stack.needs_cleanup
            )  # back to the cheap path
    ids = run.ids
    assert not ids.left()
    assert not +ids.open
    fillers = ids.entered.pop(OVERLAPPING, 0)
    assert ids.entered == Counter(f"{number}" for number in range(1, run.made + 1))
    assert fillers <= sum(model.crossings for model in run.models)
    assert ids.operations == 2 * (run.made + fillers)


def test_nested_regions(ids: Ids) -> None:
    """Each nested region is exactly one range."""
    emitter = NestedTorchProfilerEmitter()
    for _ in range(3):
        handles = [emitter.push(region(name)) for name in "abc"]
        for handle in reversed(handles):
            emitter.pop(handle)
    assert ids.operations == 2 * 9


def test_regions_that_outlive_the_recording(ids: Ids) -> None:
    """Regions that outlive their recording end with it and do not affect the next recording."""
    emitter = NestedTorchProfilerEmitter()
    outer, inner = emitter.push(region("outer")), emitter.push(region("inner"))
    NestedTorchProfilerEmitter.end_all()
    assert not ids.left()
    following = NestedTorchProfilerEmitter()
    handle = following.push(region("next"))
    emitter.pop(outer)
    emitter.pop(inner)
    assert ids.stacks[get_ident()] == ["next"]
    following.pop(handle)
    assert ids.entered == Counter(["outer", "inner", "next"])
    assert ids.operations == 2 * 3


def test_overlapping_regions_that_outlive_the_recording(ids: Ids) -> None:
    """Regions whose ids were already popped, and fillers, end with the recording as well."""
    emitter = NestedTorchProfilerEmitter()
    outer, inner = emitter.start(region("outer")), emitter.start(region("inner"))
    emitter.end(outer)
    assert ids.top() == OVERLAPPING
    NestedTorchProfilerEmitter.end_all()
    assert not +ids.open
    following = NestedTorchProfilerEmitter()
    handle = following.push(region("next"))
    emitter.end(inner)
    assert ids.stacks[get_ident()] == ["next"]
    following.pop(handle)
    assert not +ids.open


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
def test_overlapping_regions_in_a_trace(
    recorded: Callable[..., list[dict[str, Any]]], run: Callable[[], None]
) -> None:
    """Each region is one range of the right length, and a filler replaces the range that ended first."""
    outer, inner, filler = recorded(run)
    assert [outer["name"], inner["name"], filler["name"]] == ["outer", "inner", OVERLAPPING]
    ends = [event["ts"] + event["dur"] for event in (outer, inner, filler)]
    assert outer["ts"] <= inner["ts"] <= ends[0] <= filler["ts"]
    assert ends[0] <= ends[1] <= ends[2]


@pytest.mark.usefixtures("nested")
def test_many_tasks(ids: Ids, recorded: Callable[..., list[dict[str, Any]]]) -> None:
    """Each region of many interleaved tasks is one range; at most one filler is added for each."""
    count = 500

    async def task() -> None:
        async with annotate("request"):
            await asyncio.sleep(0)
            with annotate("decode"):
                await asyncio.sleep(0)
                with annotate("launch"):
                    assert ids.top() == "launch"
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*(task() for _ in range(count)))

    found = Counter(event["name"] for event in recorded(lambda: asyncio.run(main())))
    fillers = found.pop(OVERLAPPING)
    assert found == {"request": count, "decode": count, "launch": count}
    assert fillers <= 2 * count
    assert ids.operations == 2 * (3 * count + fillers)
    assert not ids.left()


@pytest.mark.usefixtures("nested")
def test_region_across_steps(ids: Ids, tmp_path: Path) -> None:
    """The region and each step are one range each; a kernel outside other regions shows under its step."""
    shown = []
    schedule = instrument.schedule(wait=0, warmup=0, active=5, repeat=1)
    with instrument.profile(tmp_path, schedule=schedule) as prof, contextlib.ExitStack() as stack:
        shown.append(ids.top())
        stack.enter_context(annotate("epoch"))
        shown.append(ids.top())
        prof.step()
        shown.append(ids.top())
        with annotate("forward"):
            shown.append(ids.top())
        shown.append(ids.top())
        prof.step()
        shown.append(ids.top())
        stack.close()
        shown.append(ids.top())
        prof.step()
        shown.append(ids.top())
        prof.step()
        shown.append(ids.top())
        prof.step()
    step = [f"ProfilerStep#{number}" for number in range(5)]
    assert shown == [step[0], "epoch", step[1], "forward", step[1], step[2], OVERLAPPING, step[3], step[4]]
    assert ids.entered == Counter([*step, "epoch", "forward", OVERLAPPING])
    assert not ids.left()
    found = {event["name"]: event for event in annotations(traces(tmp_path)[0])}
    epoch, third = found["epoch"], found[step[2]]
    assert third["ts"] <= epoch["ts"] + epoch["dur"] <= third["ts"] + third["dur"]


@pytest.mark.usefixtures("nested")
def test_window_ends_inside_a_region(ids: Ids, tmp_path: Path) -> None:
    """The last step ends before a region that is still open, without a filler; no range stays open."""
    schedule = instrument.schedule(wait=0, warmup=0, active=2, repeat=1)
    with instrument.profile(tmp_path, schedule=schedule) as prof:
        with annotate("epoch"):
            prof.step()
            prof.step()
            assert not +ids.open
        assert not +ids.open
    assert ids.entered == Counter(["ProfilerStep#0", "epoch", "ProfilerStep#1"])


@pytest.mark.usefixtures("nested")
def test_last_step(ids: Ids) -> None:
    """The step ends at ``step(None)``; no filler covers the time after it, which belongs to no step."""
    capture = TorchProfilerExporter({}).capture()
    capture.start()
    capture.step(1)
    with annotate("epoch"):
        capture.step(None)
        assert [*+ids.open] == ["epoch"]
        capture.step(2)
        assert ids.top() == "ProfilerStep#2"
        capture.step(None)
    assert not +ids.open
    capture.stop()
    assert ids.entered == Counter(["ProfilerStep#1", "epoch", "ProfilerStep#2"])


def test_recordings_that_need_nested_ranges() -> None:
    """A CPU-only recording needs no nested ranges; one with a GPU, or into NVTX, does."""
    found = torch.autograd.profiler.profile(use_kineto=True)
    assert not profilers.needs_nested_ranges(found)
    found.kineto_activities.add(ProfilerActivity.CUDA)
    assert profilers.needs_nested_ranges(found)
    assert profilers.needs_nested_ranges(emit_nvtx())
    assert profilers.needs_nested_ranges(None)


def lanes(path: Path, work: int) -> list[list[str]]:
    """Return the names under which each of the last kernels shows on the GPU's lane."""
    lane = annotations(path, "gpu_user_annotation")
    shown = []
    for kernel in annotations(path, "kernel")[-work:]:
        middle = kernel["ts"] + kernel["dur"] / 2
        shown.append([event["name"] for event in lane if 0 < middle - event["ts"] < event["dur"]])
    return shown


def loaded_operators() -> list[Callable[[], torch.Tensor]]:
    """Return operators whose kernels are loaded; the first is launched several times."""
    x = torch.ones(1024, device="cuda")
    operators = [x.neg, x.sin, x.cos, x.exp, x.sigmoid]
    for operator in operators:
        operator()
    torch.cuda.synchronize()
    return operators


@pytest.mark.gpu
def test_lane_of_a_gpu(tmp_path: Path) -> None:
    """A kernel shows under the open region, or under the filler if that region's id was popped."""
    first, *work = loaded_operators()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        for _ in range(20):
            first()  # the first kernels of a recording may be missing
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
    assert lanes(trace, len(work)) == [["inner"], [OVERLAPPING], [], ["last"]]


@pytest.mark.gpu
def test_steps_on_the_lane_of_a_gpu(tmp_path: Path) -> None:
    """A kernel outside its step's regions shows under the step, even while a region across steps is open."""
    first, *work = loaded_operators()
    schedule = instrument.schedule(wait=0, warmup=0, active=3, repeat=1)
    with instrument.profile(tmp_path, schedule=schedule) as prof:
        for _ in range(20):
            first()
        with annotate("epoch"):
            work[0]()
            prof.step()
            work[1]()
        work[2]()
        prof.step()
        work[3]()
        prof.step()
    (trace,) = traces(tmp_path)
    assert lanes(trace, len(work)) == [["epoch"], ["ProfilerStep#1"], [OVERLAPPING], ["ProfilerStep#2"]]
