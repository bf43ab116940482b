"""Dry runs that end early, and how they count steps."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from torch import nn

from instrument import dry_run
from instrument.base.config import settings
from instrument.syncs.dryrun.report import final_counts
from instrument.syncs.dryrun.run import dry_run_file

from .reports import both, finished, gpu, ops

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")


# ----------------------------------------------------------------------------------------------- how it ends


async def coroutine() -> None:
    await asyncio.sleep(0)


def generator() -> Iterator[None]:
    yield


async def both_of_them() -> Any:
    yield


class Step:
    """An object whose class alone is callable."""


@pytest.mark.parametrize("step", [coroutine, generator, both_of_them, Step, nn.Linear, "text"])
def test_refused_steps(step: Any) -> None:
    """What could not run when called is refused."""
    with pytest.raises(TypeError, match='"step" must be a plain function without arguments'):
        dry_run(step)


def test_a_step_with_arguments() -> None:
    """Required arguments are refused before anything runs; defaults are fine."""
    with pytest.raises(TypeError, match='"step" needs arguments: batch, size'):
        dry_run(lambda batch, *, size: None)  # type: ignore[misc]
    finished(lambda batch=None, *rest, **more: gpu(2))


class Unprintable(Exception):
    """An exception that cannot be printed."""

    def __str__(self) -> str:
        raise ZeroDivisionError


@both
def test_unprintable_error(fake: bool) -> None:
    """An exception that cannot be printed ends the step, and no finding is lost."""

    def step() -> None:
        gpu(2).sum().item()
        raise Unprintable

    report = dry_run(step, fake=fake)
    assert isinstance(report.error, Unprintable)
    assert {"item": 1} == ops(report)
    assert "Unprintable" in str(report)
    assert "Unprintable" in report.to_json()


def test_long_error_message() -> None:
    """A long message is cut to one line, without control characters."""

    def step() -> None:
        raise ValueError("\x1b[2J" + "x" * 100_000 + "\nsecond line")

    report = dry_run(step)
    assert len(str(report)) < 10_000
    assert "\x1b" not in str(report)


@pytest.mark.skipif(sys.platform == "win32", reason="a folder in use is not removed there")
def test_sarif_without_a_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report can be written after the current folder was removed."""
    report = finished(lambda: gpu(2).sum().item())
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    (run,) = json.loads(report.to_sarif())["runs"]
    assert 1 == sum(result["level"] == "error" for result in run["results"])


class Interrupting:
    """Sends Ctrl-C at the n-th line that runs in the files that set up and end a dry run."""

    FILES = (
        "dryrun/run.py", "dryrun/cuda.py", "dryrun/patches.py", "base/patch.py", "base/guard.py",
    )  # fmt: skip

    def __init__(self, at: int) -> None:
        self._left = at
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.replace(os.sep, "/").endswith(self.FILES):
            return None
        if frame.f_code.co_name == "_queries_gpu":  # called for thousands of functions
            return None
        if event == "line":
            self.lines += 1
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGINT)
        return self


def interrupted(at: int) -> int:
    """Start and end a run, with Ctrl-C at its n-th line; return how many lines ran."""
    before, tracing = sys.gettrace(), Interrupting(at)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.settrace(tracing)
        try:
            dry_run(lambda: None)
        finally:
            sys.settrace(before)
    except KeyboardInterrupt:
        pass
    else:
        assert at < 0, at
    finally:
        signal.signal(signal.SIGINT, handler)
    return tracing.lines


@pytest.mark.corpus
@pytest.mark.usefixtures("unchanged")
@pytest.mark.skipif(sys.platform == "win32", reason="os.kill ends the process there")
def test_interrupted_anywhere() -> None:
    """Ctrl-C while a run is set up or ended leaves nothing behind, and another run starts."""
    interrupted(-1)  # which fills caches
    lines = interrupted(-1)
    assert lines > 500
    moments = range(1, lines + 1)
    if os.environ.get("INSTRUMENT_FUZZ") != "all":
        seed = os.environ.get("INSTRUMENT_FUZZ_SEED") or str(random.randrange(1 << 32))
        print(f"INSTRUMENT_FUZZ_SEED={seed} draws the same moments again")
        moments = [*random.Random(seed).sample(moments, 30), lines]
    for at in moments:
        interrupted(at)
        assert not settings.dry_run, at
        assert not torch.cuda.is_available(), at
        assert 0 == torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack(), at
    assert {"item": 1} == ops(finished(lambda: gpu(2).sum().item()))


