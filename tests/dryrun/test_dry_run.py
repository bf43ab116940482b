"""A dry run: what it reports, how it ends, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils import _device

import instrument
from instrument import compat
from instrument.dryrun.run import dry_run, dry_run_file
from instrument.regions import dispatch
from instrument.syncs import policy
from instrument.syncs.report import SyncReport

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
Wait = tuple[str, int, str]  # the operation, how often, the line


def listed(report: SyncReport) -> list[Wait]:
    """The waits of a report, from the first line to the last."""
    found = sorted(report.syncs, key=lambda found: (found.site.line if found.site else 0, found.op))
    return [(each.op, each.count, each.site.code if each.site else "") for each in found]


def gpu(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", **options)


def training(steps: int = 3) -> None:
    """A short training that logs, and waits before, between and after its steps."""
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


# -------------------------------------------------------------------------------------- regions and steps


def test_regions() -> None:
    """A finding names the regions that were open around it, and tells how many waits each had."""

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
    """The optimizer tells the steps: what is before it was made, and after the last one, is of none."""
    report = dry_run(training)
    assert report.error is None
    assert 3 == report.steps
    by_line = {found.site.code.partition("  # ")[2]: dict(found.steps) for found in report.syncs}
    assert {"before": {None: 1}, "each": {0: 1, 1: 1, 2: 1}, "second": {2: 1}, "after": {None: 1}} == by_line
    assert 2 == report.most(*report.syncs)


def test_a_step_without_an_optimizer() -> None:
    """All of it is one step."""
    report = dry_run(lambda: gpu(2).sum().item())
    assert (1, {0: 1}) == (report.steps, dict(report.syncs[0].steps))


def test_an_optimizer_of_before() -> None:
    """An optimizer that was there already tells the steps too, and there is no set-up."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> None:
        for _ in range(2):
            weight.sum().item()
            weight.sum().backward()
            optimizer.step()

    report = dry_run(step, on_gpu=[optimizer])
    assert (2, {0: 1, 1: 1}) == (report.steps, dict(report.syncs[0].steps))


def test_the_first_optimizer_tells_the_steps() -> None:
    """Of several optimizers only the first one that steps counts."""

    def step() -> None:
        weights = [nn.Parameter(torch.ones(2, device="cuda")) for _ in range(2)]
        optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
        for _ in range(2):
            for weight, optimizer in zip(weights, optimizers, strict=True):
                weight.sum().backward()
                optimizer.step()

    assert 2 == dry_run(step).steps


# ------------------------------------------------------------------------------------------------- policy


def test_allowed() -> None:
    """What is allowed is listed with its reason, and counts for nothing."""

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
    """At one line, what is allowed and what is not are two findings."""

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
    """Inside of a block where nothing may wait, a wait is forbidden, but for what is allowed again."""

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


# --------------------------------------------------------------------------------------------- how it ends

PLACES: list[Any] = [
    torch, torch._C, torch.cuda, torch.cuda.Stream, torch.cuda.Event, torch.accelerator, torch.Tensor,
    torch.nn.functional, torch.nn.init, torch.autograd, torch.autograd.graph.saved_tensors_hooks,
    torch.serialization, torch.optim.Optimizer, torch.nn.Module, torch.UntypedStorage, torch.backends.cudnn.m,
    torch.version, threading.Thread, torch._dynamo.eval_frame, torch._subclasses.fake_tensor.FakeTensor,
    torch.distributions.constraints, torch.distributions.constraints._Interval, torch.profiler,
    torch.autocast, sys.modules["torch.autograd.profiler"],
]  # fmt: skip
OPTIMIZERS: Any = sys.modules["torch.optim.optimizer"]  # the package keeps the name to itself
LAZY = {"__warningregistry__", "__annotations__", "__annotate__"}


def contents() -> list[dict[str, Any]]:
    return [{name: value for name, value in vars(place).items() if name not in LAZY} for place in PLACES]


