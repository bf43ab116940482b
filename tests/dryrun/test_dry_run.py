"""A dry run: what it reports, how it ends, and that it leaves nothing behind."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import instrument
from instrument.syncs import policy
from instrument.syncs.dryrun.run import dry_run

from .reports import gpu, listed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")


def training(steps: int = 3) -> None:
    """Train briefly with logging, and synchronize before, between and after the steps."""
    model = nn.Linear(4, 2, device="cuda")
    model.weight.sum().item()  # before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = model(gpu(3, 4)).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # each
        if step == 1:
            loss.tolist()  # second
    loss.cpu()  # after


# ----------------------------------------------------------------------------------------- regions and steps


def test_regions() -> None:
    """A finding names the regions that were open, with the number of synchronizations in each."""

    def step() -> None:
        with instrument.annotate("train"):
            for name in ("forward", "backward", "backward"):
                with instrument.annotate(name):
                    gpu(2).sum().item()
        gpu(2).tolist()

    report = dry_run(step)
    assert [("item", 3, "gpu(2).sum().item()"), ("tolist", 1, "gpu(2).tolist()")] == listed(report)
    inner, outer = sorted(report.syncs, key=lambda found: -found.count)
    assert {("train", "forward"): 1, ("train", "backward"): 2} == inner.regions
    assert (("train", "backward"), ()) == (inner.region, outer.region)


def test_steps_of_an_optimizer() -> None:
    """The optimizer's steps are the steps; what comes before its creation or after its last step is in none."""
    report = dry_run(training)
    assert report.error is None
    assert 3 == report.steps
    by_line = {found.site.code.partition("  # ")[2]: dict(found.steps) for found in report.syncs}
    assert {"before": {None: 1}, "each": {0: 1, 1: 1, 2: 1}, "second": {1: 1}, "after": {None: 1}} == by_line
    assert 2 == report.max_in_step(*report.syncs)


def test_a_step_without_an_optimizer() -> None:
    """Without an optimizer the whole function is one step."""
    report = dry_run(lambda: gpu(2).sum().item())
    assert (1, {0: 1}) == (report.steps, dict(report.syncs[0].steps))


