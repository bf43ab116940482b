"""Common models: every module called is a region, forward and backward, and training is unchanged."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import instrument
from tests.conftest import Events, annotations
from tests.support import nsys
from tests.support.calls import Calls, Trees, nested
from tests.support.models import HUGGING_FACE, MODELS, build, same, train
from tests.support.programs import ROOT
from tests.support.ranges import Range, outline

pytestmark = pytest.mark.framework

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
WINDOW = 1  # the step that is recorded
NODE = re.compile(r"\w+Backward\d*")
TORCHS_OWN = ("ProfilerStep#", "Optimizer.")  # torch's regions
PRESENT = [name for name in MODELS if name not in HUGGING_FACE or importlib.util.find_spec("transformers")]


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    """Return a model's name; skip the test if its library is missing."""
    if request.param in HUGGING_FACE:
        pytest.importorskip("transformers")
    return str(request.param)


@cache
def expected(name: str) -> list[Trees]:
    """Return the calls of each step."""
    training, trees = build(name), []
    with Calls(training.model) as calls:
        train(training, calls.steps(training.batches, trees))
    return trees


def recorded(path: Path) -> Trees:
    """Return the regions and nodes of a trace."""
    regions = [event for event in annotations(path) if not event["name"].startswith(TORCHS_OWN)]
    nodes = [event for event in annotations(path, "cpu_op") if NODE.fullmatch(event["name"])]
    assert len({event["tid"] for event in regions + nodes}) == 1
    return Trees(outline(nested(ranges(regions))), outline(nested(ranges(regions + nodes))))


def ranges(events: Events) -> list[Range]:
    found = []
    for event in events:
        start, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
        found.append(Range(event["name"], start, start + duration, "push_pop", event["tid"], event["pid"]))
    return found


def indented(text: str, level: int) -> str:
    return "\n".join("  " * level + line for line in text.splitlines())


def state(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield the hooks of ``model``'s modules, and attributes that only an instance has."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            yield name, attribute, list(value) if attribute in HOOKS else None


def test_trace_has_the_tree_of_calls(name: str, tmp_path: Path) -> None:
    """A window on the second step shows its calls and their backwards, with their autograd nodes."""
    training = build(name)
    with instrument.annotate_modules(training.model):
        train(training, instrument.steps(training.batches, tmp_path, at=WINDOW))
    (trace,) = tmp_path.rglob("*.pt.trace.json.gz")
    shown = recorded(trace)
    assert expected(name)[WINDOW].regions == shown.regions
    assert expected(name)[WINDOW].nodes == shown.nodes


def test_training_is_unchanged(name: str, tmp_path: Path) -> None:
    """Losses and gradients of each step are bit-identical to unannotated training, and no hook is left."""
    training = build(name)
    plain = train(training)

    training = build(name)
    before = list(state(training.model))
    during: list[list[Any]] = []

    def watched() -> Iterator[Any]:
        for batch in instrument.steps(training.batches, tmp_path, at=WINDOW):
            during.append(list(state(training.model)))
            yield batch

    with instrument.annotate_modules(training.model):
        trained = train(training, watched())
        after = list(state(training.model))
    assert [step != before for step in during] == [step == WINDOW for step in range(len(during))]
    assert before == after == list(state(training.model))
    assert not any(attribute == "__getstate__" for _, attribute, _ in after)
    assert same(plain, trained)


def test_experts_of_a_mixture_vary() -> None:
    """The mixture calls its experts in another order in each step, and some of them not at all."""
    trees = [step.regions for step in expected("mixture")]
    assert len(trees) == len(set(trees))
    experts = len(build("mixture").model.blocks[0].mlp.experts)
    called = {line.strip() for line in trees[WINDOW].splitlines()}
    assert any(f"blocks.0.mlp.experts.{expert}" not in called for expert in range(experts))


@pytest.mark.nsys
def test_nsight_report_has_the_tree_of_calls(tmp_path: Path) -> None:
    """Nsight Systems shows each call and its backward in all steps, and training is unchanged."""
    script = f"""
        import sys
        from pathlib import Path
        import instrument
        from tests.support.models import build, same, train

        for name in {PRESENT}:
            plain = train(build(name))
            training = build(name)
            with instrument.annotate(name), instrument.annotate_modules(training.model):
                trained = train(training, instrument.steps(training.batches, Path(sys.argv[1], name), at={WINDOW}))
            assert same(plain, trained), name
    """
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    report = nsys.profile(script, tmp_path=tmp_path, args=[str(tmp_path)], env={"PYTHONPATH": paths})
    found = nsys.ranges(report.file)
    assert {"instrument"} == {r.domain for r in found}
    across = {r.name for r in found if r.kind == "start_end"}
    assert across == {"capture", "step"} | {r.name for r in found if r.name.endswith("(backward)")}
    assert all(r.thread == r.end_thread for r in found)
    lines = []
    for name in PRESENT:
        steps = [indented(step.regions, 1) for step in expected(name)]
        steps[WINDOW] = f"  capture\n    step\n{indented(steps[WINDOW], 2)}"
        lines += [name, *steps]
    assert "\n".join(lines) == outline(nested(found))