@pytest.fixture
def unchanged() -> Iterator[None]:
    """Compares what a dry run replaces before and after."""
    weight = nn.Parameter(torch.ones(2))
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()  # torch looks for some of its modules in its first step
    before = contents()
    hooks = dict(OPTIMIZERS._global_optimizer_post_hooks)
    generator, device = torch.random.get_rng_state(), _device.CURRENT_DEVICE
    yield
    for place, old, new in zip(PLACES, before, contents(), strict=True):
        assert [] == [name for name in old if name not in new or old[name] is not new[name]], place
        assert set() == {name for name in new.keys() - old.keys() if not isinstance(new[name], ModuleType)}, place
    assert hooks == OPTIMIZERS._global_optimizer_post_hooks
    assert generator.shape == torch.random.get_rng_state().shape
    assert device == _device.CURRENT_DEVICE
    assert not torch.cuda.is_available()
    assert not torch.cuda.is_initialized()
    assert [] == [*compat.function_modes()]
    assert 0 == torch._C._len_torch_dispatch_stack()
    assert not dispatch.recording
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA"):
        torch.ones(2, device="cuda")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("fake", [False, True])
def test_everything_is_put_back(fake: bool) -> None:
    """After a run, and after a second one, which finds the same."""
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
def test_an_error_of_the_step(fake: bool) -> None:
    """It ends the run, is in the report, and is a finding at its line; what was found before is kept."""
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
def test_an_error_inside_of_torch() -> None:
    """It is at the user's line, also where it came from deep within, and names the library's."""
    report = dry_run(lambda: nn.Linear(4, 2, device="cuda")(gpu(3, 5)))
    (note,) = report.not_covered
    assert note.site.code.startswith("report = dry_run(lambda: nn.Linear(4, 2")
    assert note.via.file.endswith("linear.py")


