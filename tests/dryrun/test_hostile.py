"""Dry runs of programs that go around what is watched: other threads, subclasses, scripts, processes, Ctrl-C."""

from __future__ import annotations

import asyncio
import copy
import inspect
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

import instrument
from instrument import dry_run
from instrument.dryrun import session
from instrument.dryrun.run import dry_run_file
from instrument.syncs.report import SyncReport

from .test_dry_run import gpu, listed, unchanged

__all__ = ["unchanged"]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
both = pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
SOURCE = str(Path(instrument.__file__).parent.parent)


def finished(step: Callable[[], object], **more: Any) -> SyncReport:
    """The report of a run that came to its end."""
    report = dry_run(step, **more)
    assert report.error is None, report
    return report


def ops(report: SyncReport) -> dict[str, int]:
    """How often each operation waited."""
    counts: Counter[str] = Counter()
    for found in report.syncs:
        counts[found.op] += found.count
    return dict(counts)


def notes(report: SyncReport) -> list[str]:
    return [found.cause for found in report.not_covered]


def alone(code: str) -> Any:
    """What ``code`` prints as JSON in a process of its own, which it may end."""
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": SOURCE}, capture_output=True, timeout=120
    )
    assert 0 == result.returncode, result.stderr.decode()[-3000:]
    return json.loads(result.stdout)


# ---------------------------------------------------------------------------------- other threads and processes


@both
def test_a_pool_of_before(fake: bool) -> None:
    """A pool of threads that worked before is watched while the run lasts."""
    with ThreadPoolExecutor(1) as pool:
        assert "0" == pool.submit(str, 0).result()

        def step() -> None:
            value = gpu(3)
            pool.submit(lambda: value.sum().item()).result()
            pool.submit(lambda: torch.ones(3, device="cuda").tolist()).result()

        report = finished(step, fake=fake)
        assert {"item": 1, "tolist": 1} == ops(report)
        assert not any("threads that were running before" in sentence for sentence in report.coverage)
        assert not pool.submit(torch.cuda.is_available).result()


def test_other_threads_of_before() -> None:
    """Threads that cannot be watched are named, but for one that only draws progress bars."""
    progress = pytest.importorskip("tqdm").tqdm(total=1, file=io.StringIO())
    assert progress.monitor is None or progress.monitor.is_alive()
    go = threading.Event()
    thread = threading.Thread(target=go.wait, args=(30,), name="prefetcher")
    thread.start()
    try:
        report = finished(lambda: gpu(2))
    finally:
        go.set()
        thread.join()
        progress.close()
    assert "threads that were running before were not watched: prefetcher" in report.coverage


def test_another_process(capfd: pytest.CaptureFixture[str]) -> None:
    """A process that the step starts is said not to be watched."""
    import multiprocessing

    def step() -> None:
        gpu(2)
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()
        assert 0 == process.exitcode

    assert ["what another process does was not checked"] == notes(finished(step))


@both
def test_workers_of_a_dataloader(fake: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """They work on the CPU, as always, and are no gap."""

    def step() -> None:
        gpu(1)
        batches = list(DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2, num_workers=1))
        assert [(2,)] * 3 == [tuple(batch.shape) for (batch,) in batches]
        assert not batches[0][0].is_cuda

    report = finished(step, fake=fake)
    assert ([], []) == (report.syncs, report.not_covered)
    assert "Error" not in capfd.readouterr().err


