"""`StepFollower`: the sign that ends a step, and the change to a stronger sign."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import instrument
from instrument.base.compat import autograd
from instrument.read.jobs.read import read_trace
from instrument.record.modules.compiling import compiled_call
from instrument.record.stepping import follower
from instrument.record.stepping.follower import StepFollower
from instrument.record.stepping.outermost_model import OutermostModel

BEFORE = vars(nn.Module)["_compiled_call_impl"], torch.autograd.backward, torch.optim.Optimizer.__init__


def passes(model: nn.Module, count: int = 4) -> None:
    for _ in range(count):
        model(torch.ones(1, 2)).sum().backward()


def calls(model: nn.Module, count: int = 4) -> None:
    for _ in range(count):
        model(torch.ones(1, 2))


def without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        calls(model)


def evaluation_first(model: nn.Module) -> None:
    calls(model.eval())
    passes(model.train())


def accumulation(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        passes(model)
        optimizer.step()


def late_optimizer(model: nn.Module) -> None:
    passes(model)
    accumulation(model)


def never(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    passes(model)
    del optimizer


def compiled(model: nn.Module) -> None:
    step = torch.compile(torch.optim.SGD(model.parameters()).step, backend="eager")
    for _ in range(4):
        passes(model, 1)
        step()


def marked(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    prof = instrument.profile(Path("nowhere"), schedule=lambda step: 0)
    prof.start()
    for _ in range(3):
        passes(model)
        optimizer.step()
        prof.step()
    prof.stop()


@pytest.mark.parametrize(
    ("program", "step_on", "events", "by"),
    [
        (passes, None, "ssss", "backward"),
        (without_gradients, None, "ssss", "forward"),
        (lambda model: calls(model, 101), None, 101 * "s", "forward"),
        (lambda model: calls(model, 100), None, "", None),
        (evaluation_first, None, "ssssRssss", "backward"),
        (accumulation, None, "ss", "optimizer"),
        (accumulation, "backward", 8 * "s", "backward"),
        (accumulation, "forward", 8 * "s", "forward"),
        (late_optimizer, None, "ssssRss", "optimizer"),
        (never, None, "", None),
        (compiled, None, "ssss", "backward"),
        (marked, None, "sRsss", "program"),
    ],
)
def test_signs(program: Callable[[Any], None], step_on: str | None, events: str, by: str | None) -> None:
    """The strongest sign counts; if it appears late, the steps restart ("R")."""
    seen: list[str] = []
    follower = StepFollower(lambda: seen.append("s"), lambda: seen.append("R"), step_on)
    follower.follow()
    program(nn.Sequential(nn.Linear(2, 2)))
    follower.remove()
    assert (events, by) == ("".join(seen), follower.by)
    assert (
        vars(nn.Module)["_compiled_call_impl"],
        torch.autograd.backward,
        torch.optim.Optimizer.__init__,
    ) == BEFORE


@pytest.mark.parametrize(
    ("program", "missed", "steps"), [(lambda model: calls(model, 103), [101], 2), (compiled, [2], 2)]
)
def test_missed_steps(program: Callable[[Any], None], missed: list[int], steps: int) -> None:
    """Steps before their sign was known are reported in one call, apart from current steps."""
    seen: list[Any] = []
    follower = StepFollower(lambda: seen.append("s"), lambda: seen.append("R"), on_missed_steps=seen.append)
    follower.follow()
    program(nn.Sequential(nn.Linear(2, 2)))
    follower.remove()
    assert [*missed, *steps * "s"] == seen


@pytest.mark.parametrize("step_on", ["backward", "forward"])
def test_calls_on_another_thread(step_on: str) -> None:
    """Calls on another thread count only once the thread of the first calls has ended."""
    seen: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2))
    follower = StepFollower(lambda: seen.append("s"), lambda: seen.append("R"), step_on)
    follower.follow()

    def in_a_thread() -> None:
        thread = threading.Thread(target=passes, args=(model,))
        thread.start()
        thread.join()

    try:
        in_a_thread()
        passes(model)
        in_a_thread()
    finally:
        follower.remove()
    assert "".join(seen) == "ssssssss"


@pytest.mark.parametrize(("is_recording", "counted"), [(False, 1 + 10), (True, 1)])
def test_a_thread_that_calls_no_more(is_recording: bool, counted: int) -> None:
    """After 50 calls on another thread, those that follow count there, unless a window records."""
    seen: list[int] = []
    model = nn.Linear(2, 2).eval()
    follower = StepFollower(lambda: seen.append(1), int, "forward", is_recording=lambda: is_recording)
    follower.follow()
    try:
        model(torch.ones(1, 2))
        thread = threading.Thread(target=lambda: [model(torch.ones(1, 2)) for _ in range(60)])
        thread.start()
        thread.join()
    finally:
        follower.remove()
    assert counted == len(seen)


def test_calls_while_another_thread_counts_one() -> None:
    """Calls do not count, and do not wait, while another thread counts a step, as when that opens a window."""
    seen: list[str] = []
    model = nn.Linear(2, 2).eval()

    def on_step() -> None:
        seen.append("s")
        thread = threading.Thread(target=lambda: [model(torch.ones(1, 2)) for _ in range(60)])
        thread.start()
        thread.join(60)
        seen.append("ended" if not thread.is_alive() else "waits")

    follower = StepFollower(on_step, int, "forward")
    follower.follow()
    try:
        model(torch.ones(1, 2))
    finally:
        follower.remove()
    assert ["s", "ended"] == seen


@pytest.mark.parametrize("annotated_first", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_backward_pass_counts_once(annotated_first: bool, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass counts once, with any other patches around it and with or without its region."""
    monkeypatch.setattr(follower, "live_optimizers", lambda: [])  # hides optimizers of other tests
    seen: list[list[int]] = [[], []]
    handles: list[Any] = []

    def follow(steps: list[int]) -> None:
        handles.append(StepFollower(lambda: steps.append(1), lambda: None))
        handles[-1].follow()

    followers = [functools.partial(follow, steps) for steps in seen]
    annotate = [lambda: handles.append(instrument.annotate_step("backward"))]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        for call in (*annotate, *followers) if annotated_first else (*followers, *annotate):
            call()
        for _ in range(3):
            with instrument.annotate("backward") if named else contextlib.nullcontext():
                passes(nn.Sequential(nn.Linear(2, 2)), 1)
        with pytest.raises(RuntimeError):
            torch.ones(1).backward()
        passes(nn.Sequential(nn.Linear(2, 2)), 1)
    for handle in handles:
        handle.remove()
    assert [4, 4] == [len(steps) for steps in seen]
    assert torch.autograd.backward is BEFORE[1]