@pytest.mark.usefixtures("unchanged")
def test_tensors_of_two_devices() -> None:
    """What a GPU would refuse is not refused silently: it is carried out, or reported."""

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
    """A KeyboardInterrupt passes."""

    def step() -> None:
        gpu(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dry_run(step, fake=fake)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(("code", "error"), [(None, False), (0, False), (3, True), ("why", True)])
def test_exits(code: Any, error: bool) -> None:
    """A step may end the program; with an error that is one of the run."""

    def step() -> None:
        gpu(2).sum().item()
        sys.exit(code)

    report = dry_run(step)
    assert error == isinstance(report.error, SystemExit)
    assert ["item"] == [op for op, _, _ in listed(report)]


@pytest.mark.usefixtures("unchanged")
def test_one_inside_of_another() -> None:
    """The inner one is refused, and the outer one goes on."""

    def step() -> None:
        with pytest.raises(RuntimeError, match="a dry run is already running"):
            dry_run(lambda: None)
        assert torch.cuda.is_available()
        gpu(2).sum().item()

    assert ["item"] == [op for op, _, _ in listed(dry_run(step))]


@pytest.mark.usefixtures("unchanged")
def test_one_that_cannot_start() -> None:
    """After an argument that is refused, another run can start."""
    with pytest.raises(TypeError, match='"step" must be a plain function'):
        dry_run(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match='"on_gpu" must hold'):
        dry_run(lambda: None, on_gpu=["x"])
    assert dry_run(training).error is None


@pytest.mark.usefixtures("unchanged")
def test_modes_that_the_step_leaves_on() -> None:
    """Settings of the step's own that are there to stay do not break the end of the run."""

    def step() -> None:
        torch.set_default_device("cuda")
        threading.Thread(target=gpu(2).sum, name="late").start()
        torch.cuda.set_device(0)
        torch.cuda.set_stream(torch.cuda.Stream())

    assert dry_run(step).error is None


@pytest.mark.usefixtures("unchanged")
def test_a_thread_that_outlives_the_run() -> None:
    """It goes on, unwatched, and does no harm."""
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


def test_tensors_of_an_earlier_run() -> None:
    """What pretended to be on a GPU in one run is on the host afterwards, and in the next run."""
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


# --------------------------------------------------------------------------------------- the same results


class Block(nn.Module):
    """Some of everything that is in a model."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, device=device)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True, device=device)
        self.norm = nn.LayerNorm(8, device=device)
        self.out = nn.Linear(8, 11, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.attend(hidden, hidden, hidden, need_weights=False)[0]
        return self.out(F.dropout(F.gelu(self.norm(hidden)), 0.2))


def trained(device: str) -> list[torch.Tensor]:
    """Losses, gradients and parameters of three steps."""
    torch.manual_seed(3)
    model = Block(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    results = []
    for _ in range(3):
        tokens = torch.randint(11, (2, 5), device=device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        results += [loss.detach(), *(each.grad.clone() for each in model.parameters())]
        optimizer.step()
    return results + [each.detach() for each in model.parameters()]


def test_the_same_results() -> None:
    """The step computes what it does on the CPU, bit for bit."""
    results: list[torch.Tensor] = []
    report = dry_run(lambda: results.extend(trained("cuda")))
    assert (None, []) == (report.error, report.findings)
    for expected, actual in zip(trained("cpu"), results, strict=True):
        assert torch.equal(expected, actual)


# ------------------------------------------------------------------------------------------------- scripts

SCRIPT = '''
import sys
import torch
import neighbour

seen = torch.ones(2, device="cuda").tolist()

def step():
    neighbour.read(torch.ones(2, device="cuda"))

def needs(batch, size=1):
    """Needs something."""

class Trainer:
    @staticmethod
    def fit():
        torch.ones(2, device="cuda").cpu()

number = 3

if __name__ == "__main__":
    torch.ones(len(sys.argv), device="cuda").sum().item()
    sys.exit(0 if sys.argv[1:] == ["--epochs", "2"] else 5)
'''
NEIGHBOUR = "def read(value):\n    value.sum().item()\n"


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    """A script with functions and a module beside it; what Python knows is as before afterwards."""
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR, "utf-8")
    path = tmp_path / "train_it.py"
    path.write_text(SCRIPT, "utf-8")
    arguments, places, modules, main = list(sys.argv), list(sys.path), set(sys.modules), sys.modules["__main__"]
    yield path
    assert arguments == sys.argv
    assert places == sys.path
    assert main is sys.modules["__main__"]
    left = {name for name in set(sys.modules) - modules if name in ("train_it", "neighbour")}
    for name in left:
        del sys.modules[name]
    assert set() == left - {"neighbour"}


def places(report: SyncReport) -> list[tuple[str, str, int]]:
    return sorted((found.op, Path(found.site.file).name, found.site.line) for found in report.syncs)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("fake", [False, True])
def test_a_function_of_a_script(script: Path, fake: bool) -> None:
    """What the function does is reported, and not what importing the script does."""
    report = dry_run_file(script, "step", fake=fake)
    assert report.error is None
    assert [("item", "neighbour.py", 2)] == places(report)


def test_a_method_of_a_script(script: Path) -> None:
    """A function may be inside of a class."""
    assert [("cpu", "train_it.py", 17)] == places(dry_run_file(script, "Trainer.fit"))


def test_a_script(script: Path) -> None:
    """A script runs as the main program, with its arguments."""
    report = dry_run_file(script, None, args=["--epochs", "2"])
    assert report.error is None
    assert [("item", "train_it.py", 22), ("tolist", "train_it.py", 6)] == places(report)
    assert isinstance(dry_run_file(script, None).error, SystemExit)


def test_a_script_that_fails(script: Path) -> None:
    """Its error is in the report, at its line; so is one on importing it."""
    script.write_text("import torch\ntorch.ones(2, device='cuda').item\nraise OSError('full')\ndef step(): ...\n")
    for function in (None, "step"):
        report = dry_run_file(script, function)
        assert isinstance(report.error, OSError)
        (note,) = report.not_covered
        assert (str(script), 3) == (note.site.file, note.site.line)


def test_a_script_that_cannot_be_compiled(script: Path) -> None:
    """A syntax error is of the script, not of a run."""
    script.write_text("def step(:\n")
    with pytest.raises(ValueError, match=r"cannot import .*train_it\.py: SyntaxError: invalid syntax"):
        dry_run_file(script, "step")


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("nothing", ValueError, "there is no function nothing in "),
        ("Trainer.nothing", ValueError, "there is no function Trainer.nothing in "),
        ("needs", TypeError, "needs in .* needs arguments: batch$"),
        ("number", TypeError, "number in .* must be a plain function"),
    ],
)
@pytest.mark.usefixtures("unchanged")
def test_no_such_function(script: Path, function: str, error: type[Exception], message: str) -> None:
    """What cannot be called is an error of the caller's."""
    with pytest.raises(error, match=message):
        dry_run_file(script, function)


def test_no_such_file(tmp_path: Path) -> None:
    """A missing file is an error of the caller's."""
    with pytest.raises(ValueError, match="there is no file "):
        dry_run_file(tmp_path / "missing.py", None)


def test_a_script_named_as_a_module(script: Path) -> None:
    """A script that has the name of a module which is imported already is found all the same."""
    path = script.with_name("copy.py")
    path.write_text(SCRIPT, "utf-8")
    assert [("item", "neighbour.py", 2)] == places(dry_run_file(path, "step"))
    assert sys.modules["copy"] is copy


# ---------------------------------------------------------------------------------------------- without data


def logged() -> None:
    """Mixed precision, a scaler, clipping and logging."""
    model = Block("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(3):
        tokens = torch.randint(11, (2, 5)).to("cuda", non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if loss.isnan().any():
            raise ValueError("the loss is no number")
        text = f"{step}: {loss.item():.3f}, {norm:.2f}"
        assert text.startswith(str(step))


def test_without_data_the_same_is_found() -> None:
    """Without data the same waits are found, as often, at the same lines."""
    real, fake = dry_run(logged), dry_run(logged, fake=True)
    expected = [
        ("to", 3, 'tokens = torch.randint(11, (2, 5)).to("cuda", non_blocking=True)'),
        ("item", 3, "scaler.step(optimizer)"),
        ("bool", 3, "if loss.isnan().any():"),
        ("format", 3, 'text = f"{step}: {loss.item():.3f}, {norm:.2f}"'),
        ("item", 3, 'text = f"{step}: {loss.item():.3f}, {norm:.2f}"'),
    ]
    for report in (real, fake):
        assert (None, []) == (report.error, report.not_covered)
        assert 3 == report.steps
        assert expected == listed(report)
    assert [found.bytes for found in real.findings] == [found.bytes for found in fake.findings]
    assert len(fake.coverage) == len(real.coverage) + 1


def test_without_data_memory_stays_small() -> None:
    """A layer of 400 GB runs forth and back."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def step() -> None:
        model = nn.Linear(320_000, 320_000, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 320_000, device="cuda")).sum().backward()
        optimizer.step()
        assert model.weight.grad.shape == (320_000, 320_000)
        model.weight.sum().item()

    report = dry_run(step, fake=True)
    assert report.error is None
    assert [("item", 1, "model.weight.sum().item()")] == listed(report)
    kilobytes = 1 if os.uname().sysname == "Linux" else 1024
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300_000 * kilobytes


def test_without_data_a_module_of_before() -> None:
    """What exists already is taken as it is."""
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()

    def step() -> None:
        model(torch.ones(3, 4, device="cuda")).sum().backward()
        model.weight.sum().item()

    report = dry_run(step, fake=True, on_gpu=[model])
    assert (None, ["item"]) == (report.error, [op for op, _, _ in listed(report)])
    assert torch.equal(before, model.weight)


# ----------------------------------------------------------------------------------------- random programs

HOST, PINNED, GPU = "host", "pinned", "gpu"


class Machine:
    """Tensors by where they are, and a count of what waits, told by the documentation of CUDA and torch alone."""

    def __init__(self) -> None:
        self.held = [
            (torch.ones(4), HOST), (torch.ones(4).pin_memory(), PINNED), (torch.ones(4, device="cpu"), HOST),
            (torch.full((4,), 2.0, device="cuda"), GPU),
        ]  # fmt: skip
        self.waits: list[str] = []

    def tensor(self, which: int) -> tuple[torch.Tensor, str]:
        return self.held[which % len(self.held)]

    def keep(self, value: torch.Tensor, where: str) -> None:
        self.held.append((value, where))

    def read(self, how: str, which: int) -> None:
        """A read waits if the tensor is on the GPU."""
        value, where = self.tensor(which)
        READS[how](value)
        self.waits += [how] * (where == GPU)

    def combine(self, how: str, which: int) -> None:
        """What is computed is where its operand is, and never pinned."""
        value, where = self.tensor(which)
        self.keep(CLEAN[how](value), GPU if where == GPU else HOST)

    def view(self, how: str, which: int) -> None:
        """A view is where its base is."""
        value, where = self.tensor(which)
        self.keep(VIEWS[how](value), where)

    def up(self, non_blocking: bool, which: int) -> None:
        """A copy to the GPU waits, unless it may be queued and can be; a tensor that is there stays."""
        value, where = self.tensor(which)
        self.keep(value.to("cuda", non_blocking=non_blocking), GPU)
        self.waits += ["to"] * (where == HOST or (where == PINNED and not non_blocking))

    def down(self, non_blocking: bool, which: int) -> None:
        """A copy to the host waits, unless it may be queued: torch then pins the copy."""
        value, where = self.tensor(which)
        out = value.to("cpu", non_blocking=non_blocking)
        self.keep(out, where if where != GPU else PINNED if non_blocking else HOST)
        self.waits += ["to"] * (where == GPU and not non_blocking)

    def copy(self, non_blocking: bool, target: int, source: int) -> None:
        """A copy between GPU and host waits, unless it may be queued and the host's side is pinned."""
        (to, there), (fro, here) = self.tensor(target), self.tensor(source)
        to.copy_(fro, non_blocking=non_blocking)
        crosses = (there == GPU) != (here == GPU)
        self.waits += ["copy_"] * (crosses and not (non_blocking and PINNED in (there, here)))

    def pin(self, which: int) -> None:
        """Pinning waits for nothing."""
        value, where = self.tensor(which)
        if where != GPU:
            self.keep(value.pin_memory(), PINNED)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda value: value.sum().item(),
    "bool": lambda value: bool((value > 0).all()),
    "tolist": lambda value: value.tolist(),
    "nonzero": lambda value: value.nonzero(),
    "getitem": lambda value: value[value > 0],
    "unique": lambda value: value.unique(),
    "equal": lambda value: torch.equal(value, value.clone()),
    "print": lambda value: str(value),
    "float": lambda value: float(value.mean()),
}
CLEAN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda value: value + 1,
    "clone": lambda value: value.clone(),
    "cat": lambda value: torch.cat([value, value])[:4],
    "zeros": lambda value: torch.zeros_like(value),
    "where": lambda value: torch.where(value > 0, value, -value),
    "masked": lambda value: value.masked_fill(value > 1, 0.0),
    "sorted": lambda value: value.sort().values,
    "softmax": lambda value: value.softmax(0),
    "half": lambda value: value.half().float(),
}
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": lambda value: value.detach(),
    "view": lambda value: value.view(2, 2).view(4),
    "self": lambda value: value[:],
    "data": lambda value: value.data,
}
number = st.integers(0, 50)
command = st.one_of(
    st.tuples(st.just("read"), st.sampled_from(sorted(READS)), number),
    st.tuples(st.just("combine"), st.sampled_from(sorted(CLEAN)), number),
    st.tuples(st.just("view"), st.sampled_from(sorted(VIEWS)), number),
    st.tuples(st.sampled_from(["up", "down"]), st.booleans(), number),
    st.tuples(st.just("copy"), st.booleans(), number, number),
    st.tuples(st.just("pin"), number),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(command, max_size=25), st.booleans())
