"""Live detection through torch's callbacks and warnings, on a simulated GPU."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda import _gpu_trace as trace

import instrument
from instrument.base.errors import SyncError
from instrument.base.guard import guard
from instrument.explain.waits.events import Recorder
from instrument.syncs import monitor
from instrument.syncs.live import SyncDetector, detect_syncs, no_syncs
from instrument.syncs.policy import allow_sync
from tests.support.gpu_waits import Gpu, gpu, here, shown

__all__ = ["gpu"]

pytestmark = pytest.mark.native


def test_synchronizations_at_their_lines(gpu: Gpu) -> None:
    """A synchronization is found at the user's line, with its operation and count."""
    x = gpu.x
    with detect_syncs() as syncs:
        line = here()
        x.item()
        bool(x)
        x.cpu()
        torch.cuda.synchronize()
        f"{x}"
        x[0]
        for _ in range(3):
            x.tolist()
        if x:
            pass
    expected = ["item", "bool", "cpu", "synchronize", "format", "getitem", ("tolist", 8, 3), ("bool", 9, 1)]
    rows = [row if isinstance(row, tuple) else (row, index + 1, 1) for index, row in enumerate(expected)]
    assert [(op, line + offset, count) for op, offset, count in rows] == shown(syncs.findings)
    assert {test_synchronizations_at_their_lines.__name__} == {
        found.site.function for found in syncs.findings if found.site
    }
    assert {"MainThread"} == {found.thread for found in syncs.findings}


def test_blocked_time(gpu: Gpu) -> None:
    """Blocked time is measured for one synchronization, several in one call, and an explicit one."""
    gpu.configure(ms=5.0)
    with detect_syncs() as syncs:
        began = time.perf_counter_ns()
        gpu.x.item()
        took = time.perf_counter_ns() - began
        torch.cuda.synchronize()
        gpu.configure(ms=5.0, repeat=3)
        gpu.x.cpu()
    item, device, several = sorted(syncs.findings, key=lambda found: found.site.line if found.site else 0)
    assert 5_000_000 <= (item.blocked_ns or 0) <= took
    assert (device.blocked_ns or 0) >= 5_000_000
    assert ((several.blocked_ns or 0) >= 15_000_000, several.count, several.timed) == (True, 1, 1)


def test_warnings_of_other_vendors(gpu: Gpu) -> None:
    """The warnings of ROCm and other backends are recognized."""
    for vendor in ("HIP", "NPU"):
        gpu.configure(vendor=vendor)
        with detect_syncs() as syncs:
            gpu.x.item()
        assert [1] == [found.timed for found in syncs.findings]


def test_other_warnings_are_shown(gpu: Gpu) -> None:
    """Only torch's synchronization warning is intercepted; other warnings are shown."""
    with pytest.warns(UserWarning, match="^mine$") as seen, detect_syncs():
        gpu.x.item()
        warnings.warn("mine", stacklevel=1)
    assert 1 == len(seen)


@pytest.mark.parametrize("how", ["ignore", "filters", "reset", "error", "record", "replaced", "leave"])
def test_warning_filters_changed_inside(gpu: Gpu, how: str) -> None:
    """Each synchronization is seen and timed, however the program changes the warning filters."""
    catching = warnings.catch_warnings()
    if how == "leave":
        catching.__enter__()
    with detect_syncs() as syncs:
        if how == "leave":
            catching.__exit__(None, None, None)
            gpu.x.item()
        else:
            with warnings.catch_warnings(record=how == "record") as seen:
                if how in ("ignore", "error"):
                    warnings.simplefilter(how)  # type: ignore[arg-type]
                elif how == "filters":
                    warnings.filterwarnings("ignore", "called a synchronizing")
                elif how == "reset":
                    warnings.resetwarnings()
                elif how == "replaced":
                    warnings.filters = [("ignore", None, Warning, None, 0)]
                gpu.x.item()
            assert seen in (None, [])
        gpu.x.item()
    assert [(1, 1), (1, 1)] == [(found.count, found.timed) for found in syncs.findings]


def test_filters_set_inside_stay(gpu: Gpu) -> None:
    """Changes that the program makes to the warning filters inside the block stay."""
    before = warnings.filters
    with warnings.catch_warnings():
        held = warnings.filters
        with detect_syncs():
            warnings.filterwarnings("ignore", "something of the program's")
            gpu.x.item()
        assert held is warnings.filters
        assert "something of the program's" in {getattr(entry[1], "pattern", None) for entry in warnings.filters}
        assert "something of the program's" in {getattr(entry[1], "pattern", None) for entry in list(held)}
    assert before is warnings.filters