def test_earlier_optimizer() -> None:
    """Steps of an optimizer created before the run count too; nothing is reported as set-up."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> None:
        for _ in range(2):
            weight.sum().item()
            weight.sum().backward()
            optimizer.step()

    report = dry_run(step, on_gpu=[optimizer])
    assert (2, {0: 1, 1: 1}) == (report.steps, dict(report.syncs[0].steps))


def test_the_first_optimizer_defines_the_steps() -> None:
    """Of several optimizers, only the first one that steps counts."""

    def step() -> None:
        weights = [nn.Parameter(torch.ones(2, device="cuda")) for _ in range(2)]
        optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
        for _ in range(2):
            for weight, optimizer in zip(weights, optimizers, strict=True):
                weight.sum().backward()
                optimizer.step()

    assert 2 == dry_run(step).steps


# ---------------------------------------------------------------------------------------------------- policy


def test_allowed() -> None:
    """Allowed synchronizations are listed with their reason, and do not count."""

    def step() -> None:
        value = gpu(2)
        with instrument.allow_sync("logged once"):
            value.sum().item()
        value.tolist()  # instrument: allow-sync the figures are shown
        # instrument: allow-sync: at the line below
        value.cpu()

    report = dry_run(step)
    assert [] == report.syncs
    reasons = {"item": "logged once", "tolist": "the figures are shown", "cpu": "at the line below"}
    assert reasons == {found.op: found.allowed for found in report.allowed}
    report.assert_max(0)


def test_the_same_line_with_and_without_allowance() -> None:
    """Allowed and other synchronizations at one line are two findings."""

    def read(value: torch.Tensor) -> None:
        value.sum().item()

    def step() -> None:
        value = gpu(2)
        read(value)
        with instrument.allow_sync("for a reason"):
            read(value)

    report = dry_run(step)
    assert (1, 1) == (report.syncs[0].count, report.allowed[0].count)


def test_forbidden() -> None:
    """Inside a block that forbids synchronizations, one is forbidden unless an inner block allows it again."""

    def step() -> None:
        value = gpu(2)
        with policy.forbid_syncs():
            value.sum().item()
            with instrument.allow_sync("for a reason"):
                value.tolist()
        value.cpu()

    report = dry_run(step)
    assert {"item": True, "tolist": False, "cpu": False} == {f.op: f.forbidden for f in report.findings}
    with pytest.raises(AssertionError, match="once inside no_syncs"):
        report.assert_max(10)


# ----------------------------------------------------------------------------------------------- how it ends


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("fake", [False, True])
def test_everything_is_restored(fake: bool) -> None:
    """Everything is restored after a run, and after a second run, which finds the same."""
    first, second = dry_run(training, fake=fake), dry_run(training, fake=fake)
    assert first.error is None
    assert len(first.syncs) == 4
    assert listed(first) == listed(second)
    assert [found.steps for found in first.findings] == [found.steps for found in second.findings]


def failing() -> None:
    gpu(2).sum().item()
    raise LookupError("nothing there")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("fake", [False, True])
def test_error_in_the_step(fake: bool) -> None:
    """An error ends the run, is in the report, and is a finding at its line; earlier findings are kept."""
    report = dry_run(failing, fake=fake)
    assert isinstance(report.error, LookupError)
    assert not report.finished
    assert [("item", 1, "gpu(2).sum().item()")] == listed(report)
    (note,) = report.not_covered
    assert "the step ended here with LookupError: nothing there" == note.cause
    assert 'raise LookupError("nothing there")' == note.site.code
    with pytest.raises(AssertionError, match="ended early"):
        report.assert_max(10)


@pytest.mark.usefixtures("unchanged")
def test_error_inside_torch() -> None:
    """An error raised deep inside torch is at the user's line, and names the library's line."""
    report = dry_run(lambda: nn.Linear(4, 2, device="cuda")(gpu(3, 5)))
    (note,) = report.not_covered
    assert note.site.code.startswith("report = dry_run(lambda: nn.Linear(4, 2")
    assert note.via.file.endswith("linear.py")


@pytest.mark.usefixtures("unchanged")
def test_tensors_of_two_devices() -> None:
    """What a GPU would refuse is carried out or reported, never refused silently."""

    def step() -> None:
        with pytest.raises(TypeError, match="convert cuda:0 device type tensor to numpy"):
            gpu(2).numpy()
        with pytest.raises(RuntimeError, match="pin"):
            gpu(2).pin_memory()

    report = dry_run(step)
    assert (None, []) == (report.error, report.syncs)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("fake", [False, True])
def test_interrupted(fake: bool) -> None:
    """A KeyboardInterrupt propagates."""

    def step() -> None:
        gpu(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dry_run(step, fake=fake)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(("code", "error"), [(None, False), (0, False), (3, True), ("why", True)])
def test_exits(code: Any, error: bool) -> None:
    """A step may exit the program; an exit with an error is an error of the run."""

    def step() -> None:
        gpu(2).sum().item()
        sys.exit(code)

    report = dry_run(step)
    assert error == isinstance(report.error, SystemExit)
    assert ["item"] == [op for op, _, _ in listed(report)]


@pytest.mark.usefixtures("unchanged")
def test_nested_runs() -> None:
    """A run inside a run is refused, and the outer one goes on."""

    def step() -> None:
        with pytest.raises(RuntimeError, match="a dry run is already running"):
            dry_run(lambda: None)
        assert torch.cuda.is_available()
        gpu(2).sum().item()

    assert ["item"] == [op for op, _, _ in listed(dry_run(step))]


@pytest.mark.usefixtures("unchanged")
def test_run_that_cannot_start() -> None:
    """After a refused argument, another run can start."""
    with pytest.raises(TypeError, match='"step" must be a plain function'):
        dry_run(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match='"on_gpu" must hold'):
        dry_run(lambda: None, on_gpu=["x"])
    assert dry_run(training).error is None


@pytest.mark.usefixtures("unchanged")
def test_modes_that_the_step_leaves_on() -> None:
    """Modes that the step leaves on do not break the end of the run."""

    def step() -> None:
        torch.set_default_device("cuda")
        threading.Thread(target=gpu(2).sum, name="late").start()
        torch.cuda.set_device(0)
        torch.cuda.set_stream(torch.cuda.Stream())

    assert dry_run(step).error is None


@pytest.mark.usefixtures("unchanged")
def test_a_thread_that_outlives_the_run() -> None:
    """A thread that outlives the run continues unwatched, and does no harm."""
    done, go = [], threading.Event()

    def work() -> None:
        go.wait(10)
        done.append(torch.ones(2).sum().item())

    def step() -> None:
        gpu(2)
        thread = threading.Thread(target=work)
        thread.start()
        done.append(thread)

    assert dry_run(step).error is None
    go.set()
    done[0].join(10)
    assert [2.0] == done[1:]


def test_compilation_after_a_run() -> None:
    """torch.compile compiles after a run, also where a thread of the run ended later."""
    test_a_thread_that_outlives_the_run()
    counter = CompileCounter()
    torch.compile(lambda x: x + 1, backend=counter)(torch.ones(2))
    assert 1 == counter.frame_count


def test_tensors_of_an_earlier_run() -> None:
    """Tensors on the pretended GPU of one run are on the host after it, and in the next run."""
    kept: list[torch.Tensor] = []
    dry_run(lambda: kept.append(torch.ones(2, device="cuda")))
    assert kept[0].device == torch.device("cpu")
    assert kept[0].tolist() == [1.0, 1.0]

    def step() -> None:
        gpu(2)
        assert kept[0].is_cpu
        kept[0].sum().item()

    report = dry_run(step)
    assert (None, []) == (report.error, report.syncs)