DISTRIBUTED = """
import json, warnings
import torch, torch.distributed as dist
from torch import nn
import instrument

warnings.simplefilter("ignore")

def step():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        body()
    finally:
        dist.destroy_process_group()

def ddp():
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2, device="cuda"), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.ones(2, 4, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        loss.item()

def dtensor():
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh = dist.init_device_mesh("cuda", (1,))
    value = distribute_tensor(torch.ones(4, 4, device="cuda"), mesh, [Shard(0)])
    assert (value * 2).device.type == "cuda"
    (value * 2).sum().full_tensor().item()
    value.to_local().sum().tolist()

told = []
for body in (ddp, dtensor):
    report = instrument.dry_run(step)
    found = sorted([one.op, one.count] for one in report.syncs)
    told.append([repr(report.error), found, sorted({one.cause for one in report.not_covered})])
print(json.dumps(told))
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="a build without it")
def test_distributed() -> None:
    """DDP and DTensor run on gloo: their buckets and shards are on the GPU, and what reads them waits."""
    ddp, dtensor = alone(DISTRIBUTED)
    gloo = "collectives ran on gloo instead of nccl"
    assert ["None", [["item", 3]], [gloo]] == ddp
    assert ["None", [["item", 1], ["tolist", 1]]] == dtensor[:2]
    assert gloo in dtensor[2]


# ------------------------------------------------------------------------------- what is traced, scripted, whole


def test_export() -> None:
    """torch.export looks at shapes only: the step goes on, and the report says so."""

    def step() -> None:
        torch.export.export(nn.Linear(3, 3, device="cuda"), (gpu(2, 3),))
        gpu(2).sum().item()

    report = finished(step)
    assert 1 == ops(report)["item"]
    assert "what runs under FakeTensorMode, as torch.export does, was not checked" in notes(report)


ABORTING = """
import copy, json
import torch
from torch import nn
import instrument

def exports():
    torch.ones(3, device="cuda").sum().item()
    torch.export.export(nn.Linear(3, 3, device="cuda"), (torch.ones(2, 3, device="cuda"),))

def copies():
    model = nn.Linear(3, 3, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3, device="cuda")).sum().backward()
    optimizer.step()
    for _ in range(50):
        state = copy.deepcopy(optimizer.state_dict())
        assert state["state"][0]["step"].item() == 1, state
        torch.ones(30000)
    weight = copy.deepcopy(model.weight)
    assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_cuda
    assert copy.deepcopy(model).weight.is_cuda
    pair = copy.deepcopy([weight, weight])
    assert pair[0] is pair[1] is not weight

told = []
for step in (exports, copies):
    report = instrument.dry_run(step, fake=True)
    told.append([type(report.error).__name__, [one.op for one in report.syncs]])
