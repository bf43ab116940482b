"""Live detection: the levels log, warn and error, steps, budgets and sampling."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import instrument
from instrument.base.config import settings
from instrument.base.errors import SyncError
from instrument.explain.waits.events import SyncEvent
from instrument.syncs import coverage, monitor
from instrument.syncs.budget import Budget
from instrument.syncs.live import SyncDetector, detect_syncs, no_syncs
from instrument.syncs.policy import allow_sync
from tests.support.gpu_waits import Gpu, gpu, here, shown, state

__all__ = ["gpu"]


@pytest.mark.native
def test_level_error(gpu: Gpu) -> None:
    """At level "error" a call raises as it returns, with the user's line; explicit ones, before they start."""
    line = here() + 3
    with pytest.raises(SyncError) as raised, detect_syncs("error") as syncs:
        gpu.configure(ms=5.0)
        gpu.x.item()
    text = (
        f"test_live_levels.py:{line}: `gpu.x.item()` makes the CPU wait for the GPU (item: waits for the work of a"
    )
    assert text in str(raised.value)
    assert [("item", 1)] == [(found.op, found.timed) for found in syncs.findings]

    called = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda: called.append(1))
        with pytest.raises(SyncError, match=r"torch\.cuda\.synchronize\(\)"), detect_syncs("error") as syncs:
            torch.cuda.synchronize()
    assert ([], [1]) == (called, [found.count for found in syncs.findings])


@pytest.mark.native
def test_error_is_raised_once(gpu: Gpu) -> None:
    """One synchronization raises one error under several detectors, and none when they end."""
    with detect_syncs("error") as syncs:
        for _ in range(2):
            with no_syncs(), pytest.raises(SyncError) as raised, detect_syncs("error"):
                gpu.x.item()
        assert raised.value.__context__ is None
    assert [2] == [found.count for found in syncs.findings]


@pytest.mark.native
def test_error_without_a_torch_warning(gpu: Gpu) -> None:
    """An error that cannot be raised at the call is raised at the next call, the next step or the end."""
    gpu.configure(what="event", warn=False)
    syncs = detect_syncs("error")
    syncs.start()
    gpu.x.item()
    with pytest.raises(SyncError, match=r"gpu\.x\.item\(\)"):
        syncs.step()
    gpu.x.cpu()
    with pytest.raises(SyncError, match=r"gpu\.x\.cpu\(\)"):
        torch.cuda.synchronize()
    gpu.x.tolist()
    with pytest.raises(SyncError, match=r"gpu\.x\.tolist\(\)"):
        syncs.stop()
    syncs.stop()
    with pytest.raises(SyncError, match=r"gpu\.x\.item\(\)"), no_syncs():
        gpu.x.item()


