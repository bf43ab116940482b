"""Where operators are called: pass, region, module and line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import instrument
from instrument.syncs.counting.calls import Place
from instrument.syncs.counting.cuda_memory import EXTRA


class Inner(nn.Module):
    """A layer whose line is below."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Outer(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(), Inner()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def places(run: Callable[[], Any], name: str) -> list[Place]:
    """Return the places of the operators with this name, in order."""
    report = instrument.dry_run(run)
    if report.error is not None:
        raise report.error
    assert report.counts is not None
    return [place for call, place in report.counts.record.span() if call.name == f"aten::{name}"]


def line(place: Place) -> str:
    return place.site.code if place.site is not None else ""


def test_backward_has_the_place_of_its_forward() -> None:
    """Matmuls of the backward pass have module and line of their forward operator, the last layer first."""

    def step() -> None:
        Outer().cuda()(torch.ones(2, 4, device="cuda", requires_grad=True)).sum().backward()

    found = places(step, "mm")
    modules = ["Outer.layers.0", "Outer.layers.1"]
    assert [*modules, *(module for module in modules[::-1] for _ in range(2))] == [place.module for place in found]
    assert ["forward"] * 2 + ["backward"] * 4 == [place.phase for place in found]
    assert {"return x @ self.weight"} == set(map(line, found))


def test_regions() -> None:
    """An operator has the open regions, and in the backward pass those of its forward operator."""

    def step() -> None:
        x = torch.ones(2, 2, device="cuda", requires_grad=True)
        with instrument.annotate("outer"), instrument.annotate("inner"):
            y = x.sigmoid()
        with instrument.annotate("loss"):
            y.sum().backward()

    (forward,), (backward,) = places(step, "sigmoid"), places(step, "sigmoid_backward")
    assert ("outer", "inner") == forward.region == backward.region
    assert ("forward", "backward") == (forward.phase, backward.phase)


def test_library_lines() -> None:
    """The user's line is the one that calls the model; the line of the library is beside it."""

    def step() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda()
        model(torch.ones(2, 4, device="cuda"))  # called here

    for place in places(step, "addmm"):
        assert "called here" in line(place)
        assert place.via is not None
        assert place.via.file.endswith("linear.py")


class Descent(torch.optim.Optimizer):
    """An optimizer of the program's own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad)


def test_phase_of_optimizers() -> None:
    """Updates and the clipping of gradients are of the optimizer, in torch and in the program."""

    def step() -> None:
        model = nn.Linear(4, 4).cuda()
        optimizer = Descent(model.parameters())
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for name in ("sub_", "_foreach_norm"):
        assert {"optimizer"} == {place.phase for place in places(step, name)}


class Closing(Descent):
    """Calls its closure, and updates in functions of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for parameter in self.param_groups[0]["params"]:
            self.update(parameter)

    def update(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.addcmul_(parameter.grad, parameter.grad)


UPDATES = {
    torch.optim.SGD: "_foreach_add_", torch.optim.Adam: "_foreach_addcdiv_", torch.optim.LBFGS: "neg",
    Closing: "addcmul_",
}  # fmt: skip


@pytest.mark.parametrize("kind", UPDATES)
def test_phase_of_closures(kind: Any) -> None:
    """What an optimizer calls as its closure is no part of the update, though it is called by it."""

    def step() -> None:
        weight = torch.ones(4, 4, device="cuda", requires_grad=True)
        x = torch.ones(2, 4, device="cuda")
        optimizer = kind([weight], lr=0.1) if kind is not Closing else kind([weight])

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (x @ weight).square().sum()
            loss.backward()
            return loss

        optimizer.step(functools.partial(closure))
        if kind is not torch.optim.LBFGS:
            optimizer.step(functools.partial(functional.mse_loss, x, x))  # a closure without a line of the program

    assert {"forward", "backward"} == {place.phase for place in places(step, "mm")}
    assert {"optimizer"} == {place.phase for place in places(step, UPDATES[kind])}
    assert {"forward"} >= {place.phase for place in places(step, "mse_loss")}


def test_recomputed_module() -> None:
    """A module that runs again has its path and its lines of the first time."""

    def step() -> None:
        model = Outer().cuda()
        x = torch.ones(2, 4, device="cuda", requires_grad=True)
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()  # runs twice

    found = places(step, "mm")
    phases = ["forward"] * 2 + ["recomputed"] + ["backward"] * 4  # nothing saved needs the last layer again
    assert phases == [place.phase for place in found]
    assert (found[0].module, found[0].site) == (found[2].module, found[2].site)


def test_backward_on_another_thread() -> None:
    """A pass on a thread that made no node has at least its phase."""
    from threading import Thread

    def step() -> None:
        y = torch.ones(2, 2, device="cuda", requires_grad=True).sigmoid().sum()
        thread = Thread(target=y.backward)
        thread.start()
        thread.join()

    assert ["backward"] == [place.phase for place in places(step, "sigmoid_backward")]


def test_deep_recursion_is_one_walk_each() -> None:
    """The line is found from any depth."""

    def deep(depth: int) -> torch.Tensor:
        return deep(depth - 1) if depth else torch.ones(2, device="cuda").cos()

    def step() -> None:
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 2000))
        deep(200)

    (place,) = places(step, "cos")
    assert line(place).startswith("return deep(depth - 1)")


def test_functional_calls_outside_modules() -> None:
    """An operator outside of all modules has none."""

    def step() -> None:
        functional.gelu(torch.ones(2, device="cuda"))

    (place,) = places(step, "gelu")
    assert ("", 'functional.gelu(torch.ones(2, device="cuda"))') == (place.module, line(place))


class Strange(nn.Module):
    """Its parameters are no tensors, and its modules cannot be listed."""

    def parameters(self, recurse: bool = True) -> Any:
        return iter([{}])

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class StrangeDescent(Descent):
    """Its state is a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        vars(self)["state"] = []


def test_strange_models_and_optimizers(lenient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of ours do not reach a program; what cannot be counted is said."""
    rule: Any = EXTRA[torch.ops.aten.sum.default]
    monkeypatch.setitem(EXTRA, torch.ops.aten.sum.default, lambda *arguments: rule())

    def step() -> None:
        linear = nn.Linear(4, 4).cuda()
        optimizer = StrangeDescent(linear.parameters())
        Strange()(linear(torch.ones(2, 4, device="cuda"))).sum().backward()
        optimizer.step()

    report = instrument.dry_run(step)
    assert report.finished, report.ended
    assert report.counting_failed
    assert report.counts is not None
    assert {"aten::addmm", "aten::sum", "aten::sub_"} <= {row.name for row in report.counts.step.by("operator")}
    assert ["Linear"] == [place.module for place in places(step, "addmm")]