def test_random_programs(program: list[tuple[Any, ...]], fake: bool) -> None:
    """Whatever a program does, exactly what waits is found, and tensors know where they are."""
    expected: list[str] = []

    def step() -> None:
        machine = Machine()
        for name, *arguments in program:
            getattr(machine, name)(*arguments)
        for value, where in machine.held:
            assert (value.is_cuda, value.is_pinned()) == (where == GPU, where == PINNED)
        expected.extend(machine.waits)

    report = dry_run(step, fake=fake)
    if report.error is not None:
        raise report.error
    found = {each.op: 0 for each in report.syncs}
    for each in report.syncs:
        found[each.op] += each.count
    assert {op: expected.count(op) for op in expected} == found


@pytest.mark.parametrize(
    ("budget", "exceeded"),
    [
        ({"train/forward": 2}, None),
        ({"backward": 0}, None),
        ({"forward": 1}, 'region "forward" waits 2 times in 1 of 3 steps; its budget is 1'),
        (2, None),
        (1, "a step waits 2 times in 1 of 3 steps; its budget is 1"),
    ],
)
def test_a_budget(budget: int | dict[str, int], exceeded: str | None) -> None:
    """What a step may wait in a region is counted anew in each step, and all that `assert_max` looks at."""

    def train() -> None:
        model = nn.Linear(4, 2, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with instrument.annotate("train"), instrument.annotate("forward"):
                loss = model(gpu(3, 4)).sum()
                for _ in range(2 if step == 1 else 1):
                    loss.item()
            loss.backward()
            optimizer.step()

    report = dry_run(train, budget=budget)
    assert exceeded is None or str(report.over()).startswith(exceeded)
    assert (exceeded is None) == (report.over() is None)
    assert report.over(1) is not None