@pytest.mark.native
def test_level_warn(gpu: Gpu) -> None:
    """At level "warn" each line gives one warning, with its call site."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with detect_syncs("warn"):
            line = here() + 2
            for _ in range(3):
                gpu.x.item()
            torch.cuda.synchronize()
            with allow_sync("checked"):
                gpu.x.cpu()
    assert [(__file__, line + 0), (__file__, line + 1)] == [(found.filename, found.lineno) for found in seen]
    assert all("makes the CPU wait for the GPU" in str(found.message) for found in seen)


@pytest.mark.native
def test_level_log(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    """At level "log" each finding is logged once, at the end."""
    caplog.set_level(logging.INFO, logger="instrument")
    with detect_syncs("log"):
        gpu.x.item()
        gpu.x.item()
        with allow_sync("checked"):
            gpu.x.cpu()
        assert [] == caplog.messages
    assert 2 == len(caplog.messages)
    assert all(re.search(r"sync\.found \(at=.*:\d+, op=item, count=1, seconds=", m) for m in caplog.messages)


@pytest.mark.native
def test_log_is_limited(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    """Many findings are summarized."""
    code = compile("def f(x):\n" + "    x.item()\n" * 25, "<made>", "exec")
    scope: dict[str, Any] = {}
    exec(code, scope)
    gpu.configure(ms=0.0)
    with detect_syncs():
        scope["f"](gpu.x)
    assert 21 == len(caplog.messages)
    assert "lines=5" in caplog.messages[-1]


@pytest.mark.native
def test_no_syncs(gpu: Gpu) -> None:
    """A synchronization inside `no_syncs` raises; `allow_sync` permits it inside, but not around the block."""

    @no_syncs()
    def step(*, allowed: bool) -> None:
        if allowed:
            with allow_sync("checked"):
                gpu.x.item()
        else:
            gpu.x.item()

    for _ in range(2):
        step(allowed=True)
        with allow_sync("outside"), pytest.raises(SyncError, match=r"gpu\.x\.item.*no_syncs"):
            step(allowed=False)
    gpu.x.item()
    with detect_syncs("log") as syncs, pytest.raises(SyncError), no_syncs():
        gpu.x.cpu()
    assert [("cpu", True)] == [(found.op, found.forbidden) for found in syncs.findings]


@pytest.mark.parametrize("kind", ["async def f(): pass", "def f(): yield", "async def f(): yield", "f = 3"])
def test_no_syncs_refuses_generators_and_coroutines(kind: str) -> None:
    """Decorating a coroutine or generator function, which could not be checked, fails at once."""
    scope: dict[str, Any] = {}
    exec(kind, scope)
    with pytest.raises(TypeError, match="no_syncs decorates plain functions"):
        no_syncs()(scope["f"])


@pytest.mark.native
def test_no_syncs_applies_to_its_block_only(gpu: Gpu) -> None:
    """After a `no_syncs` block nothing is forbidden, and the enclosing detector keeps its own level."""
    with detect_syncs("log") as syncs:
        with no_syncs():
            pass
        gpu.x.item()
    assert [False] == [found.forbidden for found in syncs.findings]


@pytest.mark.native
def test_explicit_steps(gpu: Gpu) -> None:
    """Steps are counted by `step()`; calls after the last one are outside steps."""
    with detect_syncs(every=1) as syncs:
        for _ in range(5):
            gpu.x.item()
            gpu.x.item()  # twice in a step
            syncs.step()
        gpu.x.cpu()
    report = syncs.report
    assert 5 == report.steps
    by_op = {(found.op, found.site.line if found.site else 0): found for found in report.findings}
    assert [0.0, 1.0, 1.0] == sorted(report.per_step(found) for found in by_op.values())
    item = next(found for found in report.findings if found.op == "item")
    assert {0: 1, 1: 1, 2: 1, 3: 1, 4: 1} == dict(item.steps)


def training(gpu: Gpu, steps: int, after: Callable[[], None] = lambda: None) -> None:
    """Run a loop with two optimizers that reads its loss after each step."""
    parameter = torch.nn.Parameter(torch.ones(1))
    first, second = (torch.optim.SGD([parameter], lr=0.1) for _ in range(2))
    for _ in range(steps):
        parameter.sum().backward()
        first.step()
        second.step()
        gpu.x.item()
        after()


@pytest.mark.native
def test_optimizer_steps(gpu: Gpu) -> None:
    """Without `step()`, a step lasts from one step of the first optimizer to the next."""
    with detect_syncs(every=1) as syncs:
        gpu.x.cpu()
        training(gpu, 5)
    report = syncs.report
    item, cpu = sorted(report.findings, key=lambda found: -found.count)
    assert (4, 5, 1.0) == (report.steps, item.count, report.per_step(item))
    assert (1, 0.0) == (cpu.count, report.per_step(cpu))
    with detect_syncs(every=1) as syncs:
        training(gpu, 5, after=lambda: syncs.step())
    report = syncs.report
    assert (5, 1.0) == (report.steps, report.per_step(report.findings[0]))


@pytest.mark.native
@pytest.mark.parametrize("explicit", [True, False])
def test_sampled_steps(gpu: Gpu, explicit: bool) -> None:
    """On steps that are not sampled, only the step counter is installed."""
    clean = state()
    installed = []
    with detect_syncs(every=4) as syncs:

        def after() -> None:
            installed.append(state() != clean)
            if explicit:
                syncs.step()

        training(gpu, 14, after)
    sampled = [0, 1, 2, 4, 8, 12] if explicit else [0, 1, 3, 7, 11]  # counted from 1 after the optimizer's step
    assert sampled == [index for index, armed in enumerate(installed) if armed]
    report = syncs.report
    (item,) = report.findings
    assert 1.0 == report.per_step(item)
    assert any(f"{report.steps} steps were checked" in sentence for sentence in report.coverage)


@pytest.mark.native
def test_regions_across_samples(gpu: Gpu) -> None:
    """A region that stays open across sampled and unsampled steps is known in each sample."""
    with detect_syncs(every=4) as syncs, instrument.annotate("train"):
        for _ in range(10):
            with instrument.annotate("step"):
                gpu.x.item()
            syncs.step()
    assert {("train", "step"): 5} == dict(syncs.findings[0].regions)


@pytest.mark.native
def test_budget_at_each_level(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    """Exceeding a budget is logged, warned about or raised at once, according to the level."""

    def loop(syncs: SyncDetector, count: int) -> None:
        for _ in range(3):
            with instrument.annotate("train"), instrument.annotate("step"):
                for _ in range(count):
                    gpu.x.item()
            syncs.step()

    for level in ("error", "warn"):
        for budget in (2, {"train/step": 2}, {"step": 2}, {"train": 2}):
            with detect_syncs(level, budget=budget) as syncs:
                loop(syncs, 2)
            expected = pytest.raises(SyncError) if level == "error" else pytest.warns(UserWarning)
            with expected as raised, detect_syncs(level, budget=budget) as syncs:
                loop(syncs, 3)
            text = str(raised.value if level == "error" else raised[0].message)  # type: ignore[index, union-attr]
            assert "synchronizes 3 times; its budget is 2" in text
    with detect_syncs(budget=2) as syncs:
        loop(syncs, 2)
        assert [] == caplog.messages
        loop(syncs, 3)
        assert 1 == len(caplog.messages)
    with pytest.raises(SyncError), detect_syncs("error", budget={"elsewhere": 5}) as syncs:
        loop(syncs, 1)


@pytest.mark.native
def test_budget_of_a_region_that_never_ran(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    """A budget of a region that never ran is logged at the end, and fails; one of a region that ran does not."""
    for name, reason in (
        ("step", None),
        ("stpe", 'region "stpe" has a budget, but never ran; did you mean "step"?'),
    ):
        caplog.clear()
        with detect_syncs(budget={name: 1}) as syncs:
            with instrument.annotate("step"):
                gpu.x.item()
            syncs.step()
        assert reason == syncs.report.over()
        assert (reason is not None) == ("did you mean" in caplog.text)


@given(
    st.lists(st.sampled_from(["a", "b", "ab"]), max_size=5),
    st.lists(st.sampled_from(["a", "b", "ab"]), min_size=1, max_size=3),
)
def test_budget_of_a_region(path: list[str], named: list[str]) -> None:
    """A budget applies where its names are directly nested regions, at any depth."""
    matches = any(path[start : start + len(named)] == named for start in range(len(path)))
    budget = Budget({"/".join(named): 1})
    event = SyncEvent("item", "", region=tuple(path))
    assert (matches, None) == budget.count_sync(event)
    assert matches is (budget.count_sync(event)[1] is not None)
    budget.next_step()
    assert (matches, None) == budget.count_sync(event)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"level": "raise"}, ValueError, "\"level\" must be one of log, warn, error: 'raise'"),
        ({"every": 0}, ValueError, '"every" must be an integer >= 1: 0'),
        ({"every": 1.5}, TypeError, '"every" must be an integer >= 1: 1.5'),
        ({"every": True}, TypeError, '"every" must be an integer >= 1: True'),
        ({"every": 2, "budget": 1}, ValueError, '"every" must be 1 with a budget'),
        ({"every": 2, "level": "error"}, ValueError, '"every" must be 1 with a budget'),
        ({"budget": -1}, ValueError, '"budget" must be >= 0: -1'),
        ({"budget": True}, TypeError, '"budget" must be a number of synchronizations'),
        ({"budget": "2"}, TypeError, '"budget" must be a number of synchronizations'),
        ({"budget": {"step": 1.0}}, TypeError, '"budget" must be a number of synchronizations'),
        ({"budget": {1: 1}}, TypeError, '"budget" must name regions by strings: 1'),
        ({"budget": {"": 1}}, ValueError, "\"budget\" must name regions: ''"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    """Wrong arguments raise an error at once, which names the accepted values."""
    with pytest.raises(error, match=re.escape(text)):
        detect_syncs(**arguments)


@pytest.mark.skipif(bool(torch.version.cuda or torch.version.hip), reason="there may be a GPU")
def test_without_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    """Without a GPU one sentence says that nothing is detected and what to do, and nothing is installed."""
    with warnings.catch_warnings():
        torch.cuda.Stream, torch.cuda.Event  # noqa: B018
        before = dict(vars(torch.cuda)), warnings.filters, dict(vars(torch.Tensor))
        with detect_syncs("error") as syncs, no_syncs():
            assert before == (dict(vars(torch.cuda)), warnings.filters, dict(vars(torch.Tensor)))
            torch.ones(1).item()
            syncs.step()
    assert [] == syncs.findings
    (sentence,) = syncs.report.coverage
    assert "Torch can use no GPU" in sentence
    assert "instrument.dry_run" in sentence
    assert [f"instrument: {sentence[0].lower()}{sentence[1:-1]}"] == caplog.messages


@pytest.mark.native
def test_off(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With INSTRUMENT=0 nothing is installed."""
    monkeypatch.setattr(settings, "enabled", False)
    before = state()
    with detect_syncs("error") as syncs, no_syncs():
        assert before == state()
        gpu.x.item()
        syncs.step()
    assert ([], []) == (syncs.findings, caplog.messages)
    assert ["INSTRUMENT=0 turns everything off: synchronizations are not detected."] == syncs.report.coverage