# ------------------------------------------------------------------------------------------- several scripts


def test_scripts_with_modules_of_one_name(tmp_path: Path) -> None:
    """Each script imports the module beside it."""
    for name, body in (("a", "return x.sum().item()"), ("b", "return x.sum()")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper.py").write_text(f"def read(x):\n    {body}\n")
        (tmp_path / name / "train.py").write_text(
            "import helper\nimport torch\ndef step():\n    helper.read(torch.ones(3, device='cuda'))\n"
        )
    first, second = (dry_run_file(tmp_path / name / "train.py", "step") for name in ("a", "b"))
    assert (None, None) == (first.error, second.error)
    assert [str(tmp_path / "a" / "helper.py")] == [found.site.file for found in first.syncs if found.site]
    assert [] == second.syncs
    assert "helper" not in sys.modules


# ----------------------------------------------------------------------------------------------------- steps


@budget(max_examples=200)
@given(st.dictionaries(st.one_of(st.none(), st.integers(0, 6)), st.integers(1, 9)), st.booleans())
def test_every_synchronization_is_counted_once(seen: dict[int | None, int], built: bool) -> None:
    """Each synchronization is counted in a step that exists, or in none; no count is lost."""
    steps = max([step for step in seen if step is not None], default=0)
    settled = final_counts(Counter(seen), max(steps, 1), built)
    assert sum(seen.values()) == settled.total()
    assert all(step is None or 0 <= step < max(steps, 1) for step in settled)
    assert all(waits > 0 for waits in settled.values())


@budget(max_examples=40)
@given(
    steps=st.integers(1, 5), before=st.integers(0, 2), after=st.integers(0, 2), prepared=st.integers(0, 2),
    evaluated=st.integers(0, 3), exists=st.booleans(),
)  # fmt: skip
def test_steps_of_a_loop(steps: int, before: int, after: int, prepared: int, evaluated: int, exists: bool) -> None:
    """Each step has its lines' synchronizations, before and after the optimizer; a final evaluation is in none."""
    early = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)

    def read(times: int) -> None:
        value = gpu(2)
        for _ in range(times):
            value.sum().item()

    def evaluate() -> None:
        value = gpu(2)
        for _ in range(evaluated):
            value.tolist()

    def step() -> None:
        if not exists:
            for _ in range(prepared):
                gpu(2).cpu()
        optimizer = early if exists else torch.optim.SGD([nn.Parameter(gpu(2))], lr=0.1)
        for _ in range(steps):
            read(before)
            optimizer.param_groups[0]["params"][0].sum().backward()
            optimizer.step()
            read(after)
        evaluate()

    report = finished(step, on_gpu=early if exists else ())
    assert steps == report.steps
    found = {one.op: dict(one.steps) for one in report.syncs}
    each = before + after
    assert (dict.fromkeys(range(steps), each) if each else {}) == found.get("item", {})
    assert ({None: evaluated} if evaluated else {}) == found.get("tolist", {})
    assert ({None: prepared} if prepared and not exists else {}) == found.get("cpu", {})


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_the_last_evaluation_is_in_no_step(epochs: int) -> None:
    """What follows the last update in the loop is in its step, an evaluation after the loop is not."""

    def step() -> None:
        weight = nn.Parameter(gpu(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(epochs):
            for number in range(4):
                weight.sum().backward()
                optimizer.step()
                if torch.isnan(weight).any():
                    raise ValueError
                if number % 2:
                    weight.sum().item()
            for _ in range(5):
                weight.sum().tolist()

    found = {one.op: dict(one.steps) for one in finished(step).syncs}
    assert dict.fromkeys(range(4 * epochs), 1) == found["bool"]
    assert dict.fromkeys(range(1, 4 * epochs, 2), 1) == found["item"]
    assert {None: 5, **{4 * epoch: 5 for epoch in range(1, epochs)}} == found["tolist"]


def test_a_copy_of_a_model() -> None:
    """A deep copy is on the model's device, and has no gradients."""

    def step() -> None:
        model = nn.Linear(3, 1, device="cuda")
        model(gpu(2, 3)).sum().backward()
        twin = copy.deepcopy(model)
        assert twin.weight.is_cuda
        assert twin.weight.grad is None

    assert [] == finished(step).syncs