def test_filters_closed_after_the_detector(gpu: Gpu) -> None:
    """A `catch_warnings` that begins inside and ends after the block leaves no filter of the library."""
    expected = list(warnings.filters)
    original = warnings.filters
    detector, catching = detect_syncs(), warnings.catch_warnings()
    detector.start()
    catching.__enter__()
    warnings.simplefilter("ignore")
    detector.stop()
    assert [("ignore", None, Warning, None, 0), *expected] == list(warnings.filters)
    catching.__exit__(None, None, None)
    assert expected == list(warnings.filters)
    warnings.simplefilter("ignore")
    assert [("ignore", None, Warning, None, 0), *expected] == list(warnings.filters)
    warnings.filters = original


def test_torch_without_callbacks(gpu: Gpu) -> None:
    """If torch only warns afterwards, synchronizations are counted without a time."""
    gpu.configure(trace=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("instrument.base.compat.gpu.sync_callbacks", lambda: None)
        with detect_syncs() as syncs:
            line = here()
            gpu.x.item()
            gpu.x.item()
    assert [("item", line + 1, 1), ("item", line + 2, 1)] == shown(syncs.findings)
    assert [None, None] == [found.blocked_ns for found in syncs.findings]
    assert any("without a time" in sentence for sentence in syncs.report.coverage)


def test_synchronizations_without_a_warning(gpu: Gpu) -> None:
    """Synchronizations without a warning are counted, each without a time."""
    with detect_syncs() as syncs:
        gpu.configure(what="event", warn=False)
        for _ in range(3):
            gpu.x.item()
        gpu.configure(warn=False)
        gpu.x.cpu()
        gpu.x.tolist()
    assert [3, 1, 1] == [count for _, _, count in shown(syncs.findings)]
    assert {None} == {found.blocked_ns for found in syncs.findings}


def test_modules_name_their_arguments_as_they_like(gpu: Gpu) -> None:
    """Also as the parameters of the functions that stand around the calls of modules are named."""

    class Adapter(torch.nn.Module):
        def forward(self, *, module: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
            return module + original

    with detect_syncs(), instrument.annotate_step():
        assert Adapter()(module=torch.ones(()), original=torch.ones(())).item() == 2


def test_operators_of_torch_ops(gpu: Gpu) -> None:
    """A synchronization in an operator called through torch.ops gives no warning: it is counted, not timed."""
    scope: dict[str, Any] = {"operator": gpu.x.item}
    exec(compile("def call():\n    operator()", torch._ops.__file__, "exec"), scope)
    gpu.configure(warn=False)
    call = scope["call"]
    with detect_syncs() as syncs:
        for _ in range(3):
            call()
    (found,) = syncs.findings
    assert ("call", 3, None) == (found.op, found.count, found.blocked_ns)


def test_sync_debug_mode(gpu: Gpu) -> None:
    """Torch's mode is restored; mode "error" is never changed; a mode set inside stays."""
    for mode in (0, 1, 2):
        torch.cuda.set_sync_debug_mode(mode)
        with detect_syncs() as syncs:
            assert max(mode, 1) == torch.cuda.get_sync_debug_mode()
        assert mode == torch.cuda.get_sync_debug_mode()
        assert (mode == 2) is any("error" in sentence for sentence in syncs.report.coverage)
    torch.cuda.set_sync_debug_mode(0)
    with detect_syncs():
        torch.cuda.set_sync_debug_mode(2)
    assert 2 == torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(0)


def test_line_with_an_earlier_warning(gpu: Gpu) -> None:
    """A synchronization at a line whose warning Python already showed is still intercepted."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("default")
        for again in (False, True):
            with detect_syncs() if again else contextlib.nullcontext() as syncs:
                gpu.x.item()
    torch.cuda.set_sync_debug_mode("default")
    assert [1] == [found.timed for found in syncs.findings]
    globals().get("__warningregistry__", {}).clear()


def test_state_is_restored_after_an_error(gpu: Gpu) -> None:
    """An error of the program propagates unchanged, and everything is restored."""
    with pytest.raises(ZeroDivisionError), detect_syncs("error"):
        gpu.configure(warn=False)
        gpu.x.item()  # torch does not report the end of the call, so the error is due at the end
        raise ZeroDivisionError


def test_patches_of_others_stay(gpu: Gpu) -> None:
    """Patches that others put on top of the library's stay and keep working."""
    with pytest.MonkeyPatch.context() as patch:
        with detect_syncs() as syncs:
            wrapped = torch.cuda.synchronize
            replacement = lambda: wrapped()  # noqa: E731
            patch.setattr(torch.cuda, "synchronize", replacement)
            torch.cuda.synchronize()
        assert replacement is torch.cuda.synchronize
        torch.cuda.synchronize()
        assert [1] == [found.count for found in syncs.findings]
        patch.undo()
        assert wrapped is torch.cuda.synchronize
        torch.cuda.synchronize = wrapped.__wrapped__


def test_other_callbacks_stay(gpu: Gpu) -> None:
    """Callbacks of torch's CUDA sanitizer in the same registries are called and stay installed."""
    called: list[int] = []
    registry = trace.StreamSynchronizationCallbacks
    registry.add_callback(called.append)
    try:
        with detect_syncs():
            gpu.x.item()
        gpu.x.item()
        assert ([0, 0], [called.append]) == (called, registry.callback_list)
    finally:
        registry.callback_list.clear()


def test_detector_restarts(gpu: Gpu) -> None:
    """Each start drops the findings of the last run; a second start or stop has no effect."""
    syncs = detect_syncs()
    for count in (1, 2):
        syncs.start()
        syncs.start()
        for _ in range(count):
            gpu.x.item()
        assert count == syncs.findings[0].count
        syncs.stop()
        syncs.stop()
        gpu.x.item()
        assert [count] == [found.count for found in syncs.findings]


@pytest.mark.parametrize("inner_first", [True, False])
def test_nested_detectors(gpu: Gpu, inner_first: bool) -> None:
    """Each of two nested detectors records the synchronizations inside it, whichever ends first."""
    outer, inner = detect_syncs(), detect_syncs()
    outer.start()
    gpu.x.item()
    inner.start()
    gpu.x.cpu()
    first, second = (inner, outer) if inner_first else (outer, inner)
    first.stop()
    gpu.x.tolist()
    second.stop()
    expected = {"outer": ["item", "cpu"], "inner": ["cpu"]}
    expected["outer" if inner_first else "inner"].append("tolist")
    assert expected == {
        "outer": [op for op, _, _ in shown(outer.findings)],
        "inner": [op for op, _, _ in shown(inner.findings)],
    }


def test_other_threads(gpu: Gpu) -> None:
    """Concurrent synchronizations on several threads are found, each with its time."""
    gpu.configure(ms=5.0)

    def work() -> None:
        for _ in range(5):
            gpu.x.item()

    with detect_syncs() as syncs:
        threads = [threading.Thread(target=work, name="worker") for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (found,) = syncs.findings
    assert ("item", 20, 20, "worker") == (found.op, found.count, found.timed, found.thread)
    assert (found.blocked_ns or 0) >= 20 * 5_000_000


class SynchronizingIdentity(torch.autograd.Function):
    """Synchronizes in a backward pass written in Python."""

    gpu: Gpu

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        SynchronizingIdentity.gpu.x.item()
        return gradient


def test_backward_in_python(gpu: Gpu) -> None:
    """A synchronization in a user's Python backward is found at its line, with the node."""
    SynchronizingIdentity.gpu = gpu
    with detect_syncs() as syncs, instrument.annotate("train"):
        SynchronizingIdentity.apply(torch.ones(2, requires_grad=True)).sum().backward()
    (found,) = syncs.findings
    assert ("item", "SynchronizingIdentityBackward", 1, ("train",)) == (
        found.op,
        found.backward,
        found.timed,
        found.region,
    )
    assert found.site is not None
    assert "SynchronizingIdentity.gpu.x.item()" == found.site.code


class NestedBackward(torch.autograd.Function):
    """Calls backward within backward, so deeply that torch continues on another thread."""

    make: Callable[[torch.Tensor], torch.Tensor]

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.depth = depth
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            value = torch.ones(2, requires_grad=True)
            inner = NestedBackward.apply(value, ctx.depth - 1) if ctx.depth else NestedBackward.make(value)
            inner.sum().backward()
        return gradient, None


@pytest.mark.parametrize("depth", [None, 0, 70])
def test_backward_in_cpp(gpu: Gpu, depth: int | None) -> None:
    """A synchronization in a C++ node on any thread is found at the line that called backward, in its region."""
    NestedBackward.make = gpu.in_backward
    value = torch.ones(2, requires_grad=True)
    with detect_syncs() as syncs, instrument.annotate("train"):
        result = gpu.in_backward(value) if depth is None else NestedBackward.apply(value, depth)
        line = here() + 1
        result.sum().backward()
    (found,) = syncs.findings
    assert found.site is not None
    assert ("backward", 1, None, ("train",)) == (found.op, found.count, found.blocked_ns, found.region)
    assert "CppNode" in (found.backward or "")
    if depth is None:
        assert line == found.site.line
    else:
        assert "inner.sum().backward()" == found.site.code


def test_policy_applies_on_backward_threads(gpu: Gpu) -> None:
    """`allow_sync` and `no_syncs` around a backward pass apply on the threads that run it."""
    NestedBackward.make = gpu.in_backward
    result = NestedBackward.apply(torch.ones(2, requires_grad=True), 70)
    with no_syncs(), allow_sync("checked"):
        result.sum().backward()
    result = NestedBackward.apply(torch.ones(2, requires_grad=True), 70)
    with pytest.raises(SyncError, match=r"inner\.sum\(\)\.backward\(\)"), no_syncs():
        result.sum().backward()


def test_regions(gpu: Gpu) -> None:
    """A finding has the enclosing regions, outermost first."""
    with detect_syncs() as syncs, instrument.annotate("train"):
        for name in ("step", "step", "log"):
            with instrument.annotate(name):
                gpu.x.item()
    (found,) = syncs.findings
    assert {("train", "step"): 2, ("train", "log"): 1} == dict(found.regions)


def test_allowed(gpu: Gpu) -> None:
    """Synchronizations allowed by a block or at the line are listed separately."""
    with detect_syncs("error") as syncs:
        with allow_sync("logging"):
            gpu.x.item()
        gpu.x.cpu()  # instrument: allow-sync once in an epoch
    assert {"item": "logging", "cpu": "once in an epoch"} == {found.op: found.allowed for found in syncs.findings}
    assert [] == syncs.report.syncs


def test_explicit_synchronizations(gpu: Gpu) -> None:
    """Explicit synchronizations differ by their cause; each counts once, with any synchronization inside it."""
    event = torch.cuda.Event() if hasattr(torch._C, "_cuda_setDevice") else object.__new__(torch.cuda.Event)
    with detect_syncs() as syncs:
        torch.cuda.synchronize()
        event.synchronize()
        torch.cuda.empty_cache()
    causes = ["waits for all work of the device", "waits for an event, and the work before it", "frees memory"]
    rows = sorted(syncs.findings, key=lambda found: found.site.line if found.site else 0)
    assert ["synchronize", "synchronize", "empty_cache"] == [found.op for found in rows]
    assert [1, 1, 1] == [found.count for found in rows]
    assert all(found.cause.startswith(cause) for found, cause in zip(rows, causes, strict=True))


def test_pageable_copies(gpu: Gpu) -> None:
    """A non_blocking copy of pageable memory is detected from its arguments, as torch does not report it."""
    tensor, small = torch.ones(20_000), torch.ones(16_384)
    other = torch.ones(20_000, device="meta")
    with FakeTensorMode():
        fake = torch.ones(20_000)
    calls: list[Callable[[], Any]] = [
        lambda: tensor.to("cuda", non_blocking=True),
        lambda: tensor.to("cuda", torch.float16, True),
        lambda: tensor.to(device="cuda", non_blocking=True, copy=True),
        lambda: tensor.cuda(non_blocking=True),
        lambda: tensor.cuda(None, True),
    ]
    clean: list[Callable[[], Any]] = [
        lambda: small.to("cuda", non_blocking=True),
        lambda: tensor.to("cpu", non_blocking=True),
        lambda: tensor.to(torch.float16, True),
        lambda: tensor.to(tensor, non_blocking=True),
        lambda: torch.empty(20_000).copy_(tensor, True),
        lambda: torch.ones(0).to("cuda", non_blocking=True),
        lambda: tensor.to("cuda", non_blocking=False),
        lambda: tensor.to("cuda", torch.float16, False, True),
        lambda: other.to("cuda", non_blocking=True),
        lambda: fake.to("cuda", non_blocking=True),
    ]

    def tried(call: Callable[[], Any]) -> tuple[int, str | None, int | None]:
        with detect_syncs() as syncs, contextlib.suppress(AssertionError, RuntimeError):
            call()  # the copy itself needs a GPU
        found = syncs.findings
        return (len(found), found[0].direction, found[0].bytes) if found else (0, None, None)

    assert [(1, "H2D", 80_000)] * len(calls) == [tried(call) for call in calls]
    assert [(0, None, None)] * len(clean) == [tried(call) for call in clean]


def test_direction_and_size_of_copies(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocking copy has its direction and bytes."""
    wait = gpu.x.item

    class Slow(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") in ("to", "copy_"):
                wait()
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(5).as_subclass(Slow)
    with detect_syncs() as syncs:
        tensor.to(torch.float64)
        tensor.copy_(torch.ones(5, dtype=torch.float64))
    assert [("H2D", 20), ("H2D", 40)] == sorted((found.direction, found.bytes) for found in syncs.findings)


def test_printing_counts_once(gpu: Gpu) -> None:
    """Printing a tensor reads it many times, and counts as one synchronization with the total time."""
    gpu.configure(ms=2.0)
    scope: dict[str, Any] = {"item": gpu.x.item}
    source = "def read(*_, **__):\n    item()\n    item()\n    item()\n    return 'x'"
    exec(compile(source, torch._tensor_str.__file__, "exec"), scope)
    tensor = torch.ones(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._tensor_str, "_str", scope["read"])
        began = time.perf_counter_ns()
        with detect_syncs() as syncs:
            line = here()
            str(tensor)
            f"{tensor}"
            print(tensor)
        took = time.perf_counter_ns() - began
        with pytest.raises(SyncError, match="print"), no_syncs():
            print(tensor)
    assert [("format", line + 1, 1), ("format", line + 2, 1), ("print", line + 3, 1)] == shown(syncs.findings)
    assert all((found.blocked_ns or 0) >= 3 * 2_000_000 for found in syncs.findings)
    assert sum(found.blocked_ns or 0 for found in syncs.findings) < took


FILTER = ("ignore", None, UserWarning, None, 0)
CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "pop": lambda filters: (filters.insert(0, FILTER), filters.pop(0)),
    "del": lambda filters: (warnings.simplefilter("ignore", UserWarning), filters.__delitem__(0)),
    "last": lambda filters: (filters.append(FILTER), filters.pop()),
    "set": lambda filters: (filters.insert(0, FILTER), filters.__setitem__(0, FILTER), filters.pop(0)),
    "reverse": lambda filters: (filters.reverse(), filters.reverse()),
}


@pytest.mark.parametrize("how", CHANGES)
def test_filters_keep_their_index(gpu: Gpu, how: str) -> None:
    """Others find their filters at the index where they inserted them, and can remove them."""
    with warnings.catch_warnings():
        before = list(warnings.filters)
        with detect_syncs() as syncs:
            CHANGES[how](warnings.filters)  # type: ignore[arg-type]
            gpu.x.item()
        assert before == list(warnings.filters)
    assert [1] == [found.timed for found in syncs.findings]


@pytest.mark.parametrize("how", ["reverse", "sort"])
def test_filters_in_another_order(gpu: Gpu, how: str) -> None:
    """A filter that turns warnings into errors does not affect torch's synchronization warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with detect_syncs() as syncs:
            filters: Any = warnings.filters
            filters.reverse() if how == "reverse" else filters.sort(key=str)
            gpu.x.item()
    assert [1] == [found.timed for found in syncs.findings]


def test_reentered_detector(gpu: Gpu) -> None:
    """A detector entered again in its own block continues until the outer block ends, also after an error."""
    syncs = detect_syncs()
    with syncs:
        gpu.x.item()
        with syncs:
            gpu.x.cpu()
        gpu.x.tolist()
        with contextlib.suppress(ZeroDivisionError), syncs:
            raise ZeroDivisionError
        bool(gpu.x)
    gpu.x.nonzero()
    assert ["item", "cpu", "tolist", "bool"] == [op for op, _, _ in shown(syncs.findings)]


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Recorder, "add"), (SyncDetector, "check"), (monitor, "operation_at"), (monitor, "context_of")],
)
def test_internal_errors_do_not_reach_synchronizing_calls(
    gpu: Gpu, lenient: None, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """An error while recording a synchronization does not reach the call, the backward pass or the block's end."""

    def fail(*_: Any) -> None:
        raise MemoryError("for a wait")

    monkeypatch.setattr(owner, name, fail)
    SynchronizingIdentity.gpu = gpu
    before = guard.failures["recording a synchronization"]
    with detect_syncs():
        gpu.x.item()
        torch.cuda.synchronize()
        f"{gpu.x}"
        SynchronizingIdentity.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert guard.failures["recording a synchronization"] > before