@pytest.mark.native
def test_internal_errors_are_contained(gpu: Gpu, lenient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an internal error the program continues, and everything is restored."""

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(monitor, "operation_at", fail)
        with detect_syncs("error"), no_syncs():
            gpu.x.item()
            str(torch.ones(1))
    with monkeypatch.context() as patch:
        patch.setattr(monitor, "patches", fail)
        before = state()
        with detect_syncs("error"), no_syncs():
            assert before == state()
            gpu.x.item()


@pytest.fixture
def compiling(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable detection while torch's compiler sees no GPU."""
    monkeypatch.setattr(coverage, "reason_unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch._dynamo.reset()


def compile_counter() -> Any:
    """Return a torch.compile backend that counts graphs."""
    from torch._dynamo.testing import CompileCounter

    return CompileCounter()


@pytest.mark.native
def test_compiled_code_is_not_recompiled(compiling: None) -> None:
    """Code compiled before is not compiled again, and code compiled inside has no graph break."""
    counter = compile_counter()

    @functools.partial(torch.compile, backend=counter, fullgraph=True)
    def compiled(x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        buffer.copy_(x)
        return x.to(torch.float64) + buffer.to(torch.float64)

    @functools.partial(torch.compile, backend=counter, fullgraph=True)
    def inside(x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        buffer.copy_(x, non_blocking=True)
        with no_syncs():
            return hot(x.to("cpu", non_blocking=True).cpu() * buffer.to(torch.float64))

    @no_syncs()
    def hot(x: torch.Tensor) -> torch.Tensor:
        return x * 1

    x, buffer = torch.ones(3), torch.zeros(3)
    expected = compiled(x, buffer)
    assert 1 == counter.frame_count
    with detect_syncs() as syncs:
        assert torch.equal(expected, compiled(x, buffer))
        assert torch.equal(torch.ones(3, dtype=torch.float64), inside(x, buffer))
        assert 2 == counter.frame_count
    compiled(x, buffer)
    inside(x, buffer)
    with detect_syncs():
        compiled(x, buffer)
        inside(x, buffer)
    assert 2 == counter.frame_count
    assert [] == syncs.findings


@pytest.mark.native
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_synchronizations_between_graphs(compiling: None, gpu: Gpu) -> None:
    """Synchronizations between the graphs of a function are found at their lines, without another graph break."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        gpu.x.item()
        x = x.to("cpu", torch.float64) * 2
        print(x)
        f"{x.sum()}"
        return helper(x) * 3

    @torch._dynamo.disable(recursive=False)  # type: ignore[untyped-decorator]
    def helper(x: torch.Tensor) -> torch.Tensor:
        gpu.x.cpu()
        return torch.zeros(3).copy_(x)

    counts = []
    for armed in (False, True):
        torch._dynamo.reset()
        counter = compile_counter()
        compiled = torch.compile(broken, backend=counter)
        with detect_syncs() if armed else contextlib.nullcontext() as syncs:
            compiled(torch.ones(3))
            compiled(torch.ones(3))
        counts.append((counter.frame_count, counter.op_count))
    assert counts[0] == counts[1]
    line = broken.__code__.co_firstlineno
    assert [("item", line + 2, 2), ("cpu", line + 10, 2)] == shown(syncs.findings)


@pytest.mark.native
def test_compiled_step_with_its_optimizer(compiling: None) -> None:
    """A compiled step that includes its optimizer is not compiled again because of the step counter."""
    counter = compile_counter()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @functools.partial(torch.compile, backend=counter)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    def step() -> None:
        forward(torch.ones(2, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    count = counter.frame_count
    with detect_syncs(every=2) as syncs:
        for _ in range(6):
            step()
    step()
    assert (count, []) == (counter.frame_count, syncs.findings)


def test_import_without_torch() -> None:
    """Importing `instrument.syncs.live` does not import torch."""
    code = "import sys, instrument.syncs.live; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_inside_a_dry_run(caplog: pytest.LogCaptureFixture) -> None:
    """Inside a dry run live detection is off; forbidden synchronizations are in the dry run's report."""
    sentences: list[str] = []

    def step() -> None:
        with detect_syncs("error") as syncs, no_syncs():
            torch.ones(2, device="cuda").sum().item()
        sentences.extend(syncs.report.coverage)

    report = instrument.dry_run(step)
    assert (None, [("item", True)]) == (report.error, [(found.op, found.forbidden) for found in report.findings])
    assert (["A dry run is in progress, and lists the synchronizations itself."], []) == (
        sentences,
        caplog.messages,
    )