print(json.dumps(told))
"""


def test_without_data_nothing_ends_the_process() -> None:
    """Where tensors have no data, torch.export ends the step, and copies of state are like others."""
    assert [["RuntimeError", ["item"]], ["NoneType", []]] == alone(ABORTING)


def test_scripting() -> None:
    """TorchScript compiles during a run, and afterwards."""

    def step() -> None:
        scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))).cuda()
        scripted(gpu(2, 3)).sum().item()

    report = finished(step)
    assert 1 == ops(report)["item"]
    assert "what a scripted function does with devices was not checked" in notes(report)
    again = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)))
    assert (2, 3) == again(torch.ones(2, 3)).shape


def doubled(value: torch.Tensor) -> torch.Tensor:
    return value.cpu() * 2


def test_a_scripted_function() -> None:
    """What it does with devices is said not to be looked at."""
    function = torch.jit.script(doubled)
    report = finished(lambda: function(gpu(2)))
    assert ["what a scripted function does with devices was not checked"] == notes(report)


@both
@pytest.mark.filterwarnings("ignore:.*flex_attention")
def test_higher_order_operators(fake: bool) -> None:
    """flex_attention and torch.cond run; what their results are read for waits."""
    from torch.nn.attention.flex_attention import flex_attention

    def step() -> None:
        query = gpu(1, 1, 16, 16)
        attended = flex_attention(query, query, query)
        chosen = torch.cond(query.sum() > 0, torch.neg, torch.abs, (query,))
        assert attended.is_cuda
        assert chosen.is_cuda
        attended.sum().item()
        chosen.sum().tolist()

    report = finished(step, fake=fake)
    assert {"item": 1, "tolist": 1} == ops(report)
    for name in ("flex_attention", "cond"):
        assert f"what the operator {name} does inside was not checked" in notes(report)


# -------------------------------------------------------------------------------- subclasses, patches, modes


class Scaled(torch.Tensor):
    """A tensor in a tensor, as DTensor and quantised ones are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Scaled:
        return Scaled(inner["inner"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return torch.utils._pytree.tree_map_only(cls, lambda one: one.inner, value)

        if func is torch.ops.aten.abs.default:
            args[0].inner.nonzero()
        out = func(*unwrap(args), **unwrap(kwargs or {}))
        return cls(out) if isinstance(out, torch.Tensor) else out


@both
def test_wrappers_of_tensors(fake: bool) -> None:
    """What a tensor wraps is on the GPU, and what is computed with it; what its class does inside is seen."""

    def step() -> None:
        value = Scaled(gpu(3))
        assert value.is_cuda
        out = value * 2
        assert isinstance(out, Scaled)
        assert out.is_cuda
        assert out.inner.is_cuda
        value.abs()
        out.sum().item()

    report = finished(step, fake=fake)
    assert [("abs", 1, "value.abs()"), ("item", 1, "out.sum().item()")] == listed(report)


class Passing(TorchFunctionMode):
    """Hands everything on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """Hands everything on, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_functions_handed_on() -> None:
    """What hands functions on is not the line that waits."""

    def step() -> None:
        value = gpu(3)
        with Passing():
            value.sum().item()
            value.tolist()
        value.as_subclass(Own).mean().item()

    expected = [
        ("item", 1, "value.sum().item()"), ("tolist", 1, "value.tolist()"),
        ("item", 1, "value.as_subclass(Own).mean().item()"),
    ]  # fmt: skip
    assert expected == listed(finished(step))


@both
def test_patched_methods(fake: bool) -> None:
    """A method that the program replaces does what it did."""
    held = {name: getattr(torch.Tensor, name) for name in ("to", "item")}

    def step() -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, method in held.items():
                patch.setattr(torch.Tensor, name, lambda self, *a, m=method, **k: m(self, *a, **k))
            value = torch.ones(2).to("cuda")
            assert value.is_cuda
            value.sum().item()

    assert {"to": 1, "item": 1} == ops(finished(step, fake=fake))


# ------------------------------------------------------------------------------------- where things are


@both
@pytest.mark.parametrize(
    ("where", "on_gpu", "loads"),
    [
        (None, True, 2),
        ("cuda", True, 2),
        (torch.device("cuda"), True, 2),
        ("cpu", False, 0),
        ({"cuda:0": "cpu"}, False, 0),
        (lambda storage, place: storage, False, 0),
    ],
    ids=["none", "text", "device", "cpu", "table", "function"],
)
def test_load_into(fake: bool, where: Any, on_gpu: bool, loads: int) -> None:
    """A checkpoint is loaded to where it was, or where it is asked to; only copies to the GPU wait."""

    def step() -> None:
        file = io.BytesIO()
        with instrument.allow_sync("set up"):
            torch.save(nn.Linear(3, 3, device="cuda").state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert [on_gpu] * 2 == [value.is_cuda for value in loaded.values()]

    assert ({"load": loads} if loads else {}) == ops(finished(step, fake=fake))


@both
def test_pickled_modules(fake: bool) -> None:
    """Unpickled, a module is on the GPU again."""

    def step() -> None:
        with instrument.allow_sync("pickled"):
            model = pickle.loads(pickle.dumps(nn.Linear(3, 3, device="cuda")))
        assert model.weight.is_cuda
        model.weight.sum().item()

    assert {"item": 1} == ops(finished(step, fake=fake))


@both
def test_shared_memory(fake: bool) -> None:
    """On the GPU there is nothing to do."""

    def step() -> None:
        value, model = gpu(3), nn.Linear(3, 3, device="cuda")
        assert value.share_memory_() is value
        assert model.share_memory() is model

    report = finished(step, fake=fake)
    assert ([], []) == (report.syncs, report.not_covered)


MIXED: dict[str, Callable[[], Any]] = {
    "add": lambda: gpu(3) + torch.ones(3),
    "linear": lambda: nn.Linear(3, 3, device="cuda")(torch.ones(2, 3)),
    "cat": lambda: torch.cat([gpu(3), torch.ones(3)]),
    "foreach": lambda: torch._foreach_add([gpu(3)], [torch.ones(3)]),
}


@both
@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices(fake: bool, name: str) -> None:
    """What a GPU would refuse goes on, and fails the run."""
    report = finished(MIXED[name], fake=fake)
    assert report.not_covered, report
    assert "takes tensors of the CPU and of the GPU, which raises an error on a GPU" in notes(report)[0]
    with pytest.raises(AssertionError, match="would not run on a GPU"):
        report.assert_max(99)


@both
def test_one_number_of_the_cpu(fake: bool) -> None:
    """Tensors of one number may be on the CPU, as on a GPU."""

    def step() -> None:
        gpu(3) * torch.tensor(2.0)
        gpu(3).clamp(torch.tensor(0.0), torch.tensor(1.0))

    finished(step, fake=fake).assert_max(0)


def test_moved_tensors_of_before() -> None:
    """A model that is named on the GPU, with batches that stay on the CPU, fails."""
    model, optimizer = nn.Linear(3, 1), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 3).to("cpu")).sum().backward()
        optimizer.step()

    assert "would not run on a GPU" in str(finished(step, on_gpu=[model, optimizer]).over(9))


OPTIMIZERS: list[Callable[[Any], Any]] = [
    torch.optim.AdamW,
    lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    torch.optim.Adagrad,
    torch.optim.LBFGS,
]


@both
@pytest.mark.parametrize("make", OPTIMIZERS, ids=["AdamW", "SGD", "Adagrad", "LBFGS"])
def test_an_optimizer_that_stepped_before(fake: bool, make: Callable[[Any], Any]) -> None:
    """The state of an optimizer is where the parameters are, though ``on_gpu`` names the model alone."""
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, unnamed = make(model.parameters()), torch.optim.AdamW(other.parameters())

    def loss(where: str = "cuda") -> torch.Tensor:
        optimizer.zero_grad()
        out = model(torch.ones(2, 3, device=where)).sum()
        out.backward()
        return out

    optimizer.step(lambda: loss("cpu"))
    other(torch.ones(3)).sum().backward()
    unnamed.step()

    def step() -> None:
        held = unnamed.state[other.weight]["exp_avg"]
        assert not held.is_cuda
        optimizer.step(loss)

    assert [] == finished(step, fake=fake, on_gpu=[model]).not_covered


def test_a_copy_that_existed_before() -> None:
    """A copy of the model, as for an average of its weights, has to be named, and the message says so."""
    model = nn.Linear(3, 1)
    average = copy.deepcopy(model)

    def step() -> None:
        with torch.no_grad():
            torch._foreach_lerp_([*average.parameters()], [*model.parameters()], 0.1)

    reason = str(finished(step, on_gpu=[model]).over(9))
    assert reason.startswith("would not run on a GPU: _foreach_lerp_ takes tensors of the CPU and of the GPU")
    assert "is on the CPU unless on_gpu names it: on_gpu=[model, optimizer, copy]" in reason
    finished(step, on_gpu=[model, average]).assert_max(0)


device = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_device_chosen_before() -> None:
    """A device that was chosen where there is no GPU is not a mistake of the step: the message says what to do."""
    model = nn.Linear(3, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        (model(torch.ones(2, 3).to(device)).sum() - torch.zeros(1, device=device)).backward()
        optimizer.step()

    line = inspect.getsourcelines(step)[1] + 1
    report = finished(step, on_gpu=[model, optimizer])
    assert 1 == len(report.not_covered)
    assert str(report.over(9)).startswith("the device was chosen before the dry run began, without a GPU, so ")
    assert f"test_hostile.py:{line} uses the CPU. Choose the device inside the step" in str(report.over(9))
    assert "uses the CPU: if the device was chosen" in dry_run(step).unavailable_reason

    def by_mistake() -> None:
        model(torch.ones(2, 3, device="cpu")).sum().backward()

    assert str(finished(by_mistake, on_gpu=[model]).over(9)).startswith("would not run on a GPU: addmm takes")


def test_exchanged() -> None:
    """DLPack and storages keep where a tensor is."""

    def step() -> None:
        value = gpu(3)
        out = torch.from_dlpack(value)
        assert out.is_cuda
        assert (2, 0) == tuple(map(int, value.__dlpack_device__()))
        out.sum().item()
        value.untyped_storage().cpu()
        torch.ones(3).untyped_storage().cuda()
        value.untyped_storage().cuda()

    assert {"item": 1, "cpu": 1, "cuda": 1} == ops(finished(step))


def test_one_module_is_enough() -> None:
    """``on_gpu`` takes one module, optimizer or tensor without a list."""
    model = nn.Linear(3, 1)
    for named in (model, torch.optim.SGD(model.parameters(), lr=0.1), model.weight):
        assert {"item": 1} == ops(finished(lambda: model.weight.sum().item(), on_gpu=named))


@both
@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_formatted(fake: bool, kind: Any) -> None:
    """A tensor of any shape is read when it is formatted, or printed, once."""

    def step() -> None:
        for shape in ((), (3,), (2, 2)):
            value = torch.zeros(shape, device="cuda")
            value = value if kind is torch.Tensor else nn.Parameter(value)
            f"{value}"
            "{}".format(value)  # noqa: UP032
            format(value)
            print(value, file=io.StringIO())
            str(value)
            repr(value)

    assert {"format": 9, "print": 9} == ops(finished(step, fake=fake))


@both
def test_new_with_data(fake: bool) -> None:
    """`Tensor.new` copies data to where its tensor is."""

    def step() -> None:
        value = gpu(3)
        assert value.new([1.0, 2.0]).is_cuda
        assert value.new(2, 3).is_cuda

    assert {"new": 1} == ops(finished(step, fake=fake))


@both
def test_long_modes(fake: bool) -> None:
    """`mode` sorts rows of more than 2048 elements in a way that waits."""

    def step() -> None:
        gpu(2, 2048).mode()
        gpu(2, 2049).mode()

    assert {"mode": 1} == ops(finished(step, fake=fake))


# ------------------------------------------------------------------------------------------ without data


GUARDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: torch.isnan(x).sum().item(),
    "int": lambda x: torch.isnan(x).int().sum().item(),
    "count": lambda x: torch.count_nonzero(torch.isnan(x)).item(),
    "mean": lambda x: torch.isnan(x).float().mean().item(),
    "max": lambda x: bool(x.isnan().max()),
    "any": lambda x: bool(x.isinf().any()),
    "stack": lambda x: any(torch.stack([torch.isnan(x).any(), torch.isinf(x).any()]).tolist()),
    "or": lambda x: bool((torch.isnan(x) | torch.isinf(x)).any()),
    "logical_or": lambda x: bool(torch.logical_or(x.isnan(), x.isinf()).any()),
    "not": lambda x: not (~x.isnan()).all(),
    "finite": lambda x: not torch.isfinite(x).all(),
    "missing": lambda x: x.numel() - torch.isfinite(x).sum().item(),
    "itself": lambda x: bool((x != x).any()),
}


@pytest.mark.parametrize("name", GUARDS)
def test_checks_find_nothing(name: str) -> None:
    """However a step looks for NaN and infinity, without data it finds none; it waits all the same."""

    def step() -> None:
        if GUARDS[name](gpu(3, 4)):
            raise ValueError("the loss is no number")

    assert 1 == sum(ops(finished(step, fake=True)).values())


def test_clipping_without_data() -> None:
    """The norm of gradients without data is finite."""

    def step() -> None:
        model = nn.Linear(3, 3, device="cuda")
        for _ in range(5):
            model(gpu(1, 3)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    assert 5 == sum(ops(finished(step, fake=True)).values())


def test_the_scale_without_data() -> None:
    """A GradScaler finds nothing infinite, and keeps its scale."""

    def step() -> None:
        weight = nn.Parameter(gpu(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert 4.0 == scaler.get_scale()

    finished(step, fake=True)


# ----------------------------------------------------------------------------------------------- how it ends


async def coroutine() -> None:
    await asyncio.sleep(0)


def generator() -> Iterator[None]:
    yield


async def both_of_them() -> Any:
    yield


class Step:
    """No step, but its class."""


@pytest.mark.parametrize("step", [coroutine, generator, both_of_them, Step, nn.Linear, "text"])
def test_what_is_no_step(step: Any) -> None:
    """What would not run when it is called is refused."""
    with pytest.raises(TypeError, match='"step" must be a plain function without arguments'):
        dry_run(step)


def test_a_step_with_arguments() -> None:
    """Arguments that nobody gives are refused before anything runs; defaults are fine."""
    with pytest.raises(TypeError, match='"step" needs arguments: batch, size'):
        dry_run(lambda batch, *, size: None)  # type: ignore[misc]
    finished(lambda batch=None, *rest, **more: gpu(2))


class Unprintable(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise ZeroDivisionError


@both
def test_an_error_without_words(fake: bool) -> None:
    """An exception that cannot be printed ends the step, and loses nothing."""

    def step() -> None:
        gpu(2).sum().item()
        raise Unprintable

    report = dry_run(step, fake=fake)
    assert isinstance(report.error, Unprintable)
    assert {"item": 1} == ops(report)
    assert "Unprintable" in str(report)
    assert "Unprintable" in report.to_json()


def test_an_error_of_many_words() -> None:
    """A long message is cut to a line, without what moves the cursor."""

    def step() -> None:
        raise ValueError("\x1b[2J" + "x" * 100_000 + "\nsecond line")

    report = dry_run(step)
    assert len(str(report)) < 10_000
    assert "\x1b" not in str(report)


@pytest.mark.skipif(sys.platform == "win32", reason="a folder in use is not removed there")
def test_sarif_of_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the current folder was removed, there is a report all the same."""
    report = finished(lambda: gpu(2).sum().item())
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    (run,) = json.loads(report.to_sarif())["runs"]
    assert 1 == sum(result["level"] == "error" for result in run["results"])


class Interrupting:
    """Sends Ctrl-C at the n-th line that runs in the files that set a dry run up and end it."""

    FILES = (
        "dry/session.py", "dry/cuda.py", "dry/patches.py", "dry/modes.py", "dry/storages.py", "/patch.py",
        "/guard.py",
    )  # fmt: skip

    def __init__(self, at: int) -> None:
        self._left = at
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.replace(os.sep, "/").endswith(self.FILES):
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


@pytest.mark.usefixtures("unchanged")
@pytest.mark.skipif(sys.platform == "win32", reason="os.kill ends the process there")
def test_interrupted_anywhere() -> None:
    """Ctrl-C while a run is set up or ended leaves nothing behind, and another one runs."""
    lines = interrupted(-1)
    assert lines > 500
    early = range(1, 40)
    for at in [*early, *range(early.stop, lines, lines // 60), *range(lines - 20, lines + 1)]:
        interrupted(at)
        assert not session.active, at
        assert not torch.cuda.is_available(), at
        assert 0 == torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack(), at
    assert {"item": 1} == ops(finished(lambda: gpu(2).sum().item()))


# --------------------------------------------------------------------------------------------- several scripts


def test_scripts_with_modules_of_one_name(tmp_path: Path) -> None:
    """Each script imports the module that is beside it."""
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


# ------------------------------------------------------------------------------------------------------- steps


@settings(max_examples=200)
@given(st.dictionaries(st.one_of(st.none(), st.integers(0, 6)), st.integers(1, 9)), st.booleans())
def test_settling_keeps_sums(seen: dict[int | None, int], built: bool) -> None:
    """Waits are counted to steps that exist, or to none; none is lost."""
    run = object.__new__(session.Run)  # what it sets up is no matter here
    run._built = built
    steps = max([step for step in seen if step is not None], default=0)
    settled = run._settled(Counter(seen), max(steps, 1))
    assert sum(seen.values()) == settled.total()
    assert all(step is None or 0 <= step < max(steps, 1) for step in settled)
    assert all(waits > 0 for waits in settled.values())


@settings(max_examples=40)
@given(
    steps=st.integers(1, 5), before=st.integers(0, 2), after=st.integers(0, 2), prepared=st.integers(0, 2),
    evaluated=st.integers(0, 3), exists=st.booleans(),
)  # fmt: skip
def test_steps_of_a_loop(steps: int, before: int, after: int, prepared: int, evaluated: int, exists: bool) -> None:
    """Each step has the waits of its line, before and after the optimizer; an evaluation at the end is none's."""
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
    if steps > 1:
        assert ({None: evaluated} if evaluated else {}) == found.get("tolist", {})
    assert ({None: prepared} if prepared and not exists else {}) == found.get("cpu", {})


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_the_last_evaluation_is_in_no_step(epochs: int) -> None:
    """However many epochs there are, what follows the last update is outside, but for what comes in every step."""

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
    assert {None: 1, **dict.fromkeys(range(2, 4 * epochs, 2), 1)} == found["item"]
    assert {None: 5, **{4 * epoch: 5 for epoch in range(1, epochs)}} == found["tolist"]


def test_a_copy_of_a_model() -> None:
    """A deep copy is where its model is, and has no gradients."""

    def step() -> None:
        model = nn.Linear(3, 1, device="cuda")
        model(gpu(2, 3)).sum().backward()
        twin = copy.deepcopy(model)
        assert twin.weight.is_cuda
        assert twin.weight.grad is None

    assert [] == finished(step).syncs