def one_step(model: nn.Module) -> None:
    with instrument.annotate("step"):
        passes(model, 1)


@pytest.mark.parametrize(
    ("step_on", "model"),
    [
        ("forward", nn.Sequential(nn.Linear(2, 2), nn.Tanh())),
        ("forward", nn.RNNCell(2, 2)),
        ("forward", nn.GRU(2, 2)),
        ("backward", nn.Sequential(nn.Linear(2, 2), nn.Tanh())),
        (f"{__name__}:one_step", nn.Linear(2, 2)),
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_step_ends_after_its_regions(step_on: str, model: nn.Module, tmp_path: Path) -> None:
    """No region of a recorded step extends into the next one."""
    handles = [instrument.annotate_modules(model), instrument.annotate_step()]
    prof = instrument.profile(tmp_path, schedule="2-4", activities=[torch.profiler.ProfilerActivity.CPU])
    follower = StepFollower(prof.step, lambda: None, step_on)
    follower.follow()
    with prof:
        for _ in range(6):
            if step_on == "forward":
                calls(model, 1)
            elif step_on == "backward":
                passes(model, 1)
            else:
                one_step(model)
    follower.remove()
    for handle in handles:
        handle.remove()
    (path,) = tmp_path.glob("window-0001/*.json.gz")
    trace = read_trace(path)
    ends = trace.steps.end_ns
    assert 3 == len(ends)
    assert {"step", type(model).__name__} & set(trace.regions.text("name"))
    for start, end in zip(trace.regions.start_ns, trace.regions.end_ns, strict=True):
        assert (start < ends).tolist() == (end <= ends).tolist()


@pytest.mark.parametrize("still_annotated", [True, False])
def test_interrupted_call(still_annotated: bool) -> None:
    """A call of the model that KeyboardInterrupt ends between two hooks never counts as a step."""
    seen: list[int] = []
    model, other, x = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Tanh()), torch.ones(1, 2)
    follower = StepFollower(lambda: seen.append(1), lambda: None, "forward")
    follower.follow()
    calls(model, 1)
    interrupts = iter([KeyboardInterrupt])

    def hook(*_: object) -> None:
        for error in interrupts:
            raise error

    model.register_forward_hook(hook)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with instrument.annotate_modules(other):
            handle = instrument.annotate_modules(model)
            with pytest.raises(KeyboardInterrupt):
                model(x)
            if not still_annotated:
                handle.remove()
                model(x)
            other(x)
            other(x)
        handle.remove()
    follower.remove()
    assert 1 + (not still_annotated) == len(seen)


def test_copied_and_compiled_model() -> None:
    """Copies and pickles of the model do not count, and its code is compiled once."""
    seen, graphs = [], []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    follower = StepFollower(lambda: seen.append(1), lambda: None)
    follower.follow()
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    calls(model, 1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        calls(other)
    assert len(seen) == 1
    fast = torch.compile(model, backend=backend)
    calls(fast)
    follower.remove()
    calls(fast)
    assert len(graphs) == 1
    assert not model._forward_hooks


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


@pytest.mark.parametrize("followed", [True, False])
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("step_on", ["forward", None])
def test_model_compiled_in_place(step_on: str | None, at: int, followed: bool) -> None:
    """With ``model.compile()``, before the first call or later, each call is a step, and it is compiled once."""
    backend, seen = CompileCounter(), []  # type: ignore[no-untyped-call]
    torch.compiler.reset()
    model = Scaled()
    follower = StepFollower(lambda: seen.append(1), lambda: None, step_on)
    if followed:
        follower.follow()
    try:
        for number in range(6):
            if number == at:
                model.compile(backend=backend)
                replacement = compiled_call(model)
            with torch.no_grad():
                assert model(torch.ones(1)) == 2
    finally:
        follower.remove()
    assert (len(seen), backend.frame_count) == (6 * followed, 1)
    assert vars(model)["_compiled_call_impl"] is replacement


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Scaled(), Scaled()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


Program = Callable[[torch.Tensor], torch.Tensor]


def after_a_compiled_function(model: nn.Module, backend: Any) -> Program:
    prepare = torch.compile(lambda x: x + 1, backend=backend)
    return lambda x: model(prepare(x))


def after_a_compiled_module(model: nn.Module, backend: Any) -> Program:
    prepare = torch.compile(nn.ReLU(), backend=backend)
    return lambda x: model(prepare(x))


def in_place_after_a_compiled_function(model: nn.Module, backend: Any) -> Program:
    model.compile(backend=backend)
    return after_a_compiled_function(model, backend)


def after_another_in_place(model: nn.Module, backend: Any) -> Program:
    Scaled().compile(backend=backend)
    model.compile(backend=backend)
    return model


def with_parts_compiled_in_place(model: nn.Module, backend: Any) -> Program:
    for part in model.parts:  # type: ignore[union-attr]
        part.compile(backend=backend)
    return model


def with_a_compiled_part(model: nn.Module, backend: Any) -> Program:
    model.parts[1] = torch.compile(model.parts[1], backend=backend)  # type: ignore[index]
    return model


def before_a_compiled_function(model: nn.Module, backend: Any) -> Program:
    loss = torch.compile(lambda x: x * 2, backend=backend)
    return lambda x: loss(model(x))


def also_in_a_compiled_function(model: nn.Module, backend: Any) -> Program:
    inlined = torch.compile(lambda x: model(x) * 2, backend=backend)
    return lambda x: model(x) + inlined(x)


def called_between_two_graphs(model: nn.Module, backend: Any) -> Program:
    forward = model.forward

    def interrupted(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return forward(x)

    model.forward = interrupted  # type: ignore[method-assign]
    return torch.compile(lambda x: model(x) * 2, backend=backend)


@pytest.mark.parametrize("compiled_before", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        called_between_two_graphs,
        after_a_compiled_function,
        after_a_compiled_module,
        in_place_after_a_compiled_function,
        after_another_in_place,
        with_parts_compiled_in_place,
        with_a_compiled_part,
        before_a_compiled_function,
        also_in_a_compiled_function,
    ],
)
def test_model_beside_compiled_code(make: Callable[[nn.Module, Any], Program], compiled_before: bool) -> None:
    """Each call is a step whatever else is compiled, with the same compilations and results."""

    def train(followed: bool) -> tuple[int, list[float], int]:
        torch.compiler.reset()
        counters.clear()
        backend, seen = CompileCounter(), []  # type: ignore[no-untyped-call]
        follower = StepFollower(lambda: seen.append(1), lambda: None, "forward")
        if followed and not compiled_before:
            follower.follow()
        program = make(Parts(), backend)
        if followed and compiled_before:
            follower.follow()
        try:
            with torch.no_grad():
                losses = [program(torch.ones(1)).item() for _ in range(4)]
        finally:
            follower.remove()
        assert vars(nn.Module)["_compiled_call_impl"] is None
        return counters["frames"]["total"], losses, len(seen)

    frames, losses, _ = train(followed=False)
    assert train(followed=True) == (frames, losses, 4)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # raised by the code that torch.compile resumes
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("sign", ["forward", "backward"])
def test_steps_of_a_compiled_function(sign: str, fails: bool) -> None:
    """A step that ends between two graphs is counted after the compiled function; the library is not compiled."""
    seen: list[int] = []
    within: list[int] = []

    @torch.compiler.disable
    def note() -> None:
        within.append(len(seen))
        if fails:
            raise ZeroDivisionError

    def train(followed: bool) -> int:
        torch.compiler.reset()
        counters.clear()
        within.clear()
        model = Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        call_forward = model.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return call_forward(x)

        model.forward = forward  # type: ignore[method-assign]

        @torch.compile(backend="eager")
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            note()
            return loss

        follower = StepFollower(lambda: seen.append(1), int, sign)
        if followed:
            follower.follow()
        try:
            for number in range(4):
                with contextlib.suppress(ZeroDivisionError):
                    step(torch.ones(1))
                assert len(seen) == followed * (number + 1)
        finally:
            follower.remove()
        return int(counters["frames"]["total"])

    frames = train(followed=False)
    assert train(followed=True) <= frames
    assert within == [0, 1, 2, 3]


def test_dropped_model() -> None:
    """A follower keeps neither the model nor candidates for it alive."""
    follower = OutermostModel(lambda _: None, lambda _: None)
    follower.follow()
    try:
        models = [Scaled(), Scaled()]
        models[1].compile(backend="eager")
        references = [weakref.ref(model) for model in models]
        models[0](torch.ones(1))
        del models
        gc.collect()
        assert [reference() for reference in references] == [None, None]
    finally:
        follower.remove()


def test_wrapper_around_a_module_compiled_in_place() -> None:
    """Calls of a module that another tool wrapped do not count as calls of the followed model."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 3)
    found: list[nn.Module] = []
    called: list[nn.Module] = []
    follower = OutermostModel(found.append, called.append)
    follower.follow()
    try:
        other.compile(backend="eager")
        patched = vars(other)["_compiled_call_impl"]
        other._compiled_call_impl = lambda *args: patched(*args)
        for module in (model, other, other):
            assert module(torch.ones(1, 2)).shape == (1, module.out_features)
    finally:
        follower.remove()
    assert (found, called) == ([model], [model])


@pytest.mark.parametrize("name", ["train", "evaluate", "data"])
def test_ranges_that_begin_step_0(name: str) -> None:
    """Only torch's own ranges of data loading and ``zero_grad`` begin step 0."""
    begins: list[bool] = []
    follower = StepFollower(int, int, on_begin=lambda: begins.append(True))
    follower.follow()
    try:
        with torch.profiler.record_function(name):
            assert not begins
        next(iter(torch.utils.data.DataLoader([0])))
        assert begins == [True]
    finally:
        follower.remove()


def test_internal_error_before_a_backward_pass(lenient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass runs exactly once even if the library fails before it."""

    def fail() -> bool:
        raise RuntimeError("broken")

    gradients: list[torch.Tensor] = []
    follower = StepFollower(int, int)
    follower.follow()
    try:
        monkeypatch.setattr(autograd, "in_backward", fail)
        weight = torch.ones(2, requires_grad=True)
        weight.register_hook(gradients.append)
        weight.sum().backward()
    finally:
        follower.remove()
    assert 1 == len(gradients)
